"""The random numbers are uniform and uncorrelated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.lang import rng

N = 2**18
KEYS = [rng.parameter_key(0, f"layer.{i}.weight", rank) for i in range(3) for rank in range(2)]


def draw(key: int, stream: int = 0, n: int = N) -> torch.Tensor:
    return rng.uniform(key, stream, torch.arange(n, dtype=torch.int64)).double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """The correlation in standard errors; both are uniform in [0, 1)."""
    return float(((a - 0.5) * (b - 0.5)).mean() * 12 * len(a) ** 0.5)


@pytest.mark.parametrize("key", KEYS)
class TestUniform:
    def test_mean_and_variance(self, key: int) -> None:
        u = draw(key)
        assert u.min() >= 0
        assert u.max() < 1
        assert abs(float(u.mean()) - 0.5) * (12 * N) ** 0.5 < 4.5
        assert abs(float(u.var()) - 1 / 12) * (180 * N) ** 0.5 < 4.5

    @pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 16, 64, 128, 610, 1024, 4096, 65536])
    def test_no_serial_correlation(self, key: int, lag: int) -> None:
        u = draw(key)
        assert abs(correlation(u[:-lag], u[lag:])) < 4.5

    def test_pairs_fill_the_square(self, key: int) -> None:
        for lag in (1, 16, 128):
            cells = (draw(key) * 16).long()
            counts = torch.bincount(cells[:-lag] * 16 + cells[lag:], minlength=256).double()
            expected = (N - lag) / 256
            chi2 = float(((counts - expected) ** 2 / expected).sum())
            assert abs(chi2 - 255) < 4.5 * (2 * 255) ** 0.5

    def test_every_bit_is_fair(self, key: int) -> None:
        codes = (draw(key) * 2**24).long()
        for bit in range(24):
            ones = float(((codes >> bit) & 1).double().mean())
            assert abs(ones - 0.5) * 2 * N**0.5 < 4.5

    def test_neighbouring_keys_and_streams_are_independent(self, key: int) -> None:
        u = draw(key)
        for other in (draw(key + 1), draw(key ^ (1 << 63)), draw(key, 1), draw(key, 2)):
            assert abs(correlation(u, other)) < 4.5


def test_index_wraps_at_32_bits() -> None:
    index = torch.tensor([5, 5 + 2**32, 5 + 2**40])
    u = rng.uniform(1, 0, index & rng.MASK32)
    assert u[0] == u[1] == u[2]


def test_parameter_keys_depend_on_everything() -> None:
    keys = {
        rng.parameter_key(seed, name, rank)
        for seed in (0, 1)
        for name in ("a", "b", "1/a")
        for rank in (0, 1, 11)
    }
    assert len(keys) == 18
    assert all(0 <= key < 2**64 for key in keys)
    # checkpoints need the same key in every version
    assert rng.parameter_key(0, "weight", 0) == 16975060134623626974


def test_step_keys_differ_by_step_and_phase() -> None:
    keys = np.array(KEYS, np.uint64)
    seen = [rng.step_keys(keys, step, phase) for step in range(20) for phase in range(3)]
    assert len(set(np.concatenate(seen).tolist())) == 20 * 3 * len(KEYS)
    assert seen[0].dtype == np.uint64
    steps = np.arange(len(KEYS))
    each = rng.step_keys(keys, steps, 1)
    assert each[4] == rng.step_keys(keys, 4, 1)[4]


def test_step_keys_give_independent_numbers() -> None:
    keys = rng.step_keys(np.array([KEYS[0]] * 4, np.uint64), np.arange(4), 0)
    draws = [draw(int(k)) for k in keys]
    for i in range(4):
        for j in range(i):
            assert abs(correlation(draws[i], draws[j])) < 4.5
