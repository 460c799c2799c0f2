"""Programs beyond the shipped codecs: every operator, several stages and sweeps, odd fields."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from codec_calls import DTYPES, call, differing, fixed, ragged_sizes
from gradwire.codecs.adacomp import AdaComp
from gradwire.codecs.threelc import ThreeLC
from gradwire.lang import Codec, forms, ir, layout, passes
from gradwire.lang.forms import FORMS
from gradwire.lang.ops import (
    abs,
    bf16,
    clamp,
    concat,
    count,
    floor,
    fp16,
    fp32,
    index,
    inverse,
    isfinite,
    lookup,
    map,
    native,
    random,
    reduce,
    sqrt,
    table,
    uint,
    where,
)
from gradwire.lang.sweeps import LookUp, Loop, Put, Recall, Scalars
from gradwire.lang.trace import lift
from products import in_turn


@dataclass(frozen=True)
class Stages(Codec):
    """Two nested block reductions, with elements kept between the loops."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(48)
        mean = reduce(sum, x) / count(x)
        centred = map(lambda v: sqrt(abs(v - mean)) / (1.0 + abs(mean)) + random(), x)
        spread = reduce(max, centred)
        code = map(lambda c: c * inverse(spread) * 30.0, centred)
        return concat(mean=mean, spread=fp16(spread), code=uint(5, code))

    def decode(self, mean: Any, spread: Any, code: Any) -> Any:
        return map(lambda k: mean + spread * k / 31.0, code)


@dataclass(frozen=True)
class Sweeps(Codec):
    """A tensor reduction of block norms, then one of elements that depend on it: three sweeps."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(33)
        norm = reduce(sum, map(lambda v: v * v, x))
        largest = reduce(max, reduce(max, abs(x)) + norm * 0.0)
        unit = map(lambda v: v / (largest + 1.0), g)
        total = reduce(sum, unit)
        low, high = reduce(min, x), reduce(max, x)
        return concat(
            total=total, largest=bf16(largest), low=fp32(low), high=fp32(high),
            sign=uint(1, map(lambda v: v >= 0.0, x)), size=fp16(abs(unit)),
        )  # fmt: skip

    def decode(self, total: Any, largest: Any, low: Any, high: Any, sign: Any, size: Any) -> Any:
        value = map(lambda s, z: where(s > 0.0, z, -z) * (largest + 1.0), sign, size)
        return clamp(value, low, high) + total * 0.0


@dataclass(frozen=True)
class Odd(Codec):
    """Fields of every dtype and scope, every comparison, one random number per block, indices."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(17)
        shift = random(scope="block") - 0.5
        odd = index() - floor(index() / 2) * 2
        big = (x > 1.0) | ~(x <= 0.5) & (x != 0.25)
        exact = (x == 0.0) | isfinite(x) & (x >= -1e30) & (x < 1e30)
        level = uint(3, reduce(max, abs(x)) * 4.0)
        return concat(
            level=level, few=uint(2, reduce(max, abs(g))), odd=uint(1, odd), big=uint(1, big),
            exact=uint(1, where(exact, 1, 0)), value=native(x + shift * 0.125), shift=bf16(shift),
            half=bf16(-x, toward="down"), seven=uint(7, abs(x) * 16.0 + random()),
        )  # fmt: skip

    def decode(self, level: Any, few: Any, odd: Any, big: Any, exact: Any, value: Any,
               shift: Any, half: Any, seven: Any) -> Any:  # fmt: skip
        flags = odd + big * 2.0 + exact * 4.0
        return value - shift * 0.125 + (half + seven / 16.0 + level + few + flags) * 1e-6


@dataclass(frozen=True)
class SharedNoise(Codec):
    """Random numbers in decode: both sides draw the same numbers."""

    def encode(self, g: Any) -> Any:
        return concat(value=fp16(g + random(shared="noise")))

    def decode(self, value: Any) -> Any:
        noise = random(shared="noise") * float("1e-3")
        return value - noise + where(value > float("inf"), 1.0, 0.0)


NUMBERS = [k * 37 % 101 / 7 for k in range(256)]
THREES = [lift(k * 0.75) for k in range(32)]


