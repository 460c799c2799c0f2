"""Law 6 for target triton, interpreted on the CPU: the same bytes as the interpreter in torch.

Kernels run in a separate process (triton_checks.py). Tiles are as large as on a GPU: a row of a few
thousand values has a full tile, one that is not full, and its ragged last block.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton_checks
from other_codecs import ODD, SELECTIONS, Kept, ManyBlocks, Odd, Trits
from test_float8 import Stored, borders
from test_targets import NON_FINITE, SPECIAL

from codec_calls import CODECS, DTYPES, WIDTHS, gradient
from gradwire import codecs
from gradwire.codecs import QSGD, Codec, TopK
from gradwire.errors import ConfigError
from gradwire.lang import ROW, encode, forms, ir, kernels, layout, rng, show, tiles
from gradwire.lang.emit import ALU, CASTS, triton, triton_rows
from gradwire.lang.forms import FORMS
from products import EXHAUSTIVE, one_in

Interpreted = Callable[..., Any]  # conftest.py
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed here"
    ),
    pytest.mark.xdist_group("triton"),  # all tests share one process
]


SPECIALS = (SPECIAL * 5, NON_FINITE * 9 + SPECIAL)
ALIKE = (codecs.GradDrop, codecs.HardThreshold)  # use the same kernels as codecs.DGC and TopK
# forms that together have every part of the others
MOST = ("decode_add", "decode_sum", "encode_ef", "reduce_encode")
REST = tuple(form for form in FORMS if form not in MOST)


@dataclass(frozen=True)
class Case:
    """Forms over rows of `sizes` values and of `given` ones; size 0 stands for a full tile, a block
    and one."""

    codec: Codec
    forms: tuple[str, ...] = MOST
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, ...] = (0, 1)
    given: tuple[Any, ...] = (SPECIAL + NON_FINITE,)

    def __str__(self) -> str:
        return f"{self.codec} {self.dtype} {'+'.join(self.forms)}"

    def differences(self) -> str:
        """Runs where Triton interprets kernels."""
        lay = layout(self.codec, self.dtype)
        sizes = [n or (triton_rows.group(lay) + 1) * lay.block + 1 for n in self.sizes]
        given = self.given
        return triton_checks.differences(self.codec, self.dtype, sizes, given, self.forms)


def wide(codec: Codec, forms: tuple[str, ...]) -> Case:
    """In fp32: two tiles and a ragged block; one value; one block; special values."""
    block = layout(codec).block
    if isinstance(codec, ALIKE):
        forms = forms[-1:]
    given = (SPECIALS[0] + SPECIALS[1],) if layout(codec).staged else SPECIALS
    return Case(codec, forms, sizes=(4096 + block + 3, 1, block), given=given)


def narrow(codec: Codec, dtype: torch.dtype) -> Case:
    if layout(codec, dtype).staged:
        return Case(codec, ("encode_ef", "decode_add"), dtype, sizes=(0,))
    return Case(codec, ("encode_ef", "decode_add", "reduce_encode_ef"), dtype)


NAMED = {codecs.name_of(codec): codec for codec in reversed(CODECS)}
FP16, BF16 = DTYPES[1:]
EXTREME = (
    SPECIAL + NON_FINITE,
    [0.0, -0.0, 2.0],
    [-3.0, -0.0],
    [-1e-40] * 200,
    [-2.0, float("inf")],
)
SPARSE = {"sizes": (0,), "given": ()}  # an interpreted launch is slow, and selections take many
FEW = [
    wide(QSGD(rounding="stochastic"), ("decode_sum", "encode_ef")),
    Case(QSGD(), ("decode", "decode_sum"), BF16),  # redraws
    Case(QSGD(bits=7, scale="l2", block=50, rounding="nearest"), ("encode", "decode_add"), FP16),
    Case(codecs.Identity(), ("encode", "reduce_encode_ef"), FP16),
    Case(codecs.Identity(), ("encode_ef", "decode"), sizes=(4096 + 1024 + 3, 1, 1024)),
    Case(NAMED["fp16"], ("encode", "decode"), BF16),
    Case(NAMED["fp8"], ("encode", "decode", "reduce_encode_ef"), BF16),
    Case(Stored(), ("encode_ef",), given=(borders().tolist(),)),
    Case(NAMED["onebit"], ("encode_ef", "decode_add"), BF16),
    Case(codecs.OneBit(), ("encode",)),  # sums of blocks that are powers of two
    Case(QSGD(scale="l2"), ("encode_ef",)),
    Case(NAMED["saturating"], ("reduce_encode", "decode")),
    Case(NAMED["tbq"], ("encode_ef", "decode_sum")),
    Case(NAMED["terngrad"], ("reduce_encode", "encode", "decode"), given=EXTREME),
    Case(NAMED["threelc"], ("encode", "decode_sum")),
    Case(NAMED["randomk"], ("reduce_encode", "decode_add")),
    Case(NAMED["randomshift"], ("encode", "decode"), FP16),
    Case(NAMED["learnedlevels"], ("encode_ef", "decode"), BF16),
    Case(NAMED["rotated"], ("encode_ef", "decode_sum")),
    Case(NAMED["topk"], ("encode_ef", "decode_sum"), **SPARSE),
    Case(NAMED["dgc"], ("encode", "decode"), FP16, **SPARSE),
    Case(NAMED["adacomp"], ("decode_add", "encode"), **SPARSE),
    Case(NAMED["graddrop"], ("decode",), **SPARSE),
    Case(NAMED["hardthreshold"], ("decode",), **SPARSE),
    Case(WIDTHS[-1], ("decode",), **SPARSE),  # codecs.MSTopK
    Case(WIDTHS[0], ("encode", "decode")),  # 1 bit
    *(Case(codec, ("reduce_encode", "decode")) for codec in (*ODD[2:4], ManyBlocks())),
    Case(SELECTIONS[-1], ("decode_sum",), **SPARSE),
    Case(Trits(), ("encode", "decode"), sizes=(300, 1), given=()),
    # blocks of several chunks, whose counts are added up in a launch of their own
    Case(codecs.ThreeLC(block=1), ("encode", "decode_sum"), sizes=(tiles.CHUNK * 2 + 9,)),
    Case(codecs.AdaComp(block=1), ("encode", "decode"), sizes=(tiles.CHUNK * 2,), given=()),
]
TIES = ([1.0, -1.0, 0.5] * 300, [2.0] * 9000, [0.0] * 700)  # the second over several tiles
MANY = [
    *(
        Case(codec, ("encode_ef", "reduce_encode"), sizes=(), given=TIES)
        for codec in (TopK(0.02, "fp32"), TopK(1.0))
    ),
    *(wide(codec, forms) for codec in CODECS for forms in (MOST, REST)),
    *(narrow(codec, dtype) for codec in CODECS for dtype in DTYPES[1:]),
    *(
        Case(codec, ("encode", "decode_add"), sizes=(1, layout(codec).block), given=())
        for codec in WIDTHS
    ),
    *(
        Case(codec, forms, sizes=(5000, 1) if layout(codec).staged else (5000, 1, 70))
        for codec in [*ODD, ManyBlocks(), *SELECTIONS[3:]]
        for forms in (MOST, REST)
    ),
]


def test_triton_equals_eager(interpreted: Interpreted) -> None:
    """In a few forms of every codec, and of programs beyond the codecs."""
    faults = {str(case): found for case in FEW if (found := interpreted(case.differences))}
    assert not faults
    assert {made for made, _ in codecs.REGISTRY.values()} - {codecs.LowRank} <= {
        type(case.codec) for case in FEW
    }


def test_what_lies_beyond_a_tile_takes_no_part_in_an_extreme_of_its_row(
    interpreted: Interpreted,
) -> None:
    """Tiles that are not full have fewer blocks than tensors have lines, and ragged blocks fewer
    elements than columns."""
    rows = ([-3.0 - i % 7 for i in range(100)], [5.0] * 81, [-1e-40] * 3)
    for codec in (codecs.ThreeLC(), Odd(), NAMED["terngrad"]):
        case = Case(codec, ("encode",), sizes=(), given=rows)
        assert interpreted(case.differences) == "", codec


@pytest.mark.parametrize("case", [pytest.param(case, marks=EXHAUSTIVE) for case in MANY], ids=str)
def test_every_form_equals_eager(interpreted: Interpreted, case: Case) -> None:
    assert interpreted(case.differences) == ""


# A block has 1024 values, of which 16 are sampled: 64 apart, from another place in every block. Of
# 2100, 21 are selected; ten large ones where samples are taken promise more than there are.
SAMPLED = [b * 1024 + p * 64 + b * 37 % 64 for b in range(2) for p in range(5)]
MISLEADING = [100.0 + i if i in SAMPLED else i % 89 / 100 for i in range(2100)]
MISLED = [
    MISLEADING,
    [x if x < 50 else -x for x in MISLEADING] + NON_FINITE,
    [0.0 if x < 50 else x for x in MISLEADING],  # fewer than k that are not zero
    [0.0] * 1500,
    [2.0] * 2100,
    [float("nan")] * 1100,
    [1e-40 * (i % 7) for i in range(2100)],
    [1.0],
    gradient(5121, seed=1).tolist(),  # a full tile and others
]


def test_what_is_selected_does_not_depend_on_the_sample(interpreted: Interpreted) -> None:
    """Short rows take no sample, so this is the test of it."""
    ask = triton_checks.sampled_differences
    assert interpreted(ask, TopK(), MISLED, "encode_ef") == ("", 3), "three rows mislead"
    assert interpreted(ask, codecs.AdaComp(), MISLED[:3], "encode")[0] == ""
    many = gradient(2500, seed=2).tolist()  # more blocks than are sampled
    assert interpreted(ask, codecs.AdaComp(block=1), [many], "encode")[0] == ""
    assert interpreted(ask, codecs.MSTopK(), MISLED[1:2], "reduce_encode")[0] == ""


def test_the_rules_are_complete() -> None:
    assert set(ALU) == set(ir.ALU)
    casts = {("code" if d in ir.CODES else d, r) for d, r in (("uint4", "zero"), ("trit", "zero"))}
    assert casts <= set(CASTS)
    assert {*triton.NODES, *triton.WITHIN} == set(ir.OPS) - set(ir.UNFUSED)


def test_a_missing_device_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"target 'triton': there is no CUDA or ROCm device"):
        kernels(QSGD(bits=3), torch.float32, "triton")
    with pytest.raises(ConfigError, match="target 'triton'"):
        encode(QSGD(bits=3), torch.zeros(3), target="triton")


def test_the_source_can_be_shown() -> None:
    text = show(QSGD(), "triton")
    assert "def reduce_encode_ef_0(" in text
    compile(text, "shown", "exec")
    assert show(codecs.LowRank(), "triton").startswith("# no Triton")


# ---- selections: malformed payloads, launches, workspace


@pytest.mark.parametrize("form", one_in(3, ["decode_sum", "decode_add", "decode"]))
def test_malformed_payloads(interpreted: Interpreted, form: str) -> None:
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
    asked = interpreted(triton_checks.verdicts, codec, numel, form, edits)
    assert set(asked) <= {"refused", "decoded"}, (asked, edits)
    assert asked[:3] == ["decoded", "refused", "refused"]
    flags = layout(Kept()).offsets(500)[1]
    edits = [{flags: 255, flags + 1: 7}, dict.fromkeys(range(flags, flags + 16), 1)]
    asked = interpreted(triton_checks.verdicts, Kept(), 500, "decode_sum", edits)
    assert asked == ["decoded", "decoded"]


def test_a_malformed_payload_is_reported_to_its_caller(interpreted: Interpreted) -> None:
    codec, numel = TopK(0.05), 300
    counts = layout(codec).offsets(numel)[0]
    bad = {counts: 255, counts + 1: 255}
    assert interpreted(triton_checks.marked, codec, numel, bad) == []
    # there is no mark if no payload can be malformed
    for target in ("c", "eager"):
        assert kernels(codec, torch.float32, target).mark() is None
    asked = interpreted(triton_checks.has_mark, [QSGD(), codec, codecs.ThreeLC()])
    assert asked == [False, True, True]


# launches per form: encode, encode_ef, decode, decode_add, decode_sum, reduce_encode, .._ef
LAUNCHES = {
    QSGD(): [1, 1, 1, 1, 1, 1, 1],
    codecs.TernGrad(): [2, 2, 1, 1, 1, 2, 2],  # extremes of a row take no launch
    codecs.ThreeLC(): [4, 4, 2, 2, 2, 5, 5],
    TopK(): [8, 8, 2, 2, 3, 10, 10],
    codecs.AdaComp(): [10, 10, 2, 2, 3, 12, 12],
    codecs.DGC(): [13, 13, 2, 2, 3, 15, 15],
    codecs.MSTopK(): [36, 36, 2, 2, 3, 10, 10],
}


@pytest.mark.parametrize("codec", one_in(7, list(LAUNCHES)[2:] + list(LAUNCHES)[:2]), ids=repr)
def test_launches_do_not_depend_on_the_number_of_rows(
    interpreted: Interpreted, codec: Codec
) -> None:
    found = interpreted(triton_checks.launches, codec, [50, 1, 30])
    assert list(found.values()) == LAUNCHES[codec], found


# the same over 2^26 values, where rows take longer to reduce and to scan
LAUNCHES_OF_MANY = {
    QSGD(): [1, 1, 1, 1, 1, 1, 1],
    codecs.TernGrad(): [2, 2, 1, 1, 1, 2, 2],
    codecs.ThreeLC(): [8, 8, 4, 4, 4, 10, 10],  # not all tiles are full: sweeps take two
    TopK(): [11, 11, 3, 3, 4, 14, 14],
    codecs.MSTopK(): [53, 53, 3, 3, 4, 14, 14],
}


def test_launches_over_many_values(interpreted: Interpreted) -> None:
    for codec, expected in LAUNCHES_OF_MANY.items():
        found = interpreted(triton_checks.launches_of, codec, 2**26)
        assert list(found.values()) == expected, (codec, found)


def test_no_program_loops_over_the_blocks_of_a_row(interpreted: Interpreted) -> None:
    for codec in (codecs.ThreeLC(), TopK()):
        assert 0 < interpreted(triton_checks.trips, codec, 2**26) <= 16


@pytest.mark.parametrize(
    "codec", one_in(4, [NAMED["threelc"], NAMED["dgc"], TopK(0.3), Trits()]), ids=repr
)
def test_kernels_stay_in_their_workspace(interpreted: Interpreted, codec: Codec) -> None:
    assert interpreted(triton_checks.strays, codec, [0, 170]) == []


@EXHAUSTIVE
def test_the_table_agrees_with_the_layout() -> None:
    """Offsets in a payload and capacities, for all rows at once."""
    rows = np.zeros(5, ROW)
    rows["numel"] = sizes = [1, 79, 4096, 10_001, 100_000]
    for codec in (TopK(0.013), codecs.ThreeLC(), Trits(), codecs.AdaComp()):
        lay = layout(codec)
        table = tiles.divide(rows, lay).table
        for name, expected in (
            ("tail", [lay.offsets(n)[-1] for n in sizes]),
            ("capacity", [lay.capacity(n) for n in sizes]),
        ):
            assert table[:, tiles.COLUMN[name]].tolist() == expected, (codec, name)
    assert triton_rows.statistics([]) == []


def test_what_depends_on_a_row_alone_is_in_the_table() -> None:
    """Its number of blocks, and the words of its streams, which no kernel computes."""
    rows = np.zeros(2, ROW)
    rows["numel"], rows["key"], rows["shared"] = [300, 1], [7, 2**63 + 1], 5
    codec = NAMED["rotated"]  # draws from a row's stream and from a shared one
    streams = triton_rows.streams(forms.derive(codec, "fp32").programs["encode"])
    made = tiles.divide(rows, layout(codec), streams=streams)
    assert made.table[:, tiles.COLUMN["blocks"]].tolist() == [4, 1]
    for row, words in zip(rows, made.behind.view(np.uint64).tolist(), strict=True):
        keys = [int(row["shared" if s.shared else "key"]) for s in streams]
        expected = map(rng.stream_words, keys, [s.number for s in streams])
        assert [(w & rng.MASK32, w >> 32) for w in words] == list(expected)
    for text in map(triton.source, CODECS):
        assert "stream_key(tl.load(row + KEY)" not in text


def test_what_depends_on_the_table_of_a_codec_alone_is_behind_it(interpreted: Interpreted) -> None:
    """The middles of learned levels: kernels load them."""
    codec = codecs.LearnedLevels(bits=2, levels=(0.0, 0.3, 0.6, 1.0))
    found = interpreted(triton_checks.numbers, codec, "encode")
    low, some, more, high = (np.float32(x) for x in (0.0, 0.3, 0.6, 1.0))
    middles = [a + (b - a) * np.float32(0.5) for a, b in ((low, some), (some, more), (more, high))]
    assert found[:4] == [low, some, more, high]
    assert sorted(found[4:]) == middles


def test_full_tiles_are_aligned() -> None:
    """A row has full tiles if all of its addresses are aligned, and the payloads of a sum."""
    codec = QSGD(block=128)
    rows = np.zeros(3, ROW)
    rows["numel"] = 2 * 4096 + 300, 100, 4096
    rows["values"] = 4096
    made = tiles.divide(rows, layout(codec))
    for name, expected in (
        ("tiles", [0, 4, 5]), ("full_tiles", [0, 2, 2]), ("other_tiles", [0, 2, 3]),
        ("first_other", [2, 0, 1]),
    ):  # fmt: skip
        assert made.table[:, tiles.COLUMN[name]].tolist() == expected, name
    assert (made.number, made.full) == (6, 3)
    for name in ("values", "residual", "payload", "source"):
        loose = rows.copy()
        loose[name][0] += 8
        made = tiles.divide(loose, layout(codec))
        assert (made.number, made.full) == (6, 1), name
    assert tiles.divide(rows, layout(codec), stride=32).full == 3
    assert tiles.divide(rows, layout(codec), stride=8).full == 0
