"""The configuration of a run of `bench train`: a frozen record, passed to the workers as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.errors import ConfigError
from gradwire_tools.bench import tasks
from gradwire_tools.bench.sharded import sharded_methods
from gradwire_tools.bench.sharded.sharded_methods import ShardedMethod
from gradwire_tools.bench.train import methods
from gradwire_tools.bench.train.methods import Method
from gradwire_tools.lab import Schedule

TOLERANCE = 0.01  # relative, on the baseline's last loss


@dataclass(frozen=True)
class TrainConfig:
    """A run: one task, one network, several methods, with the same seeds and batches.

    Attributes:
        task, task_options: a name of `tasks.REGISTRY`, and its fields.
        nodes: number of emulated machines, one rank on each.
        net: "RATE,LATENCY" for the lab, or "none" for loopback.
        methods: names that `method` takes.
        seeds: of initialisation and batches; every method runs with every seed.
        steps: training steps per method and seed.
        evaluate_every: steps between evaluations; step 0 and the last step are evaluated too.
        skip_steps: number of first steps that `step_seconds` excludes (connections, allocations).
        ideal_steps: steps without communication at the end, which give `ideal_step_seconds`.
        budget_seconds: if set, `steps` is an upper bound: the number of steps is fixed after the
            first evaluation, so that training and evaluation end within this time.
        target: validation loss to reach; None takes the baseline's last loss plus `TOLERANCE`.
        target_at: if set, the target is the baseline's loss at this share of its run.
        patience: if set, a method's run ends once its rolling loss has not improved for so many
            evaluations.
        rolling: evaluations in a rolling average.
        interleaved: whether methods take turns; otherwise one trains after the other. A method that
            watches the network always trains alone.
        nets: if not empty, compose (`train_compose`): train once, on `net`, and measure the steps'
            times on each of these networks.
        timed_steps: steps per method and network that are timed.
        validate: with `nets`, also train as a whole on each network, and compare.
        sharded: train under FSDP2, not DDP.
        accumulate: with `sharded`, micro-batches per step.
        ends_to: folder for the last states of the first seed's runs, those of methods that did not
            always send the same; None keeps none.
        starts_from: such a folder, whose states are the first ones of this run.
        state: folder from which a killed run continues; None saves nothing.
        save_seconds: time between two saved states, at least.
        timeout_seconds: for the whole run.
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
    target_at: float | None = None
    patience: int | None = None
    rolling: int = 5
    interleaved: bool = True
    nets: tuple[str, ...] = ()
    timed_steps: int = 24
    validate: bool = False
    sharded: bool = False
    accumulate: int = 1
    ends_to: str | None = None
    starts_from: str | None = None
    state: str | None = None
    save_seconds: float = 60.0
    timeout_seconds: float = 7 * 24 * 3600.0

    def check(self) -> tasks.Task:
        """Check all fields before anything is launched; returns the task.

        Raises:
            ConfigError: a field is invalid; the message has its name, its value and valid values.
        """
        task = tasks.get(self.task, **self.task_options)
        if not self.methods:
            raise ConfigError(f"no methods given; known: {', '.join(methods.NAMED)}")
        for name in self.methods:
            self.method(name).check()
        nets = [str(Schedule.parse(net)) for net in self.nets]
        for name, values in (("methods", self.methods), ("seeds", self.seeds), ("nets", nets)):
            twice = [str(value) for value, count in Counter(values).items() if count > 1]
            if twice:
                raise ConfigError(f"{name} contain duplicates: {', '.join(twice)}")
        least = {"nodes": 1, "steps": 0, "evaluate_every": 1, "patience": 1, "accumulate": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{name} is {value}, must be at least {bound}")
        changes = Schedule.parse(self.net).changes
        if self.nets and changes:
            raise ConfigError(
                f"net is {self.net}: composed runs train on one network; leave the schedule out"
            )
        watches = next((name for name in self.methods if self.method(name).watches), None)
        if self.nets and watches is not None:
            raise ConfigError(
                f"method {watches!r} learns what the network lets it: train it as a whole, with "
                "--net and without --compose"
            )
        if self.target_at is not None and not 0 < self.target_at <= 1:
            raise ConfigError(f"target_at is {self.target_at:g}: give a share, above 0 and up to 1")
        if self.target_at is not None and self.target is not None:
            raise ConfigError("target and target_at exclude each other: give one")
        first = min(self.evaluate_every, self.steps)  # step with a loss of training
        if self.target_at is not None and self.target_at * self._least_steps() < first:
            share = math.ceil(1e4 * first / self._least_steps()) / 1e4
            raise ConfigError(
                f"target_at is {self.target_at:g}: with {self._least_steps()} steps and an "
                f"evaluation every {self.evaluate_every}, the target would be the loss before "
                f"training; give {share:g} or more"
            )
        if self.validate and not self.nets:
            raise ConfigError("validate compares composed with whole runs: give nets to compose")
        if self.accumulate > 1 and not self.sharded:
            raise ConfigError(f"accumulate is {self.accumulate}: micro-batches need --sharded")
        if self.sharded and getattr(task, "channels_last", False):
            raise ConfigError(
                "channels_last=true: FSDP2 shards contiguous parameters: leave it out"
            )
        if not self.seeds:
            raise ConfigError("no seeds given")
        if min(self.seeds) < 0:
            raise ConfigError(f"seed {min(self.seeds)}: seeds are 0 or more")
        if max(self.seeds) >= 2**63:
            raise ConfigError(f"seed {max(self.seeds)}: seeds are below 2^63")
        if self.budget_seconds is not None and self.evaluate_every > task.warmup:
            raise ConfigError(
                f"with a budget, evaluate_every ({self.evaluate_every}) must not exceed the "
                f"task's warm-up ({task.warmup}), in which the number of steps is fixed"
            )
        for name in () if self.sharded else self.methods:
            method = methods.parse(name)
            if method.kind == "gradwire":  # else its shapes are not asked for: they take time
                method.check(self.nodes, tasks.shapes(task))
        return task

    def _least_steps(self) -> int:
        """The fewest steps that a run may have."""
        ends = [self.steps]
        if self.budget_seconds is not None:
            ends.append(2 * self.evaluate_every)
        if self.patience is not None:
            ends.append(self.patience * self.evaluate_every)
        return min(ends)

    def method(self, name: str) -> Method | ShardedMethod:
        """The method that a name stands for in this run.

        Raises:
            ConfigError: there is none, or it is for the other of DDP and FSDP2.
        """
        of_sharded = sharded_methods.knows(name)
        if of_sharded and not self.sharded:
            raise ConfigError(f"method {name!r} trains under FSDP2: give --sharded, too")
        if self.sharded and not of_sharded and _is_of_ddp(name):
            raise ConfigError(
                f"method {name!r} averages DDP's gradients: leave --sharded out, or use "
                + ", ".join(sharded_methods.KNOWN)
            )
        return sharded_methods.parse(name) if self.sharded else methods.parse(name)

    def groups(self) -> list[tuple[int, tuple[str, ...]]]:
        """What trains together: (seed, methods), in order."""
        alone = [m for m in self.methods if not self.interleaved or self.method(m).watches]
        together = tuple(m for m in self.methods if m not in alone)
        parts = [together, *((m,) for m in alone)]
        return [(seed, part) for seed in self.seeds for part in parts if part]


def _is_of_ddp(name: str) -> bool:
    try:
        methods.parse(name)
    except ConfigError:
        return False
    return True
