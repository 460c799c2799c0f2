"""Series: calls of several codecs run as one give the same bits as separate calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from codec_calls import SUMS, gradient, table
from gradwire.codecs import QSGD, Cast, Codec, Identity, LowRank, OneBit, TopK
from gradwire.errors import CodecError, ConfigError
from gradwire.lang import ROW, KernelCall, Kernels, Series, kernels
from gradwire.lang.forms import FORMS
from gradwire.lang.kernels import Library

MIX: list[Codec] = [
    *(QSGD(bits=bits) for bits in (2, 3, 8)),
    QSGD(rounding="stochastic"),
    TopK(density=0.05),
    OneBit(block=100),
    Identity(),
]
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 129, 3000]
PEERS = 2
FACTOR = 1 / 3


@dataclass
class Memory:
    """The memory of rows of several codecs, codec by codec.

    Attributes:
        arena: own payloads, then at multiples of `distance` those of the peers.
    """

    made: list[Kernels]
    values: list[torch.Tensor]
    residuals: list[torch.Tensor]
    arena: torch.Tensor

    def copy(self) -> Memory:
        return Memory(
            self.made,
            [t.clone() for t in self.values],
            [t.clone() for t in self.residuals],
            self.arena.clone(),
        )

    @property
    def distance(self) -> int:
        return self.arena.numel() // (1 + PEERS)

    @property
    def table(self) -> np.ndarray:
        rows = np.zeros(len(self.values), ROW)
        at = 0
        for k, (row, values) in enumerate(zip(rows, self.values, strict=True)):
            row["values"], row["residual"] = values.data_ptr(), self.residuals[k].data_ptr()
            row["payload"] = self.arena.data_ptr() + at
            row["source"] = self.arena.data_ptr() + self.distance + at
            row["numel"], row["key"], row["shared"] = values.numel(), 7 + k, 11
            at += self.made[k // len(SIZES)].layout.nbytes(values.numel())
        return rows

    @property
    def distances(self) -> np.ndarray:
        """And the peers' origins, for codecs that redraw."""
        peers = np.arange(PEERS, dtype="i8")
        return np.concatenate([peers * self.distance, peers])

    def same(self, other: Memory) -> bool:
        mine, others = ([*m.values, *m.residuals, m.arena.view(torch.uint8)] for m in (self, other))
        return all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(mine, others, strict=True)
        )

    def calls(self, form: str) -> list[KernelCall]:
        sums = form in SUMS
        width = len(SIZES)
        return [
            KernelCall(
                made, form, k * width, k * width + width,
                ranks=PEERS + 1 if sums else 1, rank=1 if sums else 0, scaled=sums,
            )
            for k, made in enumerate(self.made)
        ]  # fmt: skip


def memory(codecs: list[Codec], target: str = "c") -> Memory:
    """Memory with payloads of these codecs, with alternating dtypes, and of two peers."""
    made = [kernels(codec, DTYPES[k % 2], target) for k, codec in enumerate(codecs)]
    values = [gradient(n, k.dtype, seed=n) for k in made for n in SIZES]
    sizes = [k.layout.nbytes(n) for k in made for n in SIZES]
    residuals = [gradient(t.numel(), seed=4) for t in values]
    found = Memory(
        made, values, residuals, torch.zeros(sum(sizes) * (1 + PEERS), dtype=torch.uint8)
    )
    for place in range(1 + PEERS):
        rows = found.table
        rows["payload"] += np.uint64(place * found.distance)
        rows["key"] += np.uint64(100 * (1 + place))
        for k, kernel in enumerate(made):
            kernel.run("encode", rows[k * len(SIZES) : (k + 1) * len(SIZES)])
    return found


def separately(given: Memory, form: str, until: int | None = None) -> Memory:
    """The memory after one call for each of the codecs up to one."""
    left = given.copy()
    rows = left.table
    for call in left.calls(form)[:until]:
        call.kernels.run(
            form, rows[call.first : call.last], call.ranks, call.rank, left.distances,
            FACTOR if call.scaled else 1.0,
        )  # fmt: skip
    return left


def together(given: Memory, form: str, threads: int = 1, **how: bool) -> tuple[Memory, int]:
    """The memory after a series, and the number of calls."""
    left = given.copy()
    return left, in_place(left, form, threads, **how)


