"""Law 6 for target triton, interpreted on the CPU: the same bytes as the interpreter in torch.

Kernels run in a separate process (triton_checks.py). Tiles are as large as on a GPU: a row of a few
thousand values has a full tile, one that is not full, and its ragged last block.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton_checks
from test_float8 import Stored, borders
from test_programs import CODECS as PROGRAMS
from test_selections import CODECS as SELECTIONS
from test_targets import NON_FINITE, SPECIAL

from codec_calls import CODECS, DTYPES, WIDTHS
from gradwire import codecs
from gradwire.codecs import QSGD, Codec, GradDrop, HardThreshold, Identity, LowRank
from gradwire.errors import ConfigError
from gradwire.lang import encode, ir, kernels, layout, show
from gradwire.lang.emit import ALU, CASTS, triton
from gradwire.lang.forms import FORMS
from gradwire.lang.ops import abs, concat, map, reduce, uint
from products import EXHAUSTIVE

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed here"
    ),
    pytest.mark.xdist_group("triton"),  # all tests share one process
]


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


SPECIALS = (SPECIAL * 5, NON_FINITE * 9 + SPECIAL)
ALIKE = (GradDrop, HardThreshold)  # use the same kernels as DGC and TopK
# forms that together have every part of the others
MOST = ("decode_add", "decode_sum", "encode_ef", "reduce_encode")
REST = tuple(form for form in FORMS if form not in MOST)


@dataclass(frozen=True)
class Case:
    """Forms over rows of `sizes` values and of `given` ones; size 0 stands for a block and one."""

    codec: Codec
    forms: tuple[str, ...] = MOST
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, ...] = (0, 1)
    given: tuple[Any, ...] = (SPECIAL + NON_FINITE,)

    def __str__(self) -> str:
        return f"{self.codec} {self.dtype} {'+'.join(self.forms)}"

    def differences(self) -> str:
        """Runs where Triton interprets kernels."""
        block = layout(self.codec, self.dtype).block
        sizes = [n or block + 1 for n in self.sizes]
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
SPARSE = {"sizes": (0,), "given": ()}  # an interpreted launch is slow, and selections take many
FEW = [
    wide(QSGD(rounding="stochastic"), ("decode_sum", "encode_ef")),
    Case(QSGD(), ("decode", "decode_sum"), BF16),  # redraws
    Case(QSGD(bits=7, scale="l2", block=50, rounding="nearest"), ("encode", "decode_add"), FP16),
    Case(Identity(), ("encode", "reduce_encode_ef"), FP16),
    Case(Identity(), ("encode_ef", "decode"), sizes=(4096 + 1024 + 3, 1, 1024)),
    Case(NAMED["fp16"], ("encode", "decode"), BF16),
    Case(NAMED["fp8"], ("encode", "decode", "reduce_encode_ef"), BF16),
    Case(Stored(), ("encode_ef",), given=(borders().tolist(),)),
    Case(NAMED["onebit"], ("encode_ef", "decode_add"), BF16),
    Case(NAMED["saturating"], ("reduce_encode", "decode")),
    Case(NAMED["tbq"], ("encode_ef", "decode_sum")),
    Case(NAMED["terngrad"], ("reduce_encode", "decode"), sizes=(5000, 1)),
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
    Case(WIDTHS[-1], ("decode",), **SPARSE),  # MSTopK
    Case(WIDTHS[0], ("encode", "decode")),  # 1 bit
    *(Case(codec, ("reduce_encode", "decode")) for codec in (*PROGRAMS[2:4], ManyBlocks())),
    Case(SELECTIONS[-1], ("decode_sum",), **SPARSE),
]
MANY = [
    *(wide(codec, forms) for codec in CODECS for forms in (MOST, REST)),
    *(narrow(codec, dtype) for codec in CODECS for dtype in DTYPES[1:]),
    *(
        Case(codec, ("encode", "decode_add"), sizes=(1, layout(codec).block), given=())
        for codec in WIDTHS
    ),
    *(
        Case(codec, forms, sizes=(5000, 1) if layout(codec).staged else (5000, 1, 70))
        for codec in [*PROGRAMS, ManyBlocks(), *SELECTIONS[3:]]
        for forms in (MOST, REST)
    ),
]


def test_triton_equals_eager(interpreting: ProcessPoolExecutor) -> None:
    """In a few forms of every codec, and of programs beyond the codecs."""
    asked = {str(case): interpreting.submit(case.differences) for case in FEW}
    faults = {name: found for name, future in asked.items() if (found := future.result())}
    assert not faults
    assert {made for made, _ in codecs.REGISTRY.values()} - {LowRank} <= {
        type(case.codec) for case in FEW
    }


@pytest.mark.parametrize("case", [pytest.param(case, marks=EXHAUSTIVE) for case in MANY], ids=str)
def test_every_form_equals_eager(interpreting: ProcessPoolExecutor, case: Case) -> None:
    assert interpreting.submit(case.differences).result() == ""


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
    assert show(LowRank(), "triton").startswith("# no Triton")
