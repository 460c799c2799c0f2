"""Random codecs, and constants that are easily taken for others, give the same bits everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton_checks
from random_programs import CONSTANTS, RandomProgram

from codec_calls import call, gradient, same
from gradwire.codecs import TBQ
from gradwire.lang import Codec, decode, encode, ir, layout
from gradwire.lang.emit.c_nodes import limits
from gradwire.lang.forms import derive
from gradwire.lang.ops import clamp, concat, fp32, lookup, table, uint, where
from products import EXHAUSTIVE

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 3.4e38, 1.0, 0.5, 255.0, -2.5]
FEW, MANY = range(5), range(5, 40)
# without a condition of the row beside one of elements, which Triton's interpreter cannot combine
INTERPRETED = ((0, "decode"), (5, "encode"), (2, "encode"), (3, "encode"))


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=EXHAUSTIVE) for seed in MANY)])
def test_c_equals_eager(seed: int) -> None:
    codec, values = RandomProgram(seed), torch.cat([torch.tensor(SPECIAL), gradient(100)])
    a, b = (call(codec, "encode", values, target=target).payload for target in ("eager", "c"))
    assert torch.equal(a, b)
    decoded = [decode(codec, a, values.numel(), target=target) for target in ("eager", "c")]
    assert same(*decoded)


def test_triton_equals_eager(interpreted: Callable[..., Any]) -> None:
    """Interpreted."""
    for seed, form in INTERPRETED:
        given = RandomProgram(seed), torch.float32, (49,), (SPECIAL,), (form,)
        assert interpreted(triton_checks.differences, *given) == "", (seed, form)


@dataclass(frozen=True)
class Bounds(Codec):
    """Clamps whose bounds differ in bits only, or are no numbers; a code that is 0.99... of one."""

    low: float = -0.0

    def encode(self, g: Any) -> Any:
        return concat(
            code=uint(1, g),
            zero=fp32(clamp(g, self.low, 1.0)),
            none=fp32(clamp(g, math.nan, 1.0)),
            nearly=uint(1, where(g > 0.0, 1 - 1e-12, 0.0)),
        )

    def decode(self, code: Any, zero: Any, none: Any, nearly: Any) -> Any:
        return clamp(code, 0.0, -0.0) + zero + none + nearly


def test_constants_of_equal_value_and_other_bits() -> None:
    values = torch.tensor(SPECIAL)
    zeros = []
    for codec in (Bounds(), Bounds(0.0)):  # equal, as Python compares floats
        a, b = (encode(codec, values, target=target) for target in ("eager", "c"))
        assert torch.equal(a, b)
        zeros.append(a)
    assert not torch.equal(*zeros)
    encoded = derive(Bounds(), "fp32").programs["encode"]
    assert {"(-0.0f)", "0.0f", "1.0f"} < set(limits(encoded))


def test_codecs_are_equal_by_the_bits_of_their_options() -> None:
    @dataclass(frozen=True)
    class Option(Codec):
        value: Any

        def encode(self, g: Any) -> Any:
            return concat(a=g + 1)

    values = [0.0, -0.0, 0, False, 1, 1.0, True, math.inf, np.float32(1.0), "1", (0.0,), (-0.0,)]
    assert len({Option(value) for value in values}) == len(values)
    for value in [*values, float("nan"), (float("nan"),)]:
        same_again = float("nan") if value != value else value
        assert Option(value) == Option(same_again)
        assert hash(Option(value)) == hash(Option(same_again))
    assert TBQ(threshold=0.1) == TBQ(threshold=0.1) != TBQ(threshold=0.2)


def test_a_table_is_compared_by_bits() -> None:
    @dataclass(frozen=True)
    class Tables(Codec):
        second: float

        def encode(self, g: Any) -> Any:
            return concat(code=uint(1, g), value=fp32(lookup(table([float("nan"), 0.0]), g)))

        def decode(self, code: Any, value: Any) -> Any:
            return lookup(table([float("nan"), self.second]), code) + value

    payload = encode(Tables(0.0), torch.tensor([0.0, 1.0]), target="c")
    assert decode(Tables(0.0), payload, 2).isnan().tolist() == [True, False]
    with pytest.raises(ValueError, match="one table"):
        layout(Tables(-0.0))


def test_constants_are_rounded_once() -> None:
    assert ir.const(1 - 1e-12) is ir.const(1.0)
    assert ir.const(1e39) is ir.const(math.inf)
    assert len({ir.const(x) for x in CONSTANTS}) == len(CONSTANTS) - 2
