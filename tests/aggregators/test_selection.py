"""Packed positions of the largest values: those of a sort, in the bytes that are told."""

from __future__ import annotations

from itertools import product

import torch

from gradwire.aggregators import selection

SIZES = [0, 1, 7, 127, 128, 129, 511, 512, 513, 3000, 70_001]


def test_positions_are_those_of_the_largest() -> None:
    for numel, density, made in product(
        SIZES, [1, 0.5, 0.1, 0.01, 0.001], ["drawn", "ties", "zeros"]
    ):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        if made != "drawn":
            values = (values * (made == "ties")).round()
        k, where = selection.count(density, numel), (numel, density, made)
        assert k == min(max(1, int(density * numel)), numel), where
        expected = values.abs().sort(descending=True, stable=True).indices[:k].sort().values
        packed = selection.pack(values, density)
        assert packed.shape == (selection.packed_nbytes(density, numel),), where
        assert torch.equal(selection.unpack(packed, density, numel), expected), where


def test_what_is_not_finite_is_largest() -> None:
    values = torch.tensor([1.0, torch.nan, 1e38, -torch.inf, torch.inf, 2.0])
    packed = selection.pack(values, 0.5)
    assert selection.unpack(packed, 0.5, 6).tolist() == [1, 3, 4]


def test_zeros_unpack_to_places_in_the_tensor() -> None:
    """A rehearsal sends nothing."""
    for numel in SIZES:
        zeros = torch.zeros(selection.packed_nbytes(0.1, numel), dtype=torch.uint8)
        places = selection.unpack(zeros, 0.1, numel)
        assert places.shape == (selection.count(0.1, numel),)
        assert ((places >= 0) & (places < max(numel, 1))).all()
