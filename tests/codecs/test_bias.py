"""`Codec.biased` and `Codec.contracts`, against their definitions: the mean and the mean squared
error of what is decoded, over random numbers."""

from __future__ import annotations

import pytest
import torch

from codec_calls import CODECS, UNFUSED, call, drawn
from gradwire import codecs
from gradwire.codecs import QSGD, AdaComp, Codec, LearnedLevels, RandomShift, TernGrad
from gradwire.lang.contraction import worst_error
from gradwire.lang.exact import Exact

SEEDS = 200
ROUNDING = 2**-8  # of a bf16 number
EVERY: list[Codec] = [
    *CODECS,
    *UNFUSED,
    codecs.MSTopK(density=0.1, values="fp32"),
    QSGD(bits=4, rounding="nearest"),
    QSGD(bits=2, scale="max", rounding="nearest"),
    codecs.RandomK(density=0.1, values="fp32"),
    codecs.RandomK(density=1.0, values="fp32"),
    codecs.Rotated(bits=1, block=64, rounding="nearest"),
    LearnedLevels(bits=2, rounding="stochastic"),
]


def stray(codec: Codec, x: torch.Tensor) -> tuple[float, float]:
    """(distance of the mean from `x`, its standard error), both squared."""
    every = drawn(codec, x, 2, key=1000).double()
    if not torch.equal(*every):  # else nothing is drawn
        every = drawn(codec, x, SEEDS, key=1000).double()
    error = every.var(0).sum() / len(every)
    return float((every.mean(0) - x.double()).square().sum()), float(error)


def test_a_codec_is_biased_if_its_mean_strays(pytestconfig: pytest.Config) -> None:
    """One codec of each kind that is biased, and one that is not."""
    kinds = {(type(c), c.biased, getattr(c, "rounding", "")): c for c in EVERY}
    every = EVERY if pytestconfig.getoption("exhaustive") else kinds.values()
    x = 0.05 * torch.randn(400, generator=torch.Generator().manual_seed(3))
    faults = []
    for codec in every:
        distance, error = stray(codec, x)
        chance = 9 * error + float((ROUNDING * x).square().sum())
        right = distance > 2 * chance if codec.biased else distance <= chance
        if not right:
            faults.append((codec, distance, chance))
    assert not faults


def test_what_is_biased_as_it_comes() -> None:
    unbiased = {name for name in codecs.REGISTRY if not codecs.get(name).biased}
    assert unbiased == {"identity", "fp16", "bf16", "qsgd", "terngrad", "randomshift", "rotated"}
    for codec in (QSGD(bits=2), TernGrad("ternary"), Exact()):
        assert not codec.biased


def test_a_codec_contracts_if_its_error_is_at_most_its_input(pytestconfig: pytest.Config) -> None:
    """What does not contract shows it, but for learned levels and 8 bits of terngrad: that takes a
    block with zero midway between two levels, and more than 10^5 values. AdaComp bounds its
    residuals in another way."""
    grids = [
        QSGD(bits, block, scale, rounding)
        for bits, block in ((2, 32), (4, 1024))
        for scale in ("minmax", "max", "l2")
        for rounding in ("dithered", "stochastic", "nearest")
    ]
    if not pytestconfig.getoption("exhaustive"):
        grids = grids[::2]  # each scale and rounding with one number of bits
    others = [RandomShift(3), RandomShift(4), LearnedLevels(4), LearnedLevels(6), TernGrad(bits=8)]
    unseen = [c for c in (*CODECS, *others) if isinstance(c, (LearnedLevels, TernGrad))]
    faults = []
    for codec in dict.fromkeys([*CODECS, *grids, *others]):
        if isinstance(codec, AdaComp):
            continue
        error = worst_error(codec)
        if codec.contracts != (error < 1.01) and not (codec in unseen and not codec.contracts):
            faults.append((codec, error))
    assert not faults


def residuals(codec: Codec, gradients: torch.Tensor) -> list[float]:
    """The norm of the residual after each gradient, over that of the gradient."""
    residual, norms = torch.zeros(gradients.shape[1]), []
    for step, values in enumerate(gradients):
        result = call(codec, "encode_ef", values, residual=residual, key=step, target="eager")
        residual = result.residual
        norms.append(float(residual.norm() / values.norm()))
    return norms


def test_residuals_of_what_does_not_contract_grow() -> None:
    """At most a few times the gradient's norm if it contracts, after steps of normal gradients."""
    normal = torch.randn(12, 2048, generator=torch.Generator().manual_seed(5))
    for codec in (QSGD(bits=4), QSGD(bits=2, block=32), TernGrad("ternary"), QSGD(bits=1)):
        grown = residuals(codec, normal)[-1]
        assert (grown < 2.0) == codec.contracts, (codec, grown)


def test_residuals_of_adacomp_stay_bounded() -> None:
    """Though an encoding errs by more than it encodes where bins differ: also of such gradients."""
    normal = torch.randn(60, 2048, generator=torch.Generator().manual_seed(5))
    unlike = normal * torch.logspace(-4, 0, 2048 // 64).repeat_interleave(64)
    for codec in (AdaComp(block=64), AdaComp()):
        assert codec.contracts
        for gradients in (normal, unlike):
            norms = residuals(codec, gradients)
            assert max(norms) < 8, (codec, norms)
            assert max(norms[30:]) < 1.5 * max(norms[:30]), (codec, norms)
