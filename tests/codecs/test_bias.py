"""`Codec.biased`, against its definition: the mean of what is decoded, over random numbers."""

from __future__ import annotations

import torch

from codec_calls import CODECS, UNFUSED, drawn
from gradwire import codecs
from gradwire.codecs import (
    QSGD,
    Cast,
    Codec,
    Identity,
    LearnedLevels,
    MSTopK,
    RandomK,
    Rotated,
    TernGrad,
)
from gradwire.lang.exact import Exact

SEEDS = 200
ROUNDING = 2**-8  # of a bf16 number
EVERY: list[Codec] = [
    *CODECS,
    *UNFUSED,
    MSTopK(density=0.1, values="fp32"),
    QSGD(bits=4, rounding="nearest"),
    QSGD(bits=2, scale="max", rounding="nearest"),
    RandomK(density=0.1, values="fp32"),
    RandomK(density=1.0, values="fp32"),
    Rotated(bits=1, block=64, rounding="nearest"),
    LearnedLevels(bits=2, rounding="stochastic"),
]


def stray(codec: Codec, x: torch.Tensor) -> tuple[float, float]:
    """(distance of the mean from `x`, its standard error), both squared."""
    every = drawn(codec, x, 2, key=1000).double()
    if not torch.equal(*every):  # else nothing is drawn
        every = drawn(codec, x, SEEDS, key=1000).double()
    error = every.var(0).sum() / len(every)
    return float((every.mean(0) - x.double()).square().sum()), float(error)


def test_a_codec_is_biased_if_its_mean_strays() -> None:
    x = 0.05 * torch.randn(400, generator=torch.Generator().manual_seed(3))
    faults = []
    for codec in EVERY:
        distance, error = stray(codec, x)
        chance = 9 * error + float((ROUNDING * x).square().sum())
        right = distance > 2 * chance if codec.biased else distance <= chance
        if not right:
            faults.append((codec, distance, chance))
    assert not faults


def test_what_is_biased_as_it_comes() -> None:
    unbiased = {name for name in codecs.REGISTRY if not codecs.get(name).biased}
    assert unbiased == {"identity", "fp16", "bf16", "qsgd", "terngrad", "randomshift", "rotated"}
    for codec in (Identity(), Cast("bf16"), QSGD(bits=2), TernGrad("ternary"), Exact()):
        assert not codec.biased
