"""The configuration of a run of `bench train`: a frozen record, passed to the workers as JSON; all
its checks; and `plan`, which makes one from a command line."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradwire.errors import ConfigError, use_one_of
from gradwire_tools import lab
from gradwire_tools.bench import tasks
from gradwire_tools.bench.train import methods, sharded
from gradwire_tools.bench.train.methods import Method
from gradwire_tools.bench.train.sharded import ShardedMethod
from gradwire_tools.lab import Schedule, links

COMPARED = ("torch-fp32", "torch-fp16-hook", "qsgd:bits=4")  # of short runs
DEVICES = ("cpu", "cuda")
TOLERANCE = 0.01  # relative, on the baseline's last loss


@dataclass(frozen=True)
class TrainConfig:
    """A run: one task, one network, several methods, with the same seeds and batches."""

    task: str = "gpt"  # a name of `tasks.REGISTRY`
    task_options: Mapping[str, Any] = field(default_factory=dict)  # its fields
    nodes: int = 4  # emulated machines
    # Ranks on each; if several, with `sharded`: they shard the model, which machines replicate.
    per_node: int = 1
    net: str = "1gbit,1ms"  # "RATE,LATENCY" for the lab, or "none" for loopback
    methods: tuple[str, ...] = tuple(methods.NAMED)  # names that `method` takes
    seeds: tuple[int, ...] = (0,)  # of initialisation and batches; each method runs with each
    steps: int = 200  # of training per method and seed; with a budget, at most
    evaluate_every: int = 10  # steps; step 0 and the last step are evaluated, too
    skip_steps: int = 3  # first ones that `step_seconds` excludes (connections, allocations)
    ideal_steps: int = 6  # without communication at the end, which give `ideal_step_seconds`
    # If set, the number of steps is fixed after the first evaluation, so that training and
    # evaluation end within this time.
    budget_seconds: float | None = None
    target: float | None = None  # validation loss; None: the baseline's last, and `TOLERANCE`
    target_at: float | None = None  # if set, the target is the baseline's at this share of its run
    # If set, a method's run ends once its rolling loss has not improved for so many evaluations.
    patience: int | None = None
    rolling: int = 5  # evaluations in a rolling average
    # Whether methods take turns; otherwise one trains after the other. A method that watches the
    # network always trains alone.
    interleaved: bool = True
    # If not empty, compose (`run`): train once, on `net`, and time steps on each of these networks.
    nets: tuple[str, ...] = ()
    timed_steps: int = 24  # per method and network
    validate: bool = False  # with `nets`, also train as a whole on each, and compare
    sharded: bool = False  # train under FSDP2, not DDP
    accumulate: int = 1  # with `sharded`, micro-batches per step
    # On "cuda" ranks share this machine's GPUs, over gloo: rows have losses and bytes, not times.
    device: str = "cpu"
    # Folder for the last states of the first seed's runs, those of methods that did not always send
    # the same; and such a folder, whose states are the first ones of this run.
    ends_to: str | None = None
    starts_from: str | None = None
    state: str | None = None  # folder from which a killed run continues; None saves nothing
    save_seconds: float = 60.0  # between two saved states, at least
    # If set, the ranks save at the first evaluation after this time, and the run ends (`Paused`).
    pause_seconds: float | None = None
    timeout_seconds: float = 7 * 24 * 3600.0  # for the whole run

    def check(self) -> tasks.Task:
        """Check all fields, before anything is launched; returns the task.

        Raises:
            ConfigError: a field is invalid; the message has its name, its value and valid values.
        """
        task = tasks.get(self.task, **self.task_options)
        found = [self.method(name) for name in self.methods]
        for fault in itertools.chain(self._faults(task, found), self._faults_of_target()):
            raise ConfigError(fault)
        for method in found:
            method.check(self.ranks, tasks.shapes(task))
        return task

    def _faults(self, task: tasks.Task, found: Sequence[Method | ShardedMethod]) -> Iterator[str]:
        if not self.methods:
            yield f"no methods given; known: {', '.join(methods.NAMED)}"
        if not self.seeds:
            yield "no seeds given"
        nets = [str(Schedule.parse(net)) for net in self.nets]
        for name, values in (("methods", self.methods), ("seeds", self.seeds), ("nets", nets)):
            twice = [str(value) for value, count in Counter(values).items() if count > 1]
            if twice:
                yield f"{name} contain duplicates: {', '.join(twice)}"
        least = {"nodes": 1, "per_node": 1, "steps": 0, "evaluate_every": 1, "patience": 1}
        least["accumulate"] = 1
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                yield f"{name} is {value}, must be at least {bound}"
        if self.per_node > 1 and not self.sharded:
            yield f"per_node is {self.per_node}: ranks that share a machine need --sharded"
        if self.nodes > links.MAX_NODES:
            yield f"--nodes {self.nodes}: the lab has {links.MAX_NODES} at most"
        if min(self.seeds) < 0:
            yield f"seed {min(self.seeds)}: seeds are 0 or more"
        if max(self.seeds) >= 2**63:
            yield f"seed {max(self.seeds)}: seeds are below 2^63"
        if self.nets and Schedule.parse(self.net).changes:
            yield f"net is {self.net}: composed runs train on one network; leave the schedule out"
        for method in found:
            if self.nets and method.watches:
                yield (
                    f"method {method.name!r} learns what the network lets it: train it as a whole, "
                    "with --net and without --compose"
                )
        if self.validate and not self.nets:
            yield "validate compares composed with whole runs: give nets to compose"
        if self.device not in DEVICES:
            yield f"unknown device {self.device!r}: {use_one_of(self.device, DEVICES)}"
        elif self.device == "cuda" and self.nets:
            yield "device 'cuda': ranks share it, so no step can be timed: leave --compose out"
        elif self.device == "cuda" and not torch.cuda.is_available():
            yield "device 'cuda': torch finds no GPU on this machine"
        if self.accumulate > 1 and not self.sharded:
            yield f"accumulate is {self.accumulate}: micro-batches need --sharded"
        if self.sharded and getattr(task, "channels_last", False):
            yield "channels_last=true: FSDP2 shards contiguous parameters: leave it out"
        if self.budget_seconds is not None and self.evaluate_every > task.warmup:
            yield (
                f"with a budget, evaluate_every ({self.evaluate_every}) must not exceed the "
                f"task's warm-up ({task.warmup}), in which the number of steps is fixed"
            )

    def _faults_of_target(self) -> Iterator[str]:
        share, every = self.target_at, self.evaluate_every
        if self.target is not None and not self.target > 0:
            yield f"--target {self.target:g}: a validation loss is above 0"
        if share is None:
            return
        if not 0 < share <= 1:
            yield f"target_at is {share:g}: give a share, above 0 and up to 1"
        if self.target is not None:
            yield "target and target_at exclude each other: give one"
        steps = self.steps  # the fewest that a run may have
        if self.budget_seconds is not None:
            steps = min(steps, 2 * every)
        if self.patience is not None:
            steps = min(steps, self.patience * every)
        first = min(every, self.steps)  # step with a loss of training
        if share * steps < first:
            yield (
                f"target_at is {share:g}: with {steps} steps and an evaluation every {every}, the "
                "target would be the loss before training; give "
                f"{math.ceil(1e4 * first / steps) / 1e4:g} or more"
            )

    def method(self, name: str) -> Method | ShardedMethod:
        """The method that a name stands for in this run.

        Raises:
            ConfigError: there is none, or it is for the other of DDP and FSDP2.
        """
        of_ddp = [one for one in methods.OF_DDP if f":{one}=" in name]
        if self.sharded and of_ddp:
            raise ConfigError(
                f"method {name!r}: {of_ddp[0]} is for DDP: FSDP2 sends group by group, and gathers "
                "the next layer's weights while this one computes: leave it out"
            )
        if not self.sharded and sharded.knows(name):
            raise ConfigError(f"method {name!r} trains under FSDP2: give --sharded, too")
        if self.sharded and not sharded.knows(name) and methods.knows(name):
            raise ConfigError(
                f"method {name!r} averages DDP's gradients: leave --sharded out, or use "
                + ", ".join(sharded.KNOWN)
            )
        if not self.sharded:
            return methods.parse(name)
        return replace(sharded.parse(name), shards=self.per_node if self.per_node > 1 else None)

    @property
    def ranks(self) -> int:
        """On all nodes together."""
        return self.nodes * self.per_node

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
            "ranks": self.ranks,
            "composed": False,
        }
        if schedule.changes:
            keys["schedule"] = schedule.spelled()
        if self.sharded:
            keys |= {"sharded": True, "policy": sharded.POLICY, "accumulate": self.accumulate}
        if self.device != "cpu":
            keys["device"] = self.device
        if self.per_node > 1:
            keys |= {"replicas": self.nodes, "per_node": self.per_node}
        return keys


def plan(
    net: str | None = None,
    quick: bool = False,
    task: str = "gpt",
    task_options: Mapping[str, Any] | None = None,
    announce: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    nets: tuple[str, ...] = (),
    **given: Any,
) -> TrainConfig:
    """The configuration for the arguments of a command; None selects the default.

    Args:
        quick: end within 45 seconds on two idle cores, unless `net` is slower than the default: a
            small model, two nodes, three methods.
        announce: is told that the default network is `none` where the lab does not work.
        given: further fields of `TrainConfig`.

    Raises:
        ConfigError: a name is unknown or a number is out of range.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("nodes", 2) < 2:
        raise ConfigError(f"--nodes {given['nodes']}: one node sends nothing; use 2 nodes or more")
    if given.get("steps", 1) < 1:
        raise ConfigError(f"--steps {given['steps']}: train 1 step or more")
    if nets and net is not None:
        raise ConfigError(
            f"--net {net}: --compose trains on none and times on --nets; leave it out"
        )
    if net is not None:
        net = str(Schedule.parse(net))  # what a file says, not where it is
    elif not nets:
        reason = lab.available()
        net = "100mbit,1ms" if quick else TrainConfig.net
        if reason is not None:
            net = "none"
            announce(f"no emulated network, so --net none (loopback): {reason}")
    fields: dict[str, Any] = {
        "task": task,
        "net": net or "none",
        "nets": tuple(str(Schedule.parse(one)) for one in nets),
        "interleaved": not nets,
    }
    options = dict(task_options or {})
    if given.get("sharded"):
        fields["methods"] = sharded.COMPARED_QUICKLY if quick else sharded.COMPARED
    elif quick:
        fields["methods"] = COMPARED
    if quick:
        fields |= {"nodes": 2, "steps": 30, "ideal_steps": 4, "timed_steps": 8}
        options = _QUICK_OPTIONS.get(task, {}) | options
        if "steps" not in given and not nets:
            fields["budget_seconds"] = 15.0  # so that it ends in time on a slow machine, too
    config = TrainConfig(**{**fields, "task_options": options, **given})
    config.check()
    return config


_QUICK_OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "width": 128, "heads": 4, "validation_sequences": 64},
    "gpt-32k": {"layers": 2, "width": 128, "heads": 4, "sequences": 1, "vocabulary": 2048},
    "gpt-124m": {"layers": 2, "width": 128, "heads": 4, "sequences": 1, "vocabulary": 2048},
    "image": {"network": "cnn", "channels": 8, "hidden": 128, "test_images": 500},
    "image-resnet50": {"channels": 8, "images": 8, "test_images": 500},
}
