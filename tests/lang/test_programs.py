"""Programs beyond the shipped codecs: target c equals the interpreter, and how they are lowered."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import other_codecs
import pytest
import torch
import triton_checks
from other_codecs import ODD, SELECTIONS, Looked, Odd, Stages

from codec_calls import DTYPES, call, differing, fixed, gradient, ragged_sizes, round_trip, table
from gradwire.codecs import AdaComp, Codec, ThreeLC, TopK
from gradwire.lang import decode, encode, forms, ir, kernels, layout, passes, show
from gradwire.lang.emit.c import source
from gradwire.lang.forms import FORMS
from gradwire.lang.sweeps import LookUp, Loop, Put, Recall, Scalars
from products import EXHAUSTIVE, in_turn, one_in

# each pair is compiled: every codec in fp32, and the one with a native field in all dtypes
PAIRS = [*((c, torch.float32) for c in ODD), *((Odd(), dtype) for dtype in DTYPES[1:])]


@pytest.mark.parametrize(
    ("begun", "form"), in_turn(product(PAIRS, [0, 2**32 - 40]), FORMS), ids=str
)
def test_targets_agree(begun: tuple[tuple[Codec, torch.dtype], int], form: str) -> None:
    (codec, dtype), start = begun
    given = (fixed(n, dtype) for n in ragged_sizes(layout(codec, dtype).block))
    faults = differing(codec, [form], given, threads=2, start=start)
    assert not faults, "\n".join(faults)


# dtype, values, threads; threads share the largest rows, see emit/c_rows.py
SINGLE = [(torch.float32, 1, 1), (torch.float32, 1025, 2), (torch.float32, 70000, 3)]
HALF = [(torch.bfloat16, 5000, 3), (torch.float16, 70000, 2)]
MOST = ("encode_ef", "decode_sum", "reduce_encode")  # together they have every part of the others
# forms of selections in half precision
FEW = [(SELECTIONS[5], MOST[:1], HALF[:1]), (SELECTIONS[4], MOST[2:], HALF[1:])]
CASES = [(codec, MOST, SINGLE) for codec in SELECTIONS] + FEW
CASES += [(codec, FORMS, SINGLE + HALF) for codec in SELECTIONS]


@pytest.mark.parametrize(
    ("codec", "some", "rows"),
    [
        pytest.param(*case, marks=[EXHAUSTIVE] if i == 1 or i >= len(SELECTIONS + FEW) else [])
        for i, case in enumerate(CASES)
    ],
    ids=repr,
)
def test_selections_agree_and_allocate_nothing(codec: Codec, some: Any, rows: Any) -> None:
    # the workspace first: payloads that encode has to write precede those that decode reads
    faults = triton_checks.strays(codec, [90_000, 0], "c", ["encode", *some])
    for dtype, n, threads in rows:
        faults += differing(codec, some, [fixed(n, dtype)], threads)
    assert not faults
    assert not {"malloc", "calloc", "realloc", "alloca"} & set(re.findall(r"\w+", source(codec)))


def test_topk_equals_a_sort() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(17))
    values[values == 0] = 0.5  # below, values that are not 0 count as selected
    values[::7] = values[3]  # ties
    rows = [(values, density) for density in (0.001, 0.01, 0.1, 1.0)]
    rows += [(torch.arange(90_000.0), 0.01), (-torch.arange(90_000.0).flip(0), 0.01)]
    for values, density in rows:
        k = max(1, int(density * values.numel()))
        order = torch.argsort(values.abs(), descending=True, stable=True)[:k]
        for threads in (1, 2):
            decoded = round_trip(TopK(density, "fp32"), values, threads=threads)
            assert torch.equal(decoded.nonzero().flatten(), order.sort().values), density
            assert torch.equal(decoded[order], values[order]), density


def test_many_small_rows_are_selected_independently() -> None:
    rows = [gradient(n, seed=n) for n in (1, 9, 10, 999, 0, 3000)]
    alone = [call(TopK(0.1), "encode", row).payload for row in rows]
    payloads = [torch.zeros_like(p) for p in alone]
    kernels(TopK(0.1), target="c").run("encode", table(rows, payloads, key=7), threads=2)
    assert all(map(torch.equal, payloads, alone))


# ---- long chains of operators with shared operands: work is linear in them, and nothing recurses

# Work that is repeated per use of an operand doubles with every link, so these tests would not end;
# a recursion ends in RecursionError.


@pytest.mark.parametrize(
    "codec", one_in(2, [other_codecs.Everywhere(100), other_codecs.Decoded(100)]), ids=repr
)
def test_200_operators_with_shared_operands(codec: Codec) -> None:
    values = gradient(100)
    payload = encode(codec, values, target="eager")
    assert torch.equal(payload, encode(codec, values, target="c"))
    decoded = [decode(codec, payload, 100, target=target) for target in ("eager", "c")]
    assert torch.equal(*decoded)
    assert decoded[0].any()
    assert "def encode_0(" in show(codec, "triton")
    assert len(repr(ir.alu("add", ir.const(1.0), ir.const(2.0)))) < 200


@pytest.mark.parametrize(
    "codec", [other_codecs.Decoded(1000), other_codecs.Matrices(1000)], ids=repr
)
def test_2000_operators(codec: Codec) -> None:
    payload = encode(codec, torch.ones(70), target="eager")
    assert torch.isfinite(decode(codec, payload, 70, target="eager")).all()
    for stage in ("ir", "c", "triton"):
        assert show(codec, stage)


# ---- how programs are lowered


def test_costly_elements_are_kept_between_loops_and_cheap_ones_are_not() -> None:
    (sweep,) = passes.lower(forms.derive(Stages(), "fp32").programs["encode"])
    loops = [s for s in sweep.steps if isinstance(s, Loop)]
    assert len(loops) == 3
    assert [[k.kind for k in loop.sinks] for loop in loops] == [
        ["reduce", "reduce"], ["reduce", "keep"], ["field"],
    ]  # fmt: skip
    (sweep,) = passes.lower(forms.derive(Stages(), "bf16").programs["encode_ef"])
    first = next(s for s in sweep.steps if isinstance(s, Loop))
    assert "keep" not in [k.kind for k in first.sinks]


def test_block_results_of_an_earlier_sweep_are_recalled() -> None:
    """3LC's flags depend only on the maximum of every block, so their sweep reads no values."""
    made = forms.derive(ThreeLC(), "fp32").programs
    for form in ("encode", "encode_ef", "reduce_encode"):
        _, flags, codes = passes.lower(made[form])
        assert not flags.loops
        assert {type(s) for s in flags.steps} == {Recall, Scalars, Put}
        assert [s.index for s in codes.steps if isinstance(s, Recall)] == [0]
    # sums are computed in place, so block results are overwritten
    sweeps = passes.lower(forms.derive(AdaComp(), "fp32").programs["encode"])
    assert not any(isinstance(s, Recall) for sweep in sweeps for s in sweep.steps)


