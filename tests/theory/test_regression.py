"""QSGD against RandomShift on linear regression (THESIS C.4), with our codecs."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from lattice import mean
from regression import BATCH, CASES, CODECS, Data, Result, grid_step, sent, train

from products import EXHAUSTIVE, one_in

FP32, BF16 = "QSGD, fp32 metadata", "QSGD, bf16 metadata"


@cache
def data() -> Data:
    return Data.draw()


@cache
def result(codec: str, weights: str, rows: str) -> Result:
    return train(data(), CODECS[codec], *CASES[weights, rows])


def excess(codec: str, weights: str, rows: str) -> torch.Tensor:
    return result(codec, weights, rows).excess


@pytest.mark.parametrize(
    ("qsgd", "rows"), one_in(4, product([FP32, BF16], [f"{BATCH} rows", "all rows"]))
)
def test_with_a_master_random_shift_is_better(qsgd: str, rows: str) -> None:
    """As C.4 says. Its mean squared error is half of stochastic rounding's, and both are unbiased,
    so this is so with and without noise of the gradients."""
    shift, other = excess("RandomShift", "master", rows), excess(qsgd, "master", rows)
    assert mean(other - shift).above(0.0)


@EXHAUSTIVE
@pytest.mark.parametrize("qsgd", [FP32, BF16])
def test_on_quantised_iterates_random_shift_is_better_with_noisy_gradients(qsgd: str) -> None:
    """As C.4 says: updates are longer than a tenth of the lattice's step (see the next test)."""
    case = ("quantised iterates", f"{BATCH} rows")
    assert result("RandomShift", *case).update > 0.1
    assert mean(excess(qsgd, *case) - excess("RandomShift", *case)).above(0.0)


@EXHAUSTIVE
def test_on_quantised_iterates_qsgd_is_better_with_exact_gradients() -> None:
    """Against C.4. Where x is on the lattice, stochastic rounding of x + u has a squared error of
    step^2 z (1 - z), z = |u| / step < 1 (Lemma 15), a random shift always step^2 / 12. Near the
    optimum z is below 0.09, where both are equal."""
    case = ("quantised iterates", "all rows")
    assert result(FP32, *case).update < 0.09
    assert mean(excess("RandomShift", *case) - 2 * excess(FP32, *case)).above(0.0)


def test_quantised_weights_rest_with_qsgd_and_move_with_random_shift() -> None:
    """Rounding without an update: QSGD's grid, with fp32 metadata, is the one that is there.
    RandomShift moves each block as a whole, by up to half a step, at every rounding."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(400, 16, generator=generator)
    step = grid_step(values)

    once = sent(CODECS[FP32], values, key=1)
    moved = (sent(CODECS[FP32], once, key=2) - once).abs() / step
    assert float((moved < 1e-3).double().mean()) > 0.999

    once = sent(CODECS["RandomShift"], values, key=1)
    moved = (sent(CODECS["RandomShift"], once, key=2) - once) / step
    assert float(moved.abs().max()) < 0.501
    assert torch.allclose(moved, moved[:, :1].expand(-1, 16), atol=1e-3)
    assert mean(moved[:, 0].double().square()).within(1 / 12)
