"""QSGD against RandomShift on linear regression (THESIS C.4), with our codecs."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from lattice import mean
from regression import BATCH, CASES, CODECS, Data, Result, grid_step, sent, train

from products import EXHAUSTIVE, exhaustive, one_in

FP32, BF16 = "QSGD, fp32 metadata", "QSGD, bf16 metadata"


MASTER, ITERATES, ALL, SOME = "master", "quantised iterates", "all rows", f"{BATCH} rows"


@cache
def result(codec: str, weights: str, rows: str) -> Result:
    return train(Data.draw(), CODECS[codec], *CASES[weights, rows])


@pytest.mark.parametrize(
    ("weights", "rows", "qsgd"),
    [
        *one_in(4, [(MASTER, rows, qsgd) for qsgd in (FP32, BF16) for rows in (SOME, ALL)]),
        *exhaustive(*((ITERATES, SOME, qsgd) for qsgd in (FP32, BF16))),
    ],
)
def test_random_shift_is_better(weights: str, rows: str, qsgd: str) -> None:
    """As C.4 says. With a master its mean squared error is half of stochastic rounding's, and both
    are unbiased, so this is so with and without noise of the gradients. On quantised iterates with
    noisy gradients updates are longer than a tenth of the lattice's step (see the next test)."""
    shift, other = result("RandomShift", weights, rows), result(qsgd, weights, rows)
    assert weights == MASTER or shift.update > 0.1
    assert mean(other.excess - shift.excess).above(0.0)


@EXHAUSTIVE
def test_on_quantised_iterates_qsgd_is_better_with_exact_gradients() -> None:
    """Against C.4. Where x is on the lattice, stochastic rounding of x + u has a squared error of
    step^2 z (1 - z), z = |u| / step < 1 (Lemma 15), a random shift always step^2 / 12. Near the
    optimum z is below 0.09, where both are equal."""
    shift, other = (result(codec, ITERATES, ALL) for codec in ("RandomShift", FP32))
    assert other.update < 0.09
    assert mean(shift.excess - 2 * other.excess).above(0.0)


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