def in_place(left: Memory, form: str, threads: int = 1, **how: bool) -> int:
    rows, listed = left.table, left.calls(form)
    series = Series(listed, rows["numel"], threads, **how)
    workspace = torch.empty(series.workspace_nbytes, dtype=torch.uint8)
    return series.bind(rows, workspace, FACTOR).run(0, len(listed), left.distances)


@pytest.mark.parametrize("form", FORMS)
def test_one_call_equals_separate_calls(form: str) -> None:
    given = memory(MIX)
    expected = separately(given, form)
    assert not expected.same(given)
    for threads in (1, 2):
        found, calls = together(given, form, threads)
        assert calls == 1
        assert found.same(expected)
    found, calls = together(given, form, together=False)
    assert calls == len(MIX)
    assert found.same(expected)


def on_eager(given: Memory, places: tuple[int, ...]) -> None:
    """Interpret the codecs at these indices."""
    for place in places:
        given.made[place] = kernels(given.made[place].codec, given.made[place].dtype, "eager")


def test_ranges_of_calls_and_several_tables() -> None:
    given = memory(MIX[:6])
    expected = separately(given, "decode_sum")
    on_eager(given, (1, 4))
    series = Series(given.calls("decode_sum"), given.table["numel"])
    workspace = torch.empty(series.workspace_nbytes, dtype=torch.uint8)
    left = [given.copy(), given.copy()]
    tables = [m.table for m in left]
    bound = [series.bind(rows, workspace, FACTOR) for rows in tables]
    for first, last, calls in ((4, 6, 2), (0, 3, 2), (3, 4, 1), (0, 0, 0)):
        for one, m in zip(bound, left, strict=True):
            assert one.run(first, last, m.distances) == calls
    assert all(m.same(expected) for m in left)


def test_other_targets_need_one_call_each() -> None:
    given = memory(MIX[:4])
    expected = separately(given, "reduce_encode_ef")
    on_eager(given, (1, 3))
    found, calls = together(given, "reduce_encode_ef")
    assert calls == 3
    assert found.same(expected)


def test_interpreted_codecs_need_one_call_each() -> None:
    given = memory([QSGD(), LowRank(rank=2, columns=50), Identity(), Cast("fp16")])
    found, calls = together(given, "decode")
    assert calls == 2
    assert found.same(separately(given, "decode"))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_malformed_payload_is_named_and_ends_the_series(place: int, together: bool) -> None:
    codecs: list[Codec] = [QSGD(bits=bits) for bits in (2, 3, 8, 2)]
    codecs.insert(place, TopK(density=0.05))
    given = memory(codecs)
    bad = place * len(SIZES) + 1
    start = int(given.table["payload"][bad]) - given.arena.data_ptr()
    given.arena[start : start + 4] = 0xFF  # counts beyond the capacity
    expected = separately(given, "decode", until=place)
    with pytest.raises(CodecError, match=r"^row 1 of decode: malformed payload for TopK\(.*\)$"):
        in_place(given, "decode", together=together)
    behind = (place + 1) * len(SIZES)
    assert all(map(torch.equal, given.values[: bad - 1], expected.values[: bad - 1]))
    assert all(map(torch.equal, given.values[behind:], expected.values[behind:]))


def test_forms_are_compiled_when_a_series_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    values, payload = torch.arange(5.0), torch.zeros(20, dtype=torch.uint8)
    rows = table([values], [payload])
    made = Library(Identity(), torch.float32, "c")  # nothing is compiled
    series = Series([KernelCall(made, "encode", 0, 1)], rows["numel"])
    assert series.bind(rows, torch.empty(0, dtype=torch.uint8)).run(0, 1) == 1
    assert torch.equal(payload.view(torch.float32), values)
    monkeypatch.setenv("GRADWIRE_CC", "no-such-compiler")
    monkeypatch.setenv("GRADWIRE_KERNELS", "no-such-folder")
    made = Library(Identity(), torch.float32, "c")
    with pytest.raises(ConfigError, match="no-such-compiler is not a program"):
        Series([KernelCall(made, "encode", 0, 1)], rows["numel"])
