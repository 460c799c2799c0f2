"""The random numbers are uniform and uncorrelated.

Keys are fixed, so the statistics are too; each bound is 4.5 standard errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from codec_calls import call
from gradwire.lang import Codec, rng
from gradwire.lang.ops import concat, fp32, random
from gradwire.lang.trace import stream

N = 2**18
KEYS = [rng.parameter_key(0, f"layer.{i}.weight", rank) for i in range(3) for rank in range(2)]
LAGS = [1, 2, 3, 4, 7, 16, 64, 128, 610, 1024, 4096, 65536]


def draw(key: int, stream: int = 0, n: int = N) -> torch.Tensor:
    return rng.uniform(key, stream, torch.arange(n, dtype=torch.int64)).double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """The correlation in standard errors; both are uniform in [0, 1)."""
    return float(((a - 0.5) * (b - 0.5)).mean() * 12 * len(a) ** 0.5)


def strays(key: int) -> list[str]:
    """In what the numbers of a key are not uniform and independent."""
    u = draw(key)
    errors = {
        "mean": (float(u.mean()) - 0.5) * (12 * N) ** 0.5,
        "variance": (float(u.var()) - 1 / 12) * (180 * N) ** 0.5,
    }
    errors |= {f"correlation at lag {lag}": correlation(u[:-lag], u[lag:]) for lag in LAGS}
    cells = (u * 16).long()
    for lag in (1, 16, 128):  # pairs fill the square
        counts = torch.bincount(cells[:-lag] * 16 + cells[lag:], minlength=256).double()
        expected = (N - lag) / 256
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        errors[f"pairs at lag {lag}"] = (chi2 - 255) / (2 * 255) ** 0.5
    codes = (u * 2**24).long()
    for bit in range(24):
        ones = float(((codes >> bit) & 1).double().mean())
        errors[f"bit {bit}"] = (ones - 0.5) * 2 * N**0.5
    others = {"next key": (key + 1, 0), "far key": (key ^ (1 << 63), 0)}
    others |= {f"stream {stream}": (key, stream) for stream in (1, 2)}
    errors |= {name: correlation(u, draw(*other)) for name, other in others.items()}
    outside = ["range"] if u.min() < 0 or u.max() >= 1 else []
    return [*outside, *(name for name, error in errors.items() if not abs(error) < 4.5)]


def test_numbers_are_uniform_and_independent() -> None:
    faults = {key: found for key in KEYS if (found := strays(key))}
    assert not faults


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


@dataclass(frozen=True)
class Noise(Codec):
    """Sends the random numbers of a name."""

    name: str

    def encode(self, g: Any) -> Any:
        return concat(noise=fp32(g * 0.0 + random(shared=self.name)))

    def decode(self, noise: Any) -> Any:
        return noise


def test_streams_of_other_names_are_other_streams() -> None:
    """The two names had the same stream once, by a hash of 16 bits."""
    sent = []
    for name in ("noise8", "noise5152"):
        eager, compiled = (
            call(Noise(name), "encode", torch.ones(64), shared=7, target=target).payload
            for target in ("eager", "c")
        )
        assert torch.equal(eager, compiled)
        sent.append(eager.clone().view(torch.float32))
    assert not (sent[0] == sent[1]).any()
    numbers = {stream(f"name {i}").number for i in range(50_000)}
    assert len(numbers) == 50_000
    # checkpoints need the same numbers in every version
    assert stream("rotate").number == 9576072356352237280


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
