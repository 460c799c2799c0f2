"""Triton's kernels compile for absent GPUs, to instructions that give the same bits.

Compilations take seconds each, so `make test` has few programs: together they call every function
that the kernels of codec_calls.CODECS call, spread over three GPUs.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

import pytest

from codec_calls import CODECS
from gradwire import codecs
from gradwire.codecs import QSGD, Cast, Codec, Identity, TopK
from gradwire.lang import forms, gpu, layout
from gradwire.lang.emit import triton
from gradwire.lang.forms import FORMS
from products import EXHAUSTIVE

compiler = pytest.importorskip("triton.compiler", reason="triton is not installed here")
from triton.backends.compiler import GPUTarget  # noqa: E402

pytestmark = pytest.mark.xdist_group("triton")

SIGNATURE = {
    "table": "*i64", "n": "i32", "steps": "i32", "ranks": "i32", "rank": "i32", "stride": "i64",
    "factor": "fp32", "numbers": "*fp32", "workspace": "*fp32", "words": "*i32",
    "failed": "*i32", "origins": "*i64",
}  # fmt: skip
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ALIKE = (Cast, codecs.GradDrop, codecs.HardThreshold, codecs.RandomShift)  # use others' kernels
STOCHASTIC = QSGD(rounding="stochastic")
OWN = [codec for codec in CODECS if codec != QSGD() and not isinstance(codec, ALIKE)]
NAMED = {codecs.name_of(codec): codec for codec in reversed(CODECS)}

# between them every rule of the emitter
FEW = [
    (STOCHASTIC, "reduce_encode", "sm_90"),
    (STOCHASTIC, "encode_ef", "gfx942"),
    (QSGD(), "decode_sum", "sm_80"),  # redraws
    (QSGD(bits=5, block=100, scale="l2", rounding="nearest"), "encode", "gfx942"),
    (Identity(), "encode", "sm_90"),
    (codecs.LearnedLevels(), "decode", "sm_80"),
    (NAMED["randomk"], "encode", "sm_80"),
    (NAMED["rotated"], "encode", "gfx942"),
    (NAMED["onebit"], "encode", "sm_80"),
    (NAMED["terngrad"], "encode", "gfx942"),
    (NAMED["dgc"], "encode", "sm_90"),
    (NAMED["topk"], "encode_ef", "gfx942"),
    (Cast("fp16"), "encode_ef", "sm_80"),
    (NAMED["adacomp"], "decode", "gfx942"),
    (NAMED["topk"], "decode_sum", "sm_80"),
    (NAMED["fp8"], "encode_ef", "sm_80"),
    (NAMED["fp8"], "encode_ef", "gfx942"),
    (NAMED["threelc"], "decode", "sm_80"),
]
# all forms of one codec; for the others one form that encodes values, and one that encodes a sum,
# which takes many times as long to compile
REST = [(QSGD(), form, "sm_90") for form in FORMS]
REST += [(codec, "encode_ef", "sm_90") for codec in OWN]
REST += [(codec, "reduce_encode", "sm_80") for codec in [Identity(), *OWN[2::2]]]
REST += [(STOCHASTIC, "decode", "sm_80")]
REST += [(QSGD(), form, "gfx942") for form in ("encode_ef", "reduce_encode")]
REST += [(codec, "reduce_encode", "gfx942") for codec in [STOCHASTIC, *OWN[1::2]]]
REST += [(codec, "encode_ef", "gfx942") for codec in CODECS if isinstance(codec, ALIKE)]


def sweeps(codec: Codec, form: str, others: bool = True) -> list[Any]:
    """The kernels of a form that have a program per tile of values: for each sweep, the one of full
    tiles and, if wanted, that of the others."""
    steps = [
        [kernel for kernel in given if hasattr(kernel, "arg_names")]
        for _, *given in gpu.load(triton.source(codec)).STEPS[form]
    ]
    return [kernel for kernels in steps for kernel in kernels[:: 1 if others else 2]]


@cache
def compiled(codec: Codec, form: str, target: str, others: bool = True) -> list[Any]:
    """`sweeps`, compiled."""
    gpu_target = TARGETS[target]
    options = gpu.options(layout(codec), gpu_target.warp_size)
    made = [
        compiler.ASTSource(kernel, {name: SIGNATURE[name] for name in kernel.arg_names}, {})
        for kernel in sweeps(codec, form, others)
    ]
    return [compiler.compile(one, target=gpu_target, options=options) for one in made]


@pytest.mark.parametrize(
    ("codec", "form", "target"),
    [*FEW, *(pytest.param(*case, marks=EXHAUSTIVE) for case in dict.fromkeys(REST))],
    ids=repr,
)
def test_instructions_give_the_same_bits(codec: Codec, form: str, target: str) -> None:
    # The assembler may contract instructions otherwise, with .rn or not. Beyond a division, which
    # uses fused products, nothing else tells so on gfx942.
    assert gpu.options(layout(codec), 32)["enable_fp_fusion"] is False
    for kernel in compiled(codec, form, target):
        exact = exactly_fused(kernel.asm["llir"])
        if target == "gfx942":
            text = kernel.asm["amdgcn"]
            assert "denorm_mode_32 3" in text, "subnormals would become zero"
            if "v_div_" not in text and "v_sqrt_" not in text:  # division and square root use them
                fused = re.findall(r"\bv_(pk_)?(?:fma\w*|mad|mac)_f32", text)
                assert sum(1 + bool(two) for two in fused) <= exact, "a product is not rounded"
            continue
        ptx = kernel.asm["ptx"]
        assert ".ftz" not in ptx, "subnormals would become zero"
        assert len(re.findall(r"\bfma\.rn\.f32", ptx)) <= exact, "a product is not rounded"
        assert not re.search(r"\b(div|sqrt|rcp)\.(full|approx)", ptx)
        assert len(kernel.asm["cubin"]) > 0


def exactly_fused(llir: str) -> int:
    """How many products are fused with a sum: only those with 2^-24, which are exact, since the
    other factor is an integer of a random number (triton_numbers.drawn)."""
    calls = re.findall(r"call [^@]*@llvm\.fma\.(?:v(\d+))?f32\((.*)", llir)
    # 2^-24 and -2^-24, as LLVM writes them: as doubles, or from LLVM 22 on as floats
    steps = r"0x[3B]E70000000000000\b|f0x[3B]3800000\b"
    assert all(re.search(steps, operands) for _, operands in calls)
    assert not re.search(r"@llvm\.fmuladd|= f(add|sub|mul) .*\b(fast|contract)\b", llir)
    return sum(int(lanes or 1) for lanes, _ in calls)


def test_the_few_programs_call_every_function() -> None:
    def called(codec: Codec, names: tuple[str, ...]) -> set[str]:
        programs = [forms.derive(codec, "fp32").programs[name] for name in names]
        text = triton.emit(programs, layout(codec), "fp32")
        own = re.findall(r"^def (\w+)\(", text, re.MULTILINE)
        return set(re.findall(r"(?<!\.)\b((?:tl\.)?[a-z]\w*)\(", text)) - set(own) - {"range"}

    every = set().union(*(called(codec, FORMS) for codec in OWN))
    assert every - set().union(*(called(codec, (form,)) for codec, form, _ in FEW)) == set()
    assert {target for *_, target in FEW} == set(TARGETS)


def test_only_aligned_memory_is_stored_as_vectors() -> None:
    """An alignment hint that leaked into the unaligned branch would cause faults there. Full tiles
    are aligned, so their kernel has no such branch."""
    full, others = (
        set(re.findall(r"st\.global\.([a-z0-9.]+)", kernel.asm["ptx"]))
        for kernel in compiled(Identity(), "encode", "sm_90")
    )
    assert full == {"v4.b32"}
    assert others == {"b32", "b16", "b8"}


WORDS = ("number", "column", "first", "chunks", "parts", "index", "done")
SIZES = {
    "BLOCK": 1024, "GROUP": 4, "SIZE": 4096, "EVERY": 0, "PIECE": 2,
    "PART": 64, "SINGLE": False, "RANKED": True, "FLAGS": False,
    "R": gpu.REDUCED, "LOG": 10, "C": gpu.REDUCED_COLUMNS,
}  # fmt: skip
BETWEEN = (
    "complete", "choose", "histogram", "statistic", "tally", "scan", "sum_counts",
    "survey",
)  # fmt: skip


@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=EXHAUSTIVE) for n in (1, 2))])
def test_kernels_between_sweeps(turn: int) -> None:
    """Each for one GPU, another in each turn."""
    from gradwire.lang.emit import triton_counts, triton_reductions, triton_selection

    files = (triton_counts, triton_reductions, triton_selection)
    for number, name in enumerate(BETWEEN):
        target = list(TARGETS.values())[(number + turn) % 3]
        (kernel,) = (vars(file)[name] for file in files if name in vars(file))
        known = SIGNATURE | dict.fromkeys(WORDS, "i32")
        signature = {name: known.get(name, "constexpr") for name in kernel.arg_names}
        constants = {name: SIZES[name] for name in kernel.arg_names if name not in known}
        source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = compiler.compile(source, target=target, options=dict(gpu.COMMON))
        exactly_fused(made.asm["llir"])
    assert gpu.COMMON["enable_fp_fusion"] is False


@pytest.mark.parametrize("codec", [codec for codec in CODECS if layout(codec).staged], ids=repr)
def test_no_sweep_makes_a_histogram(codec: Codec) -> None:
    """It takes 97 instructions per value."""
    module = vars(gpu.load(triton.source(codec)))
    seen: set[str] = set()
    names = [kernel.__name__ for form in FORMS for kernel in sweeps(codec, form)]
    while names:
        text = inspect.getsource(module[names.pop()].fn)
        assert "tl.histogram" not in text
        called = {n for n in re.findall(r"(?<!\.)\b(\w+)\(", text) if hasattr(module.get(n), "fn")}
        names += called - seen
        seen |= called
    assert "reserve" in seen


def test_sums_of_sparse_payloads_wait_between_ranks() -> None:
    """Triton's interpreter runs one thread, so it would not miss the barriers."""
    text = triton.source(TopK()).partition("def decode_sum_totals(")[2].partition("@triton.jit")[0]
    own, peer = text.partition("for k in range(ranks):")[2].split("else:")
    for part in (own, peer):
        assert "tl.store(totals" in part.partition("tl.debug_barrier()")[2]
        assert "totals" not in part.partition("tl.debug_barrier()")[0]
