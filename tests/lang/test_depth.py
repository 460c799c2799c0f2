"""Long chains of operators with shared operands: work is linear in them, and nothing recurses.

Work that is repeated per use of an operand doubles with every link, so these tests would not end;
a recursion ends in RecursionError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from codec_calls import gradient
from gradwire.lang import Codec, decode, encode, ir, show
from gradwire.lang.ops import (
    abs,
    concat,
    decomp,
    elements,
    fp32,
    gather,
    matmul,
    matrix,
    reduce,
    rotate,
    scatter,
    share,
    topk,
    trit,
    uint,
    where,
)
from gradwire.lang.trace import lift
from products import one_in


def chain(value: Any, links: int) -> Any:
    """Two operators per link; each value has two uses."""
    for _ in range(links):
        value = value - value * 0.0078125
    return value


@dataclass(frozen=True)
class Everywhere(Codec):
    """Chains of elements, of numbers of blocks, of entries, of constants and of conditions."""

    links: int

    def encode(self, g: Any) -> Any:
        x = g.blocks(32)
        scale = chain(reduce(max, abs(x)), self.links)
        level, coin, same = lift(2.0**-120), lift(1.0), lift(1.0)
        code = uint(3, chain(abs(x), self.links) * 4.0)
        for k in range(self.links):
            level = level + level
            coin = where(x < k / 64, coin, coin)
            same = where(code < k + 1, same, same)
        chosen = topk(chain(abs(g), self.links), share(0.1))
        return concat(
            scale=scale, code=code, level=uint(2, where(x > 0.0, level, 0.0)), coin=trit(coin),
            same=same, chosen=chosen, value=fp32(chain(gather(g, chosen), self.links)),
        )  # fmt: skip

    def decode(self, chosen: Any, value: Any, **rest: Any) -> Any:
        return scatter(chain(value, self.links) * rest["scale"], chosen)


@dataclass(frozen=True)
class Decoded(Codec):
    """A chain in both methods."""

    links: int

    def encode(self, g: Any) -> Any:
        return concat(value=chain(g.blocks(64), self.links))

    def decode(self, value: Any) -> Any:
        return chain(value, self.links)


@dataclass(frozen=True)
class Matrices(Codec):
    """Chains of matrices, and of what spans the row."""

    links: int

    def encode(self, g: Any) -> Any:
        for _ in range(self.links // 4):
            g = rotate(g - reduce(sum, g) * 0.001, full=True)
        p, q = decomp(matrix(g, 8), 2)
        return concat(p=fp32(p), q=fp32(q))

    def decode(self, p: Any, q: Any) -> Any:
        return elements(chain(matmul(p, q), self.links))


@pytest.mark.parametrize("codec", one_in(2, [Everywhere(100), Decoded(100)]), ids=repr)
def test_200_operators_with_shared_operands(codec: Codec) -> None:
    values = gradient(100)
    payload = encode(codec, values, target="eager")
    assert torch.equal(payload, encode(codec, values, target="c"))
    decoded = [decode(codec, payload, 100, target=target) for target in ("eager", "c")]
    assert torch.equal(*decoded)
    assert decoded[0].any()
    assert "def encode_0(" in show(codec, "triton")
    assert len(repr(ir.alu("add", ir.const(1.0), ir.const(2.0)))) < 200


@pytest.mark.parametrize("codec", [Decoded(1000), Matrices(1000)], ids=repr)
def test_2000_operators(codec: Codec) -> None:
    payload = encode(codec, torch.ones(70), target="eager")
    assert torch.isfinite(decode(codec, payload, 70, target="eager")).all()
    for stage in ("ir", "c", "triton"):
        assert show(codec, stage)
