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

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gradwire import lab
from gradwire.bench import workers
from gradwire.bench.provenance import stamped
from gradwire.bench.train_config import TrainConfig
from gradwire.bench.train_summary import Summary
from gradwire.errors import ConfigError
from gradwire.lab import links

__all__ = ["COMPARED", "WORKER", "Progress", "TrainConfig", "plan", "run"]

WORKER = "gradwire.bench.train_worker"

COMPARED = ("torch-fp32", "torch-fp16-hook", "gradwire-qsgd4")  # of short runs

Row = dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """The progress of one method.

    Attributes:
        seconds: its training time so far.
        loss: rank 0's training loss of the last step; None if it was not finite.
    """

    method: str
    seed: int
    step: int
    steps: int
    seconds: float
    loss: float | None


def plan(
    task: str = "gpt",
    net: str | None = None,
    nodes: int | None = None,
    methods: tuple[str, ...] | None = None,
    seeds: tuple[int, ...] = (0,),
    steps: int | None = None,
    target: float | None = None,
    quick: bool = False,
    task_options: dict[str, Any] | None = None,
    announce: Callable[[str], None] | None = None,
) -> TrainConfig:
    """The configuration for these arguments; None selects the default.

    `quick` ends within 45 seconds on two idle cores, unless `net` is slower than the default: a
    small model, two nodes, three methods. The
    default network is `none` where the lab does not work; `announce` reports that (by default to
    standard error).

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
    config = TrainConfig(
        task=task,
        task_options={**(_QUICK_OPTIONS.get(task, {}) if quick else {}), **(task_options or {})},
        nodes=nodes if nodes is not None else (2 if quick else 4),
        net=net if net is not None else _default_net(quick, announce or _to_stderr),
        methods=methods or (COMPARED if quick else TrainConfig.methods),
        seeds=seeds,
        steps=steps if steps is not None else (30 if quick else 200),
        evaluate_every=10,
        target=target,
        # On a slow machine this reduces `steps`, so that a quick run ends in time.
        budget_seconds=15.0 if quick and steps is None else None,
        ideal_steps=4 if quick else 6,
    )
    config.check()
    return config


_QUICK_OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "width": 128, "heads": 4, "validation_sequences": 64},
    "image": {"channels": 8, "hidden": 128, "test_images": 500},
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
    progress: Callable[[Progress], None] | None = None,
    announce: Callable[[str], None] = _to_stderr,
) -> Iterator[Row]:
    """Train, and yield rows as they come; closing the iterator ends all processes.

    Args:
        progress: called a few times per second while a method trains.
        announce: called with lines for people: what is emulated, what was substituted.

    Raises:
        ConfigError: the configuration cannot run, or not on this machine.
        WorkerError: a rank failed or timed out.
    """
    task = config.check()
    net = lab.Network.parse(config.net)
    announce(task.describe())
    summary = Summary(config)
    common: Row = {"task": config.task, "net": str(net), "ranks": config.nodes}
    timeout = config.timeout_seconds
    text = config.to_json()
    for event in workers.events(WORKER, text, config.nodes, net, timeout, announce):
        kind = event.pop("event")
        if kind == "setup":
            common["parameters"] = event["parameters"]
        elif kind == "length":
            announce(f"{event['steps']} steps: {event['reason']}")
        elif kind == "step":
            event["loss"] = event.pop("train_loss")
            if progress is not None:
                progress(Progress(**event))
        elif kind == "evaluation":
            summary.evaluations.append(event)
            yield {"row": "evaluation", **common, **event, "metric_name": task.metric}
        elif kind == "finished":
            summary.finished.append(event)
    for row in summary.rows():
        yield {"row": "summary", **common, **row, "metric_name": task.metric}
