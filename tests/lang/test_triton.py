"""Law 6 for target triton, interpreted on the CPU: the same bytes as the interpreter in torch.

Kernels run in a separate process (triton_checks.py). Tiles are as large as on a GPU: a row of a few
thousand values has a full tile, one that is not full, and its ragged last block.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton_checks
from test_programs import CODECS as PROGRAMS
from test_selections import CODECS as SELECTIONS
from test_targets import NON_FINITE, SPECIAL

from codec_calls import CODECS, DTYPES, WIDTHS
from gradwire.codecs import QSGD, Codec, GradDrop, HardThreshold, LowRank
from gradwire.errors import ConfigError
from gradwire.lang import ROW, encode, ir, kernels, layout, show, tiles
from gradwire.lang.emit import triton
from gradwire.lang.forms import FORMS
from gradwire.lang.ops import abs, concat, map, reduce, uint
from products import EXHAUSTIVE, one_in

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed here"
    ),
    pytest.mark.xdist_group("triton"),  # all tests share one process
]


ALIKE = (GradDrop, HardThreshold)  # use the same kernels as DGC and TopK

# forms that together have every part of the others
MOST = ("decode_add", "decode_sum", "encode_ef", "reduce_encode")
REST = tuple(form for form in FORMS if form not in MOST)
MOST_AND_REST = [MOST, pytest.param(REST, marks=EXHAUSTIVE)]


@dataclass(frozen=True)
class ManyBlocks(Codec):
    """Reductions over more blocks than one pass reduces."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(2)
        total, largest = reduce(sum, reduce(sum, x)), reduce(max, reduce(max, abs(x)))
        code = map(lambda v: (v / largest + 1.0) * 7.0, x)
        return concat(total=total, largest=largest, code=uint(4, code))

    def decode(self, total: Any, largest: Any, code: Any) -> Any:
        return map(lambda k: (k / 7.0 - 1.0) * largest + total * 0.0, code)


@pytest.fixture(scope="module")
def interpreting() -> Iterator[ProcessPoolExecutor]:
    """A process where Triton interprets kernels."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, triton_checks.begin) as pool:
        yield pool


def sizes(codec: Codec) -> list[int]:
    """Two tiles and a ragged block; no values; one value; one block."""
    block = layout(codec).block
    return [4096 + block + 3, 0, 1, block]


@pytest.mark.parametrize("which", MOST_AND_REST, ids=["most", "rest"])
@pytest.mark.parametrize("codec", one_in(9, CODECS), ids=repr)
def test_triton_equals_eager(
    interpreting: ProcessPoolExecutor, codec: Codec, which: tuple[str, ...]
) -> None:
    given = [SPECIAL * 5, NON_FINITE * 9 + SPECIAL]
    if layout(codec).staged:
        given = [SPECIAL * 5 + NON_FINITE * 9]
    if isinstance(codec, ALIKE):
        which = which[-1:]
    asked = interpreting.submit(
        triton_checks.differences, codec, torch.float32, sizes(codec), given, which
    )
    assert asked.result() == ""


@pytest.mark.parametrize(("codec", "dtype"), one_in(5, product(CODECS, DTYPES[1:])), ids=str)
def test_narrow_values(interpreting: ProcessPoolExecutor, codec: Codec, dtype: torch.dtype) -> None:
    block = layout(codec, dtype).block
    sparse = bool(layout(codec, dtype).staged)
    asked = interpreting.submit(
        triton_checks.differences, codec, dtype, [block + 1] if sparse else [block + 1, 1],
        [SPECIAL + NON_FINITE],
        ("encode_ef", "decode_add") if sparse else ("encode_ef", "decode_add", "reduce_encode_ef"),
    )  # fmt: skip
    assert asked.result() == ""


@pytest.mark.parametrize("codec", one_in(6, WIDTHS), ids=repr)
def test_every_width_of_code(interpreting: ProcessPoolExecutor, codec: Codec) -> None:
    asked = interpreting.submit(
        triton_checks.differences, codec, torch.float32, sizes(codec)[1:], (),
        ("encode", "decode_add"),
    )  # fmt: skip
    assert asked.result() == ""


@pytest.mark.parametrize("which", MOST_AND_REST, ids=["most", "rest"])
@pytest.mark.parametrize("codec", one_in(6, [*PROGRAMS, ManyBlocks(), *SELECTIONS[3:]]), ids=repr)
def test_programs_beyond_the_codecs(
    interpreting: ProcessPoolExecutor, codec: Codec, which: tuple[str, ...]
) -> None:
    few = (5000, 1) if layout(codec).staged else (5000, 1, 70, 0)
    asked = interpreting.submit(
        triton_checks.differences, codec, torch.float32, few, (SPECIAL,), which
    )
    assert asked.result() == ""


def test_the_rules_are_complete() -> None:
    assert set(triton.ALU) == set(ir.ALU)
    casts = {("code" if d in ir.CODES else d, r) for d, r in (("uint4", "zero"), ("trit", "zero"))}
    assert casts <= set(triton.CASTS)
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
    assert show(LowRank(), "triton").startswith("# no Triton")


@EXHAUSTIVE
def test_rows_are_divided_into_tiles() -> None:
    lay = layout(QSGD())  # blocks of 128 values, 32 per tile
    rows = np.zeros(4, ROW)
    rows["numel"] = [4096 * 2, 0, 4096 + 130, 1]
    divided = tiles.divide(rows, lay)
    assert divided.table[:, tiles.COLUMN["tiles"]].tolist() == [0, 2, 2, 5]
    assert (divided.number, divided.blocks) == (6, 65)
    assert tiles.divide(rows[:0], lay).number == 0
