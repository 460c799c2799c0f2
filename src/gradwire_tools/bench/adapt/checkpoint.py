"""Uncompressed training up to a step, from which short runs start: what methods cost in loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property

import torch

from gradwire.aggregators import Aggregator, Dense
from gradwire.collectives import Options
from gradwire_tools.bench import tasks
from gradwire_tools.bench.adapt.in_process import InProcessRanks
from gradwire_tools.bench.adapt.record import Named, Recording, gradients, stepped
from gradwire_tools.bench.progress import progress

Methods = Mapping[int, Aggregator]  # of parameters, by their places in the model


class Checkpoint:
    """Uncompressed training of a recording's model up to a step, from which runs start.

    Args:
        recording: names the task, its options, ranks and seed.
        at: the step of the checkpoint.
        steps: of every run.

    Attributes:
        loss: validation loss after a run that compresses nothing, in nats per prediction.
        averages: of that run, by parameter: the mean over ranks and steps of its gradients.
    """

    def __init__(self, recording: Recording, at: int, steps: int) -> None:
        self.recording, self.at, self.steps = recording, at, steps
        self._task = tasks.get(recording.task, **recording.task_options)
        self._model = self._task.model(recording.seed)
        self._optimizer = self._task.optimizer(self._model)
        for step in range(at):
            progress(f"{recording.task}, training to {at}", step, at)
            of_ranks, _ = self._gradients(self._model, step)
            stepped(self._task, self._model, self._optimizer, torch.stack(of_ranks).mean(0), step)
        self._sum = torch.zeros(recording.numel, dtype=torch.float64)
        self.loss = self._run({}, self._sum)
        self.averages: Named = [
            (name, part.view(shape).float())
            for (name, shape), part in zip(
                recording.parameters, self._parts(self._sum / steps), strict=True
            )
        ]

    def change(self, methods: Methods) -> float:
        """What the loss changes by if parameters are averaged by these methods, in nats."""
        return self._run(methods) - self.loss

    @cached_property
    def bf16_change(self) -> float:
        """What it changes by if all matrices are averaged in bf16: what rounding alone does."""
        shapes = [shape for _, shape in self.recording.parameters]
        return self.change({i: Dense(torch.bfloat16) for i, s in enumerate(shapes) if len(s) > 1})

    def _gradients(self, model: torch.nn.Module, step: int) -> tuple[list[torch.Tensor], float]:
        return gradients(self._task, model, self.recording.seed, self.recording.ranks, step)

    def _parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """By parameter."""
        return list(vector.split([math.prod(shape) for _, shape in self.recording.parameters]))

    def _run(self, methods: Methods, total: torch.Tensor | None = None) -> float:
        """The validation loss after a run; its averages are added to `total`."""
        model = copy.deepcopy(self._model)
        optimizer = self._task.optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))
        places: dict[Aggregator, list[int]] = {}
        for i, method in methods.items():
            places.setdefault(method, []).append(i)
        with ExitStack() as stack:
            averaging = [
                (mine, stack.enter_context(closing(self._ranks(mine, method))))
                for method, mine in places.items()
            ]
            for step in range(self.at, self.at + self.steps):
                of_ranks, _ = self._gradients(model, step)
                mean = torch.stack(of_ranks).mean(0)
                into, parts = self._parts(mean), [self._parts(one) for one in of_ranks]
                for mine, ranks in averaging:
                    averages, _ = ranks.average([[of[i] for i in mine] for of in parts])
                    for i, average in zip(mine, averages, strict=True):
                        into[i].copy_(average.view(-1))
                if total is not None:
                    total += mean
                stepped(self._task, model, optimizer, mean, step)
        model.eval()
        return self._task.evaluate(model, 0, 1).mean_loss

    def _ranks(self, places: Sequence[int], method: Aggregator) -> InProcessRanks:
        parameters = [self.recording.parameters[i] for i in places]
        return InProcessRanks(self.recording.ranks, parameters, method, Options(threads=1))
