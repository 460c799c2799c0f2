"""The configuration of a run of `bench train`: a frozen record, passed to the workers as JSON; all
its checks; and `plan`, which makes one from a command line."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.errors import ConfigError
from gradwire_tools import lab
from gradwire_tools.bench import tasks
from gradwire_tools.bench.train import methods, sharded
from gradwire_tools.bench.train.methods import Method
from gradwire_tools.bench.train.sharded import ShardedMethod
from gradwire_tools.lab import Schedule, links

COMPARED = ("torch-fp32", "torch-fp16-hook", "gradwire-qsgd4")  # of short runs
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
        nets: if not empty, compose (`compose`): train once, on `net`, and measure the steps' times
            on each of these networks.
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
        found = [self.method(name) for name in self.methods]
        for method in found:
            method.check()
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
        if self.nets and Schedule.parse(self.net).changes:
            raise ConfigError(
                f"net is {self.net}: composed runs train on one network; leave the schedule out"
            )
        watches = next((method.name for method in found if method.watches), None)
        if self.nets and watches is not None:
            raise ConfigError(
                f"method {watches!r} learns what the network lets it: train it as a whole, with "
                "--net and without --compose"
            )
        if self.target_at is not None:
            self._check_share(self.target_at)
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
        for method in found:
            if isinstance(method, Method) and method.kind == "gradwire":
                method.check(self.nodes, tasks.shapes(task))  # last, as shapes take time
        return task

    def _check_share(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"target_at is {share:g}: give a share, above 0 and up to 1")
        if self.target is not None:
            raise ConfigError("target and target_at exclude each other: give one")
        every = self.evaluate_every
        steps = [self.steps]  # the fewest that a run may have
        if self.budget_seconds is not None:
            steps.append(2 * every)
        if self.patience is not None:
            steps.append(self.patience * every)
        first = min(every, self.steps)  # step with a loss of training
        if share * min(steps) < first:
            least = math.ceil(1e4 * first / min(steps)) / 1e4
            raise ConfigError(
                f"target_at is {share:g}: with {min(steps)} steps and an evaluation every {every}, "
                f"the target would be the loss before training; give {least:g} or more"
            )

    def method(self, name: str) -> Method | ShardedMethod:
        """The method that a name stands for in this run.

        Raises:
            ConfigError: there is none, or it is for the other of DDP and FSDP2.
        """
        if not self.sharded and sharded.knows(name):
            raise ConfigError(f"method {name!r} trains under FSDP2: give --sharded, too")
        if self.sharded and not sharded.knows(name) and methods.knows(name):
            raise ConfigError(
                f"method {name!r} averages DDP's gradients: leave --sharded out, or use "
                + ", ".join(sharded.KNOWN)
            )
        return sharded.parse(name) if self.sharded else methods.parse(name)

    def groups(self) -> list[tuple[int, tuple[str, ...]]]:
        """What trains together: (seed, methods), in order."""
        alone = [m for m in self.methods if not self.interleaved or self.method(m).watches]
        together = tuple(m for m in self.methods if m not in alone)
        parts = [together, *((m,) for m in alone)]
        return [(seed, part) for seed in self.seeds for part in parts if part]

    def keys(self) -> dict[str, Any]:
        """What all rows of the run have."""
        schedule = Schedule.parse(self.net)
        keys = {
            "task": self.task,
            "task_options": dict(self.task_options),
            "net": schedule.name,
            "ranks": self.nodes,
            "composed": False,
        }
        if schedule.changes:
            keys["schedule"] = schedule.spelled()
        if self.sharded:
            keys |= {"sharded": True, "policy": sharded.POLICY, "accumulate": self.accumulate}
        return keys


def plan(
    net: str | None = None,
    nodes: int | None = None,
    methods: tuple[str, ...] | None = None,
    steps: int | None = None,
    quick: bool = False,
    task: str = "gpt",
    task_options: Mapping[str, Any] | None = None,
    announce: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    target: float | None = None,
    nets: tuple[str, ...] = (),
    **given: Any,
) -> TrainConfig:
    """The configuration for these arguments; None selects the default.

    Args:
        quick: end within 45 seconds on two idle cores, unless `net` is slower than the default: a
            small model, two nodes, three methods.
        announce: is told that the default network is `none` where the lab does not work.
        given: further fields of `TrainConfig`.

    Raises:
        ConfigError: a name is unknown or a number is out of range.
    """
    if nodes is not None and nodes > links.MAX_NODES:
        raise ConfigError(f"--nodes {nodes}: the lab has {links.MAX_NODES} at most")
    if nodes == 1:
        raise ConfigError("--nodes 1: one node sends nothing; use 2 nodes or more")
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps {steps}: train 1 step or more")
    if target is not None and not target > 0:
        raise ConfigError(f"--target {target:g}: a validation loss is above 0")
    if nets and net is not None:
        raise ConfigError(
            f"--net {net}: --compose trains on none and times on --nets; leave it out"
        )
    if nets:
        net = "none"
    elif net is not None:
        net = str(Schedule.parse(net))  # what a file says, not where it is
    else:
        net = _default_net(quick, announce)
    fields: dict[str, Any] = {
        "task": task,
        "net": net,
        "target": target,
        "interleaved": not nets,
        **given,
    }
    fields["nets"] = tuple(str(Schedule.parse(one)) for one in nets)
    if given.get("sharded"):
        fields["methods"] = sharded.COMPARED
    if quick:
        fields |= {"nodes": 2, "steps": 30, "ideal_steps": 4, "timed_steps": 8}
        fields["methods"] = sharded.COMPARED_QUICKLY if given.get("sharded") else COMPARED
        fields["task_options"] = _QUICK_OPTIONS.get(task, {})
        if steps is None and not nets:
            fields["budget_seconds"] = 15.0  # so that it ends in time on a slow machine, too
    chosen = {"nodes": nodes, "methods": methods or None, "steps": steps}
    fields |= {name: value for name, value in chosen.items() if value is not None}
    fields["task_options"] = {**fields.get("task_options", {}), **(task_options or {})}
    config = TrainConfig(**fields)
    config.check()
    return config


_QUICK_OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "width": 128, "heads": 4, "validation_sequences": 64},
    "gpt-32k": {"layers": 2, "width": 128, "heads": 4, "sequences": 1, "vocabulary": 2048},
    "image": {"network": "cnn", "channels": 8, "hidden": 128, "test_images": 500},
    "image-resnet50": {"channels": 8, "images": 8, "test_images": 500},
}


def _default_net(quick: bool, announce: Callable[[str], None]) -> str:
    reason = lab.available()
    if reason is None:
        return "100mbit,1ms" if quick else TrainConfig.net
    announce(f"no emulated network, so --net none (loopback): {reason}")
    return "none"
