"""The fast cosine transform against the matrix in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradwire.aggregators.dct import _factors_on, coefficients, values_of


def matrix(n: int) -> torch.Tensor:
    """The orthonormal DCT-II of n values, by its definition, in float64."""
    k = torch.arange(n, dtype=torch.float64)
    found = torch.cos(math.pi * k[:, None] * (2 * k + 1) / (2 * n)) * math.sqrt(2 / n)
    found[0] *= math.sqrt(0.5)
    return found


def tiles_of(values: torch.Tensor, shape: tuple[int, ...], side: int) -> torch.Tensor:
    """Squares of a matrix, row by row of squares; else of as many values in a row."""
    if len(shape) == 2 and shape[0] % side == shape[1] % side == 0:
        rows = values.view(shape).split(side)
        return torch.stack([tile for row in rows for tile in row.split(side, 1)])
    return torch.nn.functional.pad(values, (0, -len(values) % side**2)).view(-1, side, side)


SHAPES: list[tuple[int, ...]] = [(128, 192), (64, 64), (100, 50), (5000,), (), (8, 16, 64)]


@pytest.mark.parametrize("side", [2, 4, 8, 16, 32, 64])
def test_coefficients_are_those_of_the_matrix_and_come_back(side: int) -> None:
    made = torch.Generator().manual_seed(torch.seed())
    for shape in SHAPES:
        values = torch.randn(math.prod(shape), generator=made)
        found, m = coefficients(values, shape, side), matrix(side)
        expected = m @ tiles_of(values.double(), shape, side) @ m.T
        where = f"{shape}, seed {made.initial_seed()}"
        assert float((found.double() - expected.flatten(1)).abs().max()) < 4e-6, where
        back = values_of(found, shape, side)
        assert back.shape == values.shape, where
        assert float((back - values).abs().max()) < 6e-6, where


def test_its_bits_are_those_of_products_and_additions_rounded_one_by_one() -> None:
    """With any number of threads, and of tiles."""
    values, before = torch.randn(200, 64 * 64), torch.get_num_threads()
    of = (values.numel(),)
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            there = coefficients(values.view(-1), of, 64)
            found.append((there, values_of(there, of, 64)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))
    assert torch.equal(coefficients(values[123], (4096,), 64)[0], found[0][0][123])
    for which, inverse in enumerate((False, True)):
        given = (values, found[0][0])[which][7].view(64, 64).numpy()
        for _ in range(2):
            for i, a, j, b in _factors_on(64, inverse, torch.device("cpu")):
                left, right = given[i.numpy()] * a[:, 0].numpy(), given[j.numpy()] * b[:, 0].numpy()
                given = left + right
            given = given.T
        assert np.array_equal(given.reshape(-1), found[0][which].view(200, 4096)[7].numpy())
