"""The configuration of a run of `bench train`: a frozen record, passed to the workers as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.bench import methods, tasks
from gradwire.errors import ConfigError
from gradwire.lab import Network


@dataclass(frozen=True)
class TrainConfig:
    """A run: one task, one network, several methods, with the same seeds and batches.

    Attributes:
        task, task_options: a name of `tasks.REGISTRY`, and its fields.
        nodes: number of emulated machines, one rank on each.
        net: "RATE,LATENCY" for the lab, or "none" for loopback.
        methods: names that `methods.parse` takes.
        seeds: of initialisation and batches; every method runs with every seed.
        steps: training steps per method and seed.
        evaluate_every: steps between evaluations; step 0 and the last step are evaluated too.
        skip_steps: number of first steps that `step_seconds` excludes (connections, allocations).
        ideal_steps: steps without communication at the end, which give `ideal_step_seconds`.
        budget_seconds: if set, `steps` is an upper bound: the number of steps is fixed after the
            first evaluation, so that training and evaluation end within this time.
        target: validation loss to reach; None takes the baseline's last loss plus `tolerance`.
        target_at: if set, the target is the baseline's loss at this share of its run.
        tolerance: relative, on the baseline's last loss.
        patience: if set, a method's run ends once its rolling loss has not improved for so many
            evaluations.
        rolling: evaluations in a rolling average.
        interleaved: whether methods take turns; otherwise one trains after the other.
        nets: if not empty, compose (`train_compose`): train once, on `net`, and measure the steps'
            times on each of these networks.
        timed_steps: steps per method and network that are timed.
        validate: with `nets`, also train as a whole on each network, and compare.
        state: folder from which a killed run continues; None saves nothing.
        save_seconds: time between two saved states, at least.
        timeout_seconds: for the whole run.
        collective_timeout_seconds: for each collective.
    """

    task: str = "gpt"
    task_options: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 4
    net: str = "1gbit,1ms"
    methods: tuple[str, ...] = tuple(methods.NAMED)
    seeds: tuple[int, ...] = (0,)
    steps: int = 200
    evaluate_every: int = 10
    skip_steps: int = 3
    ideal_steps: int = 6
    budget_seconds: float | None = None
    target: float | None = None
    tolerance: float = 0.01
    target_at: float | None = None
    patience: int | None = None
    rolling: int = 5
    interleaved: bool = True
    nets: tuple[str, ...] = ()
    timed_steps: int = 24
    validate: bool = False
    state: str | None = None
    save_seconds: float = 60.0
    timeout_seconds: float = 7 * 24 * 3600.0
    collective_timeout_seconds: float = 60.0

    def check(self) -> tasks.Task:
        """Check all fields before anything is launched; returns the task.

        Raises:
            ConfigError: a field is invalid; the message has its name, its value and valid values.
        """
        task = tasks.get(self.task, **self.task_options)
        if not self.methods:
            raise ConfigError(f"no methods given; known: {', '.join(methods.NAMED)}")
        for name in self.methods:
            methods.parse(name).check()
        for name, values in (("methods", self.methods), ("seeds", self.seeds), ("nets", self.nets)):
            if len(set(values)) != len(values):
                raise ConfigError(f"{name} contain duplicates: {', '.join(map(str, values))}")
        least = {
            "nodes": 1,
            "steps": 0,
            "evaluate_every": 1,
            "ideal_steps": 2,
            "skip_steps": 0,
            "rolling": 1,
            "timed_steps": 6,
            "patience": 1,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{name} is {value}, must be at least {bound}")
        for net in (self.net, *self.nets):
            Network.parse(net)
        if self.target_at is not None and not 0 < self.target_at <= 1:
            raise ConfigError(f"target_at is {self.target_at:g}: give a share, above 0 and up to 1")
        if self.target_at is not None and self.target is not None:
            raise ConfigError("target and target_at exclude each other: give one")
        if self.validate and not self.nets:
            raise ConfigError("validate compares composed with whole runs: give nets to compose")
        if not self.seeds:
            raise ConfigError("no seeds given")
        if min(self.seeds) < 0:
            raise ConfigError(f"seed {min(self.seeds)}: seeds are 0 or more")
        if self.budget_seconds is not None and self.evaluate_every > task.warmup:
            raise ConfigError(
                f"with a budget, evaluate_every ({self.evaluate_every}) must not exceed the "
                f"task's warm-up ({task.warmup}), in which the number of steps is fixed"
            )
        return task

    def groups(self) -> list[tuple[int, tuple[str, ...]]]:
        """What trains together: (seed, methods), in order."""
        if self.interleaved:
            return [(seed, self.methods) for seed in self.seeds]
        return [(seed, (method,)) for seed in self.seeds for method in self.methods]

    def to_json(self) -> str:
        """The record as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        for name in ("methods", "seeds", "nets"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
