"""What of the lemmas holds for `gw.RandomShift`, whose lattice lies between a block's extremes."""

from __future__ import annotations

from functools import cache

import torch
from lattice import mean
from torch import Tensor

import gradwire as gw
from codec_calls import round_trip

DRAWS, BLOCK = 10_000, 32
VALUES = torch.randn(BLOCK, generator=torch.Generator().manual_seed(7))
SPAN = float(VALUES.double().max() - VALUES.double().min())


@cache
def errors(bits: int) -> Tensor:
    """[DRAWS, BLOCK], in float64: of the same values in DRAWS blocks, each with its own shift."""
    codec = gw.codecs.RandomShift(bits=bits, block=BLOCK)
    values = VALUES.repeat(DRAWS)
    decoded = round_trip(codec, values, key=bits)
    return (decoded.double() - values.double()).view(DRAWS, BLOCK)


def test_blocks_err_as_definition_1_does() -> None:
    """Unbiased; within half a step d; E |error|^2 = d^2 / 12 per value, the extremes included; and
    on one lattice per block."""
    for bits in (1, 3, 4, 5, 8):
        error, d = errors(bits), SPAN / (2**bits - 1)
        assert float(error.abs().max()) <= d / 2 + 1e-6, bits  # fp32's rounding
        decoded = VALUES.double() + error
        cells = (decoded - decoded[:, :1]) / d
        assert torch.allclose(cells, cells.round(), atol=1e-4), bits
        assert mean(error).within(0.0), bits
        assert mean(error.square()).within(d**2 / 12), bits


def test_lemma_4_holds_on_blocks() -> None:
    """E |Q_fine(x) - x|^2 <= d_fine / d_coarse E |Q_coarse(x) - x|^2, value by value.

    The steps' ratio (2^fine - 1) / (2^coarse - 1) is an integer for the first three and the
    last pair. With the ratio squared there is equality.
    """
    for fine, coarse in ((4, 2), (8, 4), (8, 2), (5, 4), (8, 5), (8, 7), (2, 1)):
        ratio = (2**coarse - 1) / (2**fine - 1)
        left, right = mean(errors(fine).square()), mean(errors(coarse).square())
        assert left.less(right, ratio).at_most(0.0), (fine, coarse)
        assert left.less(right, ratio**2).within(0.0), (fine, coarse)
