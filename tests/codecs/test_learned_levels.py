"""LearnedLevels: the error is never above that of even levels, and clearly below at few bits."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from codec_calls import gradient, round_trip
from gradwire.codecs import LearnedLevels
from gradwire.lang import kernels
from gradwire.lang.emit.c import source
from products import one_in

SIZE = 30_000


def sample(kind: str, size: int = SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    if kind == "gaussian":
        return torch.randn(size, generator=generator) * 1e-3
    if kind == "laplacian":
        uniform = torch.rand(size, generator=generator) - 0.5
        return -torch.sign(uniform) * torch.log1p(-2 * uniform.abs() + 1e-7)
    return torch.rand(size, generator=generator)


def error(codec: LearnedLevels, values: torch.Tensor) -> float:
    decoded = round_trip(codec, values, target="eager")
    return float((decoded.double() - values.double()).square().sum())


@pytest.mark.parametrize(
    ("kind", "bits", "rounding"),
    one_in(11, product(["gaussian", "laplacian"], [2, 3, 4, 5], ["nearest", "stochastic"])),
)
def test_error_is_clearly_below_even_levels(kind: str, bits: int, rounding: str) -> None:
    values = sample(kind)
    learned = LearnedLevels.learn(values, bits, rounding=rounding)
    ratio = error(learned, values) / error(LearnedLevels(bits, rounding=rounding), values)
    assert ratio < (0.9 if rounding == "nearest" else 0.95)


def test_error_is_never_above() -> None:
    faults = []
    for name, values in {
        "uniform": sample("uniform", 5000), "gradient": gradient(5000), "zeros": torch.zeros(5000),
    }.items():  # fmt: skip
        for bits in (2, 4):
            learned = LearnedLevels.learn(values, bits, block=500, steps=200)
            even = error(LearnedLevels(bits, 500), values)
            if error(learned, values) > even * (1 + 1e-6):
                faults.append((name, bits))
    assert not faults


def test_a_gaussian_block_gets_the_lloyd_max_levels() -> None:
    """The best four levels of a unit Gaussian are +-0.453 and +-1.510."""
    values = torch.randn(65_536, generator=torch.Generator().manual_seed(9))
    learned = LearnedLevels.learn(values, 2, block=65_536, steps=1500)
    low, high = float(values.min()), float(values.max())
    at = [low + (high - low) * level for level in learned.grid]
    assert at == pytest.approx([-1.510, -0.453, 0.453, 1.510], abs=0.04)


def test_blocks_without_a_finite_range_are_ignored() -> None:
    values = sample("gaussian", 4096)
    clean = LearnedLevels.learn(values, 3, steps=50)
    bad = torch.cat([values, torch.full((1024,), 5.0)])
    bad[5000] = math.nan
    assert LearnedLevels.learn(bad, 3, steps=50) == clean
    assert LearnedLevels.learn(torch.empty(0), 3) == LearnedLevels(3)
    assert LearnedLevels.learn(bad[4096:], 3) == LearnedLevels(3)
    half = values.to(torch.bfloat16).view(64, 64)
    assert len(LearnedLevels.learn(half, 3, steps=50).grid) == 8


def test_learning_is_deterministic() -> None:
    values = sample("gaussian")
    a, b, c = (LearnedLevels.learn(values, 3, steps=50, seed=s) for s in (1, 1, 2))
    assert a == b
    assert a != c


def test_levels_are_arguments_of_kernels() -> None:
    """Codecs that differ only in their levels share their code."""
    values = sample("gaussian", 3000)
    levels = [(0.0, 0.3, 0.6, 1.0), (0.1, 0.3, 0.6, 0.9)]
    a, b = (LearnedLevels(2, 100, levels=x) for x in levels)
    decoded = [round_trip(codec, values) for codec in (a, b)]
    assert not torch.equal(*decoded)
    for codec, table, values_of in zip((a, b), levels, decoded, strict=True):
        low = values.split(100)[0].min()
        span = values.split(100)[0].max() - low
        unit = ((values_of[:100] - low) / span).double()
        nearest = (unit.view(-1, 1) - torch.tensor(table).double()).abs().amin(1)
        assert nearest.max() < 1e-5
        assert kernels(codec).layout == kernels(LearnedLevels(2, 100)).layout
        assert source(codec) == source(LearnedLevels(2, 100))


def test_levels_may_be_a_list() -> None:
    assert LearnedLevels(2, levels=[0, 0.5, 0.6, 1]) == LearnedLevels(2, levels=(0, 0.5, 0.6, 1))
    assert hash(LearnedLevels(2, levels=[0, 0.5, 0.6, 1])) is not None
