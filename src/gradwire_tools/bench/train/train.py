"""`gradwire bench train`: time to accuracy of every method on one task and one network.

The measure is the time in which a method reaches the validation loss of the uncompressed baseline
(Beyond Throughput, 2.2), since bytes and throughput do not measure learning. The baseline for time
is 16 bit, not 32. Every row names its method:

- a row per evaluation (`row: evaluation`): the metric and the loss after given steps and seconds;
- a row per method at the end (`row: summary`): time to target, step time, and the ideal step time,
  which is the time of a step without communication, measured in the same run.

`run` yields rows as they come. docs/reference/benchmarks.md lists every key.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError
from gradwire_tools import lab
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.sharded import sharded_methods
from gradwire_tools.bench.train.train_compose import composed_rows
from gradwire_tools.bench.train.train_config import TrainConfig
from gradwire_tools.bench.train.train_rows import Advance, train_rows
from gradwire_tools.bench.train.train_state import lease, prepare, remove
from gradwire_tools.lab import links

__all__ = ["COMPARED", "TrainConfig", "plan", "run"]

COMPARED = ("torch-fp32", "torch-fp16-hook", "gradwire-qsgd4")  # of short runs

Row = dict[str, Any]


def plan(
    task: str = "gpt",
    net: str | None = None,
    nodes: int | None = None,
    methods: tuple[str, ...] | None = None,
    steps: int | None = None,
    quick: bool = False,
    task_options: dict[str, Any] | None = None,
    announce: Callable[[str], None] | None = None,
    target: float | None = None,
    nets: tuple[str, ...] = (),
    sharded: bool = False,
    **given: Any,
) -> TrainConfig:
    """The configuration for these arguments; None selects the default.

    Args:
        quick: end within 45 seconds on two idle cores, unless `net` is slower than the default: a
            small model, two nodes, three methods.
        announce: is told that the default network is `none` where the lab does not work (by default
            to standard error).
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
        net = str(lab.Schedule.parse(net))  # what a file says, not where it is
    else:
        net = _default_net(quick, announce or _to_stderr)
    compared = sharded_methods.COMPARED if sharded else TrainConfig.methods
    if quick:
        compared = sharded_methods.COMPARED_QUICKLY if sharded else COMPARED
    config = TrainConfig(
        task=task,
        task_options={**(_QUICK_OPTIONS.get(task, {}) if quick else {}), **(task_options or {})},
        nodes=nodes if nodes is not None else (2 if quick else 4),
        net=net,
        methods=methods or compared,
        steps=steps if steps is not None else (30 if quick else 200),
        target=target,
        # On a slow machine this reduces `steps`, so that a quick run ends in time.
        budget_seconds=15.0 if quick and steps is None and not nets else None,
        ideal_steps=4 if quick else 6,
        interleaved=not nets,
        nets=tuple(str(lab.Schedule.parse(one)) for one in nets),
        timed_steps=8 if quick else TrainConfig.timed_steps,
        sharded=sharded,
        **given,
    )
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


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


@stamped
def run(
    config: TrainConfig,
    progress: Advance | None = None,
    announce: Callable[[str], None] = _to_stderr,
    state: Path | None = None,
    resume: bool = False,
) -> Iterator[Row]:
    """Train, and yield rows as they come; closing the iterator ends all processes.

    Args:
        progress: called a few times per second while a method trains.
        announce: called with lines for people: what is emulated, what was substituted.
        state: folder in which the run keeps what it needs to continue after it is killed; it is
            removed at the end.
        resume: continue the run in `state`, if there is one; its rows come again, from the first.

    Raises:
        ConfigError: the configuration cannot run, or not on this machine; or `resume`, and the run
            in `state` has another configuration, or is damaged; or `state` is something else.
        WorkerError: a rank failed or timed out.
    """
    announce(config.check().describe())
    rows = composed_rows if config.nets else train_rows
    if state is None:
        yield from rows(config, progress, announce)
        return
    with lease(state):
        told = dataclasses.asdict(config)
        if prepare(state, told, resume):
            announce(f"Continuing the run in {state}, from where it last saved")
        elif resume:
            announce(f"There is no run to continue in {state}: it starts from the beginning")
        yield from rows(dataclasses.replace(config, state=str(state / "train")), progress, announce)
        remove(state)
