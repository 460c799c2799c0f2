"""What a benchmark task is: a frozen dataclass whose fields are the model's sizes and the recipe.

Its methods make the model, the optimizer and the data. It does not communicate, so all methods
(`bench.train.methods`) train the same task.

A batch depends only on (seed, rank, step), and on the number of ranks where the data are split by
class, so that all methods train on the same batches and a run can be repeated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
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

    @property
    def mean_loss(self) -> float:
        """Nats per prediction."""
        return self.loss / self.count


class Task(ABC):
    """A classifier, trained with a rate of learning that rises over `warmup` steps, then falls by a
    cosine to `floor` of its peak at step `horizon`.

    The rate does not depend on the length of a run: runs of different lengths share their
    beginning, and a run that stops early has the rates of one that goes on.
    """

    metric: ClassVar[str]  # the name of what `metric_of` returns, unit included
    floor: ClassVar[float] = 0.1
    warmup: int
    horizon: int

    @abstractmethod
    def describe(self) -> str:
        """One line on the model and the data, including any substitution."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The model, initialised by torch's random state: inputs to logits [..., classes]."""

    @abstractmethod
    def optimizer(self, model: nn.Module, momentum: float | None = None) -> Optimizer:
        """The optimizer, at the peak learning rate.

        Args:
            momentum: in place of the recipe's (of AdamW: its first beta), for a method that has
                momentum of its own.
        """

    @abstractmethod
    def batch(self, seed: int, rank: int, step: int, ranks: int = 1) -> Batch:
        """The rank's share of the global batch of `step`, among `ranks` ranks."""

    @abstractmethod
    def validation(self, part: int, parts: int) -> Iterator[Batch]:
        """The `part`-th of `parts` disjoint shares of the validation data."""

    @abstractmethod
    def metric_of(self, score: Score) -> float:
        """The usual metric of this task."""

    def model(self, seed: int) -> nn.Module:
        """The model, initialised from `seed` alone: equal for all methods and ranks."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def learning_rate(self, step: int) -> float:
        """The factor on the peak learning rate at `step` (from 0), in (0, 1]."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.horizon - self.warmup))
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * progress)) / 2

    def set_learning_rate(self, optimizer: Optimizer, step: int) -> None:
        """Set the optimizer's rate for `step`."""
        for group in optimizer.param_groups:
            peak = group.setdefault("initial_lr", group["lr"])
            group["lr"] = peak * self.learning_rate(step)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss to minimise, a scalar, averaged over the batch."""
        given, expected = _beside(model, batch)
        return F.cross_entropy(model(given).flatten(0, -2), expected.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: int, parts: int) -> Score:
        """The score on a share of the validation data."""
        loss = correct = count = 0.0
        for batch in self.validation(part, parts):
            given, expected = _beside(model, batch)
            logits, expected = model(given).flatten(0, -2), expected.flatten()
            loss += F.cross_entropy(logits, expected, reduction="sum").item()
            correct += (logits.argmax(dim=1) == expected).sum().item()
            count += expected.numel()
        return Score(loss, correct, count)


def _beside(model: nn.Module, batch: Batch) -> Batch:
    """The batch on the model's device."""
    device = next(model.parameters()).device
    return batch[0].to(device), batch[1].to(device)
