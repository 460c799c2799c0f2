"""`Codec.biased`, against its definition: the mean of what is decoded, over random numbers."""

from __future__ import annotations

import pytest
import torch

from codec_calls import CODECS, UNFUSED, call
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
    found = []
    for seed in range(SEEDS):
        keys = {"key": 1000 + seed, "shared": 5000 + seed, "target": "eager"}
        payload = call(codec, "encode", x, **keys).payload
        decoded = call(codec, "decode", torch.zeros_like(x), payload=payload, **keys).values
        found.append(decoded.double())
        if seed == 1 and torch.equal(*found):
            break  # nothing is drawn
    every = torch.stack(found)
    error = every.var(0).sum() / len(every)
    return float((every.mean(0) - x.double()).square().sum()), float(error)


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_a_codec_is_biased_if_its_mean_strays(codec: Codec) -> None:
    x = 0.05 * torch.randn(400, generator=torch.Generator().manual_seed(3))
    distance, error = stray(codec, x)
    chance = 9 * error + float((ROUNDING * x).square().sum())
    if codec.biased:
        assert distance > 2 * chance
    else:
        assert distance <= chance


def test_what_is_biased_as_it_comes() -> None:
    unbiased = {name for name in codecs.REGISTRY if not codecs.get(name).biased}
    assert unbiased == {"identity", "fp16", "bf16", "qsgd", "terngrad", "randomshift", "rotated"}
    for codec in (Identity(), Cast("bf16"), QSGD(bits=2), TernGrad("ternary"), Exact()):
        assert not codec.biased
