"""The interface of a benchmark task.

A task is a frozen dataclass: its fields are the model's sizes and the recipe, its methods make the
model, the optimizer and the data. It does not communicate, so all methods (`bench.methods`) train
the same task.

A batch depends only on (seed, rank, step), and on the number of ranks where the data are split by
class, so that all methods train on the same batches and a run
can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Score:
    """Sums over a part of the validation data; the sums of all parts add up to the total.

    Attributes:
        loss: sum of the losses, in nats.
        correct: number of correct predictions.
        count: number of predictions.
    """

    loss: float
    correct: float
    count: float

    def tensor(self) -> Tensor:
        """The three sums as a float64 vector, for an all-reduce over ranks."""
        return torch.tensor([self.loss, self.correct, self.count], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, sums: Tensor) -> Score:
        """The inverse of `tensor`."""
        loss, correct, count = sums.tolist()
        return cls(loss, correct, count)

    @property
    def mean_loss(self) -> float:
        """Nats per prediction."""
        return self.loss / self.count


@runtime_checkable
class Task(Protocol):
    """The methods of a task."""

    def __hash__(self) -> int:
        """By its fields, as frozen dataclasses have it."""

    @property
    def metric(self) -> str:
        """The name of the metric that `metric_of` returns, unit included."""

    def describe(self) -> str:
        """One line on the model and the data, including any substitution."""

    def model(self, seed: int) -> nn.Module:
        """The model, initialised from `seed` alone: equal for all methods and ranks."""

    def optimizer(self, model: nn.Module, momentum: float | None = None) -> Optimizer:
        """The optimizer, at the peak learning rate.

        Args:
            momentum: in place of the recipe's (of AdamW: its first beta), for a method that has
                momentum of its own.
        """

    def learning_rate(self, step: int) -> float:
        """The factor on the peak learning rate at `step` (from 0), whatever the run's length."""

    @property
    def warmup(self) -> int:
        """Steps over which `learning_rate` rises."""

    def batch(self, seed: int, rank: int, step: int, ranks: int = 1) -> Batch:
        """The rank's share of the global batch of `step`, among `ranks` ranks."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss to minimise, a scalar, averaged over the batch."""

    def evaluate(self, model: nn.Module, part: int, parts: int) -> Score:
        """The score on the `part`-th of `parts` disjoint shares of the validation data."""

    def metric_of(self, score: Score) -> float:
        """The usual metric of this task."""
