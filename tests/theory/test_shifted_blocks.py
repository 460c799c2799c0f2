"""What of the lemmas holds for `gw.RandomShift`, whose lattice lies between a block's extremes."""

from __future__ import annotations

from functools import cache

import torch
from lattice import Mean, mean
from torch import Tensor

import gradwire as gw
from codec_calls import call

DRAWS, BLOCK = 10_000, 32
VALUES = torch.randn(BLOCK, generator=torch.Generator().manual_seed(7))
SPAN = float(VALUES.double().max() - VALUES.double().min())


@cache
def errors(bits: int) -> Tensor:
    """[DRAWS, BLOCK], in float64: of the same values in DRAWS blocks, each with its own shift."""
    codec = gw.RandomShift(bits=bits, block=BLOCK)
    values = VALUES.repeat(DRAWS)
    payload = call(codec, "encode", values, key=bits).payload
    decoded = call(codec, "decode", values, payload=payload, key=bits).values
    return (decoded.double() - values.double()).view(DRAWS, BLOCK)


def test_blocks_err_as_definition_1_does() -> None:
    """Unbiased; within half a step d; E |error|^2 = d^2 / 12 per value, the extremes included."""
    for bits in (1, 3, 4, 5, 8):
        error, d = errors(bits), SPAN / (2**bits - 1)
        assert float(error.abs().max()) <= d / 2 + 1e-6, bits  # fp32's rounding
        assert mean(error).within(0.0), bits
        assert mean(error.square()).within(d**2 / 12), bits


def test_lemma_4_holds_on_blocks() -> None:
    """E |Q_fine(x) - x|^2 <= d_fine / d_coarse E |Q_coarse(x) - x|^2, value by value.

    The steps' ratio (2^fine - 1) / (2^coarse - 1) is an integer for the first two and the last
    pair. With the ratio squared there is equality.
    """
    for fine, coarse in ((4, 2), (8, 4), (5, 4), (8, 5), (8, 7), (2, 1)):
        ratio = (2**coarse - 1) / (2**fine - 1)
        left, right = mean(errors(fine).square()), mean(errors(coarse).square())
        for factor, exact in ((ratio, False), (ratio**2, True)):
            both = (left.error.square() + (factor * right.error).square()).sqrt()
            difference = Mean(left.value - factor * right.value, both)
            assert difference.within(0.0) if exact else difference.at_most(0.0), (fine, coarse)
