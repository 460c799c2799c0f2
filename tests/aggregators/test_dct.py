"""The fast cosine transform against the matrix in float64."""

from __future__ import annotations

import math

import pytest
import torch

from gradwire.aggregators.dct import coefficients, values_of


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


def test_its_bits_depend_on_no_threads_and_no_neighbours() -> None:
    values, before = torch.randn(200, 64 * 64), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            there = coefficients(values.view(-1), (values.numel(),), 64)
            found.append((there, values_of(there, (values.numel(),), 64)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))
    alone = coefficients(values[123], (4096,), 64)
    assert torch.equal(alone[0], found[0][0][123])
