"""One run of `bench train`: starts the workers, and turns their events into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradwire_tools import lab
from gradwire_tools.bench import workers
from gradwire_tools.bench.sharded.sharded_methods import POLICY
from gradwire_tools.bench.tasks import Task
from gradwire_tools.bench.train import train_state
from gradwire_tools.bench.train.train_config import TrainConfig
from gradwire_tools.bench.train.train_summary import Summary

WORKER = "gradwire_tools.bench.train.train_worker"

Row = dict[str, Any]
Announce = Callable[[str], None]


# Is told the progress of one method: an event `step` (`train_worker`) with `phase`, what it trains
# for: "training", "timing NET" or "whole run NET".
Advance = Callable[[Row], None]


def train_rows(
    config: TrainConfig, progress: Advance | None, announce: Announce, phase: str = "training"
) -> Iterator[Row]:
    """Train, and yield rows as they come, those of a run that is continued first.

    Raises:
        ConfigError: the configuration cannot run, or not on this machine.
        WorkerError: a rank failed or timed out.
    """
    task = config.check()
    summary = Summary(config)
    common = common_keys(config)
    for event in _events(config, announce):
        kind = event.pop("event")
        if kind == "setup":
            common["parameters"] = event["parameters"]
        elif kind == "length":
            announce(f"{event['steps']} steps: {event['reason']}")
        elif kind == "step":
            if progress is not None:
                progress({"phase": phase, **event})
        elif kind == "evaluation":
            summary.evaluations.append(event)
            yield evaluation_row(config, common, event, task)
        elif kind == "decision":
            yield {"row": "decision", **common, **event}
        elif kind == "finished":
            summary.finished.append(event)
    for row in summary.rows():
        yield {"row": "summary", **common, **row, "metric_name": task.metric}


def common_keys(config: TrainConfig) -> Row:
    """The keys that all rows of a run share."""
    schedule, sharded = lab.Schedule.parse(config.net), config.sharded
    return {
        "task": config.task,
        "task_options": dict(config.task_options),
        "net": schedule.name,
        "ranks": config.nodes,
        "composed": False,
        **({"schedule": schedule.spelled()} if schedule.changes else {}),
        **({"sharded": True, "policy": POLICY, "accumulate": config.accumulate} if sharded else {}),
    }


def evaluation_row(config: TrainConfig, common: Row, event: Row, task: Task) -> Row:
    """The row of an evaluation."""
    timing_only = config.method(event["method"]).timing_only
    metric = {"metric_name": task.metric, "timing_only": timing_only}
    return {"row": "evaluation", **common, **event, **metric}


def _events(config: TrainConfig, announce: Announce) -> Iterator[Row]:
    """The events of a run; of one that has ended already, those that were saved."""
    if config.state is not None:
        folder = Path(config.state)
        yield from train_state.saved_events(folder)
        found = train_state.latest(folder)
        if found is not None and found["ended"]:
            return
    net = lab.Schedule.parse(config.net)
    yield from workers.events(WORKER, config, config.nodes, net, config.timeout_seconds, announce)