def test_codes_of_elements_are_looked_up_by_a_step() -> None:
    made = forms.derive(Looked(), "fp32").programs
    (sweep,) = passes.lower(made["decode"])
    steps = [s for s in sweep.steps if isinstance(s, LookUp)]
    assert sorted(len(s.numbers) for s in steps) == [8, 32, 256]  # one per code
    (sweep,) = passes.lower(made["encode"])
    kinds = [type(s) for s in sweep.steps]
    assert kinds.index(Loop) < kinds.index(LookUp), "a loop computes the codes first"
    first = next(s for s in sweep.steps if isinstance(s, Loop))
    assert [s.node.dtype for s in first.sinks if s.kind == "keep"] == ["uint3"]


def test_a_where_of_constants_has_a_known_range() -> None:
    fields = dict(forms.derive(Looked(), "fp32").programs["encode"].fields)
    assert passes.known_range(fields["sign"].args[0]) == (0.0, 1.0)
    assert passes.known_range(fields["code"].args[0]) is None
    (chosen,) = (a for a in fields["far"].args[0].args if a.attr == "where")
    assert passes.known_range(chosen) == (-3.0, 40.0)


def test_every_draw_has_its_own_stream() -> None:
    roots = forms.derive(Odd(), "fp32").programs["encode"].roots
    assert sorted(n.attr.number for n in ir.walk(roots) if n.op == "random") == [0, 1]
    roots = forms.derive(other_codecs.SharedNoise(), "fp32").programs["encode_ef"].roots
    (stream,) = {n.attr for n in ir.walk(roots) if n.op == "random"}  # both sides draw the same
    assert stream.shared


def test_random_of_block_scope_is_one_number_per_block() -> None:
    payload = call(Odd(), "encode", torch.zeros(170)).payload
    lay = layout(Odd())
    at = [f.name for f in lay.fields].index("shift")
    begin, end = lay.offsets(170)[at : at + 2]
    shifts = payload[begin:end].clone().view(torch.bfloat16)
    assert len(shifts) == 10
    assert len(set(shifts.tolist())) > 5


def test_identical_nodes_are_one() -> None:
    a = ir.alu("add", ir.const(1), ir.const(2))
    assert a is ir.alu("add", ir.const(1.0), ir.const(2.0))
    assert ir.const(0.0) is not ir.const(-0.0)


def test_the_tables_are_complete() -> None:
    from gradwire.lang import eager, semantics
    from gradwire.lang.emit import ALU, c_nodes

    assert set(semantics.ALU) == set(ALU) == set(ir.ALU)
    handled = {op for op in ir.OPS if hasattr(eager._Row, f"_{op}")}
    assert handled == set(ir.OPS) - {"scatter"}  # scatter becomes stores and patches
    written = {"const", "param", "fold", "rotate", "select", "scatter", *ir.UNFUSED}
    handled = {op for op in ir.OPS if hasattr(c_nodes.Writer, f"node_{op}")}
    assert handled == set(ir.OPS) - written
