"""What a task owes the benchmark.

A task is a frozen dataclass: its fields are the sizes of the model and the recipe, its methods make
everything that a run needs. Nothing in it knows of ranks' communication: methods (`bench.methods`)
compare precisely because every one of them gets the same task.

Data arrive by (seed, rank, step) and by nothing else, so that two methods train on the same batches
and a run can be repeated, whatever else the process does.
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
    """Sums over a part of the validation data; those of all parts add up to the whole's.

    Attributes:
        loss: sum of the losses, in nats.
        correct: how many predictions were right.
        count: how many predictions there were.
    """

    loss: float
    correct: float
    count: float

    def tensor(self) -> Tensor:
        """The three sums as a float64 vector, ready to be summed over ranks."""
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
    """Duties of a task."""

    @property
    def metric(self) -> str:
        """What `metric_of` returns, in words, unit included."""

    def describe(self) -> str:
        """One line on the model and the data, with every substitution that was made."""

    def model(self, seed: int) -> nn.Module:
        """The model, initialised from `seed` alone: all methods and ranks start from one point."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer, at the peak learning rate."""

    def learning_rate(self, step: int, steps: int) -> float:
        """The factor on the peak learning rate at `step` (from 0) of a run of `steps` steps.

        Must not depend on `steps` while `step < warmup`, since a run may settle its length then.
        """

    @property
    def warmup(self) -> int:
        """Steps over which `learning_rate` rises."""

    def batch(self, seed: int, rank: int, step: int) -> Batch:
        """The rank's share of the global batch of `step`."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss to minimise, a scalar, averaged over the batch."""

    def evaluate(self, model: nn.Module, part: int, parts: int) -> Score:
        """The score on the `part`-th of `parts` disjoint shares of the validation data."""

    def metric_of(self, score: Score) -> float:
        """The metric that people use for this task."""
