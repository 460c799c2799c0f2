"""Linear regression with quantised weights and gradients (THESIS C.4): 8 bits in blocks of 16.

The thesis trains on YearPredictionMSD, 90 features; here are 96 Gaussian ones, 2000 rows. Weights
and gradients pass through the same codec. f is half the mean squared error over all rows, f* its
minimum. The table that this prints, in half a minute at most:

    PYTHONPATH=src:tests python tests/theory/regression.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

import gradwire as gw
from codec_calls import round_trip
from gradwire.codecs import Codec

FEATURES, ROWS, RUNS = 96, 2000, 24
RATE, STEPS, LAST = 0.1, 300, 100
BATCH = 32

CODECS: dict[str, Codec] = {
    "RandomShift": gw.codecs.RandomShift(bits=8, block=16),
    "QSGD, fp32 metadata": gw.QSGD(bits=8, block=16, rounding="stochastic", metadata="fp32"),
    "QSGD, bf16 metadata": gw.QSGD(bits=8, block=16, rounding="stochastic"),
}


def sent(codec: Codec, values: Tensor, key: int) -> Tensor:
    """What is decoded, of fp32 values of any shape whose last dimension is a number of blocks."""
    return round_trip(codec, values.reshape(-1), key).view_as(values)


def grid_step(weights: Tensor) -> Tensor:
    """Of each value's block: its range over 255, in the shape of the weights."""
    blocks = weights.view(-1, 16)
    step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 255
    return step.expand_as(blocks).reshape(weights.shape)


@dataclass(frozen=True)
class Data:
    """RUNS problems with common features."""

    features: Tensor  # [ROWS, FEATURES]
    targets: Tensor  # [RUNS, ROWS]
    best: Tensor  # [RUNS, FEATURES], the weights that minimise f
    hessian: Tensor

    @classmethod
    def draw(cls, seed: int = 0) -> Data:
        generator = Generator().manual_seed(seed)
        features = torch.randn(ROWS, FEATURES, generator=generator)
        weights = torch.randn(RUNS, FEATURES, generator=generator)
        noise = 0.5 * torch.randn(RUNS, ROWS, generator=generator)
        targets = weights @ features.T + noise
        best = torch.linalg.lstsq(features.double(), targets.double().T).solution.T
        return cls(features, targets, best, features.double().T @ features.double() / ROWS)

    def excess(self, weights: Tensor) -> Tensor:
        """f - f*, one number per run."""
        d = weights.double() - self.best
        return 0.5 * ((d @ self.hessian) * d).sum(-1)

    def gradient(self, weights: Tensor, generator: Generator, batch: int | None) -> Tensor:
        """Of `batch` rows drawn for each run; None: of all rows."""
        if batch is None:
            return ((weights.double() - self.best) @ self.hessian).float()
        rows = torch.randint(ROWS, (RUNS, batch), generator=generator)
        x = self.features[rows]
        error = torch.einsum("rbf,rf->rb", x, weights) - self.targets.gather(1, rows)
        return torch.einsum("rbf,rb->rf", x, error) / batch


@dataclass(frozen=True)
class Result:
    """Means over the LAST of STEPS steps."""

    excess: Tensor  # [RUNS], f - f* at the decoded weights
    update: float  # mean of an update's size, in steps of its block's grid


def train(data: Data, codec: Codec, master: bool, batch: int | None) -> Result:
    """With a master, v <- v - RATE Q(g(Q(v))); without, x <- Q(x - RATE Q(g(x))) (Eq. 5.2)."""
    generator = Generator().manual_seed(1)
    kept = torch.zeros(RUNS, FEATURES)
    total, moved = torch.zeros(RUNS, dtype=torch.float64), 0.0
    for step in range(STEPS):
        weights = sent(codec, kept, key=2 * step)
        if not master:
            kept = weights
        gradient = sent(codec, data.gradient(weights, generator, batch), key=2 * step + 1)
        kept = kept - RATE * gradient
        if step >= STEPS - LAST:
            total += data.excess(weights)
            moved += float((RATE * gradient / grid_step(weights)).abs().mean())
    return Result(total / LAST, moved / LAST)


CASES = {
    ("master", "all rows"): (True, None),
    ("master", f"{BATCH} rows"): (True, BATCH),
    ("quantised iterates", "all rows"): (False, None),
    ("quantised iterates", f"{BATCH} rows"): (False, BATCH),
}


def main() -> None:
    data = Data.draw()
    print(f"f - f* (standard error of {RUNS} runs), thousandths; updates in steps of the grid")
    for (weights, rows), (master, batch) in CASES.items():
        for name, codec in CODECS.items():
            result = train(data, codec, master, batch)
            runs = 1000 * result.excess
            shown = f"{float(runs.mean()):.2f} ({float(runs.std()) / RUNS**0.5:.2f})"
            print(f"{weights:20} {rows:10} {name:20} {shown:13} {result.update:.2f}")


if __name__ == "__main__":
    main()
