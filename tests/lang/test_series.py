"""Series: calls of several codecs run as one give the same bits as separate calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton_checks import PEERS, distances, memory, with_payloads

from codec_calls import SUMS, gradient, table
from gradwire.codecs import QSGD, Cast, Codec, Identity, LowRank, OneBit, TopK
from gradwire.errors import CodecError, ConfigError
from gradwire.lang import KernelCall, Series, kernels
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
FACTOR = 1 / 3


class Rows:
    """Rows of several codecs with payloads, codec by codec, in alternating dtypes."""

    def __init__(self, codecs: list[Codec]) -> None:
        self.made = [kernels(codec, DTYPES[k % 2], "c") for k, codec in enumerate(codecs)]
        stride = max(k.layout.nbytes(max(SIZES)) for k in self.made)
        values = [[gradient(n, k.dtype, seed=n) for n in SIZES] for k in self.made]
        self.parts = [
            with_payloads(k.codec, memory(k.layout, given, stride))
            for k, given in zip(self.made, values, strict=True)
        ]
        self.distances = distances(stride)

    def copy(self) -> Rows:
        copy = object.__new__(Rows)
        copy.made, copy.distances = self.made, self.distances
        copy.parts = [part.on("cpu") for part in self.parts]
        return copy

    @property
    def table(self) -> np.ndarray:
        return np.concatenate([part.rows for part in self.parts])

    def unequal(self, other: Rows) -> list[int]:
        """The codecs whose memory differs."""
        both = enumerate(zip(self.parts, other.parts, strict=True))
        return [k for k, (part, its) in both if part.unequal(its)]

    def calls(self, form: str) -> list[KernelCall]:
        sums, width = form in SUMS, len(SIZES)
        how: dict[str, Any] = {"ranks": PEERS + 1, "rank": 1, "scaled": True} if sums else {}
        return [
            KernelCall(made, form, k * width, k * width + width, **how)
            for k, made in enumerate(self.made)
        ]


def separately(given: Rows, form: str, until: int | None = None) -> Rows:
    """The memory after one call for each of the codecs up to one."""
    left = given.copy()
    rows = left.table
    for call in left.calls(form)[:until]:
        call.kernels.run(
            form, rows[call.first : call.last], call.ranks, call.rank, left.distances,
            FACTOR if call.scaled else 1.0,
        )  # fmt: skip
    return left


def together(given: Rows, form: str, threads: int = 1, **how: bool) -> tuple[Rows, int]:
    """The memory after a series, and the number of calls."""
    left = given.copy()
    return left, in_place(left, form, threads, **how)


def in_place(left: Rows, form: str, threads: int = 1, **how: bool) -> int:
    rows, listed = left.table, left.calls(form)
    series = Series(listed, rows["numel"], threads, **how)
    workspace = torch.empty(series.workspace_nbytes, dtype=torch.uint8)
    return series.bind(rows, workspace, FACTOR).run(0, len(listed), left.distances)


@pytest.mark.parametrize("form", FORMS)
def test_one_call_equals_separate_calls(form: str) -> None:
    given = Rows(MIX)
    expected = separately(given, form)
    assert expected.unequal(given) == [*range(len(MIX))]
    for threads in (1, 2):
        found, calls = together(given, form, threads)
        assert calls == 1
        assert found.unequal(expected) == []
    found, calls = together(given, form, together=False)
    assert calls == len(MIX)
    assert found.unequal(expected) == []


def on_eager(given: Rows, places: tuple[int, ...]) -> None:
    """Interpret the codecs at these indices."""
    for place in places:
        given.made[place] = kernels(given.made[place].codec, given.made[place].dtype, "eager")


def test_ranges_of_calls_and_several_tables() -> None:
    given = Rows(MIX[:6])
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
    assert [m.unequal(expected) for m in left] == [[], []]


def test_other_targets_need_one_call_each() -> None:
    given = Rows(MIX[:4])
    expected = separately(given, "reduce_encode_ef")
    on_eager(given, (1, 3))
    found, calls = together(given, "reduce_encode_ef")
    assert calls == 3
    assert found.unequal(expected) == []


def test_interpreted_codecs_need_one_call_each() -> None:
    given = Rows([QSGD(), LowRank(rank=2, columns=50), Identity(), Cast("fp16")])
    found, calls = together(given, "decode")
    assert calls == 2
    assert found.unequal(separately(given, "decode")) == []


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_malformed_payload_is_named_and_ends_the_series(place: int, together: bool) -> None:
    codecs: list[Codec] = [QSGD(bits=bits) for bits in (2, 3, 8, 2)]
    codecs.insert(place, TopK(density=0.05))
    given = Rows(codecs)
    payload = given.parts[place].payload
    start = int(given.parts[place].rows["payload"][1]) - payload.data_ptr()
    payload[start : start + 4] = 0xFF  # counts beyond the capacity
    expected = separately(given, "decode", until=place)
    with pytest.raises(
        CodecError, match=r"^row 1 of decode: malformed payload for topk:density=.*$"
    ):
        in_place(given, "decode", together=together)
    assert {*given.unequal(expected)} <= {place}


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
