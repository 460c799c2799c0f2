"""Target triton with selections: ties, malformed payloads, launches, workspace.

As in test_triton.py, kernels are interpreted in a separate process.
"""

from __future__ import annotations

import importlib.util
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton_checks
from test_selections import Kept

from gradwire.codecs import DGC, QSGD, AdaComp, Codec, MSTopK, TernGrad, ThreeLC, TopK
from gradwire.lang import kernels, layout, tiles
from gradwire.lang.emit import triton_rows
from gradwire.lang.ops import abs, concat, gather, scatter, share, topk, trit
from products import EXHAUSTIVE, one_in

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed here"
    ),
    pytest.mark.xdist_group("triton"),
]


@dataclass(frozen=True)
class Trits(Codec):
    """Entries packed five per byte, in several runs, followed by numbers."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(200)
        chosen = topk(abs(g), share(0.9))
        value = gather(g, chosen)
        return concat(chosen=chosen, sign=trit(gather(x * 1e9 + 1.0, chosen)), value=value)

    def decode(self, chosen: Any, sign: Any, value: Any) -> Any:
        return scatter(value + sign * 0.0, chosen)


@EXHAUSTIVE
@pytest.mark.parametrize("codec", [TopK(0.02, "fp32"), TopK(1.0)], ids=repr)
def test_of_equal_keys_the_first_are_selected(
    interpreting: ProcessPoolExecutor, codec: Codec
) -> None:
    few, many = [1.0, -1.0, 0.5] * 300, [2.0] * 9000  # ties in several tiles
    given = (few, many, [0.0] * 700)
    asked = interpreting.submit(
        triton_checks.differences, codec, torch.float32, [], given, ("encode_ef", "reduce_encode")
    )
    assert asked.result() == ""


def test_trits_of_entries(interpreting: ProcessPoolExecutor) -> None:
    asked = interpreting.submit(
        triton_checks.differences, Trits(), torch.float32, [300, 1], (), ("encode", "decode")
    )
    assert asked.result() == ""


@pytest.mark.parametrize("form", one_in(3, ["decode_sum", "decode_add", "decode"]))
def test_malformed_payloads(interpreting: ProcessPoolExecutor, form: str) -> None:
    """A payload that no encode makes is refused, or decoded to the same on all targets.

    Then a codec whose blocks are kept: its flags may be any byte.
    """
    codec, numel = TopK(0.05), 700
    counts, positions = layout(codec).offsets(numel)[:2]
    chance = random.Random(form)
    edits = [
        {},
        {counts: 255, counts + 1: 255},  # too many entries
        dict.fromkeys(range(positions, positions + 35), 255),
        {counts: 0, counts + 2: 0},  # fewer entries than positions: later parts begin elsewhere
        {positions: 255},  # out of order
        {chance.randrange(positions): chance.randrange(256)},
        {positions + chance.randrange(35): chance.randrange(256)},
    ]
    asked = interpreting.submit(triton_checks.verdicts, codec, numel, form, edits).result()
    assert set(asked) <= {"refused", "decoded"}, (asked, edits)
    assert asked[:3] == ["decoded", "refused", "refused"]
    flags = layout(Kept()).offsets(500)[1]
    edits = [{flags: 255, flags + 1: 7}, dict.fromkeys(range(flags, flags + 16), 1)]
    asked = interpreting.submit(triton_checks.verdicts, Kept(), 500, "decode_sum", edits).result()
    assert asked == ["decoded", "decoded"]


def test_a_malformed_payload_is_reported_to_its_caller(interpreting: ProcessPoolExecutor) -> None:
    codec, numel = TopK(0.05), 300
    counts = layout(codec).offsets(numel)[0]
    bad = {counts: 255, counts + 1: 255}
    assert interpreting.submit(triton_checks.marked, codec, numel, bad).result() == []
    # there is no mark if no payload can be malformed
    for target in ("c", "eager"):
        assert kernels(codec, torch.float32, target).mark() is None
    asked = interpreting.submit(triton_checks.has_mark, [QSGD(), codec, ThreeLC()])
    assert asked.result() == [False, True, True]


# launches per form: encode, encode_ef, decode, decode_add, decode_sum, reduce_encode, .._ef
LAUNCHES = {
    QSGD(): [1, 1, 1, 1, 1, 1, 1],
    TernGrad(): [4, 4, 1, 1, 1, 4, 4],  # two reductions
    ThreeLC(): [5, 5, 2, 2, 2, 6, 6],
    TopK(): [13, 13, 2, 2, 2, 14, 14],
    AdaComp(): [15, 15, 2, 2, 2, 16, 16],
    DGC(): [22, 22, 2, 2, 2, 23, 23],
    MSTopK(): [42, 42, 2, 2, 2, 14, 14],
}


@pytest.mark.parametrize("codec", one_in(7, list(LAUNCHES)[2:] + list(LAUNCHES)[:2]), ids=repr)
def test_launches_do_not_depend_on_the_number_of_rows(
    interpreting: ProcessPoolExecutor, codec: Codec
) -> None:
    found = interpreting.submit(triton_checks.launches, codec, [50, 1, 30]).result()
    assert list(found.values()) == LAUNCHES[codec], found


@pytest.mark.parametrize("codec", one_in(4, [ThreeLC(), DGC(), TopK(0.3), Trits()]), ids=repr)
def test_kernels_stay_in_their_workspace(interpreting: ProcessPoolExecutor, codec: Codec) -> None:
    assert interpreting.submit(triton_checks.strays, codec, [0, 170]).result() == []


@EXHAUSTIVE
def test_the_table_agrees_with_the_layout() -> None:
    """Offsets in a payload and capacities, for all rows at once."""
    from gradwire.lang.call import ROW

    rows = np.zeros(5, ROW)
    rows["numel"] = sizes = [1, 79, 4096, 10_001, 100_000]
    for codec in (TopK(0.013), ThreeLC(), Trits(), AdaComp()):
        lay = layout(codec)
        table = tiles.divide(rows, lay).table
        for name, expected in (
            ("tail", [lay.offsets(n)[-1] for n in sizes]),
            ("capacity", [lay.capacity(n) for n in sizes]),
        ):
            assert table[:, tiles.COLUMN[name]].tolist() == expected, (codec, name)
    assert triton_rows.statistics([]) == []