@dataclass(frozen=True)
class Looked(Codec):
    """Tables shorter and longer than their codes, one read by two loops; codes of elements, of
    blocks, and none: NaN and numbers that are not whole, negative, or beyond the table."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(70)
        code = uint(3, abs(x) * 4.0)
        near = lookup([lift(v) for v in (0.0, 0.5, 1.0, 2.0, float("inf"))], code)
        error = reduce(max, abs(abs(x) - near))
        far = uint(5, near * 8.0 + where(x > 1.0, 40.0, where(x > 0.5, -3.0, 2.0)))
        odd = lookup(table(NUMBERS), x)
        top = uint(8, reduce(max, abs(x)) * 40.0)
        sign = uint(1, where(x < 0.0, 1, 0))
        return concat(error=error, top=top, code=code, far=far, odd=odd, sign=sign)

    def decode(self, error: Any, top: Any, code: Any, far: Any, odd: Any, sign: Any) -> Any:
        numbers = table(NUMBERS)
        many = lookup(THREES, far) + lookup(THREES, far * 0.7) + lookup(numbers, far * 8.3)
        many += lookup(numbers, top) + lookup(numbers[3:], uint(8, odd)) + odd
        crossed = where(code < 3.0, 1.5, where(code < 2.0, 8.0, where(code < 6.0, 0.25, -1.0)))
        few = lookup([lift(k * k * 0.5) for k in range(5)], code)
        return (few + many + crossed) * where(sign > 0.0, -1.0, 1.0) + error


@dataclass(frozen=True)
class Redrawn(Codec):
    """Random numbers of both scopes, which decode gives again, in another order of use; a sum draws
    one more."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(40)
        shift, each = random("block"), random()
        largest = fp32(reduce(max, abs(x)) + shift)
        code = map(lambda v: (v * inverse(largest) + 1.0) * 7.0 + each, x)
        return concat(largest=largest, code=uint(4, code))

    def encode_sum(self, g: Any) -> Any:
        payload = self.encode(g)
        (_, largest), (_, code) = payload.fields
        return concat(largest=largest, code=uint(4, code * 1.0 + random() * 0.5))

    def decode(self, largest: Any, code: Any) -> Any:
        shift, each = random("block"), random()
        return ((code - each) / 7.0 - 1.0) * largest + 1e-3 * shift


CODECS: list[Codec] = [Stages(), Sweeps(), Odd(), SharedNoise(), Looked(), Redrawn()]


# each pair is compiled: every codec in fp32, and the one with a native field in all dtypes
PAIRS = [*((c, torch.float32) for c in CODECS), *((Odd(), dtype) for dtype in DTYPES[1:])]


@pytest.mark.parametrize(
    ("begun", "form"), in_turn(product(PAIRS, [0, 2**32 - 40]), FORMS), ids=str
)
def test_targets_agree(begun: tuple[tuple[Codec, torch.dtype], int], form: str) -> None:
    (codec, dtype), start = begun
    given = (fixed(n, dtype) for n in ragged_sizes(layout(codec, dtype).block))
    faults = differing(codec, [form], given, threads=2, start=start)
    assert not faults, "\n".join(faults)


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
    programs = forms.derive(ThreeLC(), "fp32").programs
    for form in ("encode", "encode_ef", "reduce_encode"):
        _, flags, codes = passes.lower(programs[form])
        assert not flags.loops
        assert {type(s) for s in flags.steps} == {Recall, Scalars, Put}
        assert [s.index for s in codes.steps if isinstance(s, Recall)] == [0]
    # sums are computed in place, so block results are overwritten
    sweeps = passes.lower(forms.derive(AdaComp(), "fp32").programs["encode"])
    assert not any(isinstance(s, Recall) for sweep in sweeps for s in sweep.steps)


def test_codes_of_elements_are_looked_up_by_a_step() -> None:
    programs = forms.derive(Looked(), "fp32").programs
    (sweep,) = passes.lower(programs["decode"])
    steps = [s for s in sweep.steps if isinstance(s, LookUp)]
    assert sorted(len(s.numbers) for s in steps) == [8, 32, 256]  # one per code
    (sweep,) = passes.lower(programs["encode"])
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
    roots = forms.derive(SharedNoise(), "fp32").programs["encode_ef"].roots
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
