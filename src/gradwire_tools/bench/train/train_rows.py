"""One run of `bench train`: starts the workers, and turns their events into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradwire_tools import lab
from gradwire_tools.bench import workers
from gradwire_tools.bench.rows import row_kind
from gradwire_tools.bench.sharded.sharded_methods import POLICY
from gradwire_tools.bench.tasks import Task
from gradwire_tools.bench.train import train_state
from gradwire_tools.bench.train.train_config import TrainConfig
from gradwire_tools.bench.train.train_summary import Summary

_TRAIN = "task:text net:text method:text ranks:positive"
_TRAIN_MORE = (
    "parameters:count? metric_name:text? link_bytes:amount? peak_extra_bytes:amount? "
    "rolling_loss:number? rolling_metric:number? timing_only:flag composed:flag "
    "task_options:options sharded:flag policy:text accumulate:positive "
    "weights_wire_bytes:amount? gradients_wire_bytes:amount?"
)
KINDS = (
    row_kind(
        "bench train",
        "",
        f"{_TRAIN} seed:integer step:count seconds:amount loss:number? wire_bytes:amount?",
        f"{_TRAIN_MORE} metric:number?",
        row="evaluation",
    ),
    row_kind(
        "bench train",
        "",
        f"{_TRAIN} steps:count final_loss:number? target:number? time_to_target:amount? "
        "step_seconds:amount? ideal_step_seconds:amount? wire_bytes:amount?",
        f"{_TRAIN_MORE} seeds:integers? target_from:text? time_to_target_by_seed:times? "
        "final_metric:number? final_loss_by_seed:numbers? seconds:amount? "
        "step_seconds_quartiles:spread? step_seconds_mean:amount? timed_steps:amount? "
        "timed_bytes:amount? "
        "kernel_seconds:amount? "
        "exposed_seconds:amount? mean_ratio:amount? plan_changes:amount? "
        "utility:amount? evaluation_gap_seconds:amount? "
        "steps_by_seed:integers? wire_bytes_per_step:amount? link_bytes_per_step:amount? "
        "utility_against:text? final_metric_by_seed:numbers? "
        "final_metric_difference_by_seed:numbers?",
        row="summary",
    ),
    row_kind(
        "bench train",
        "",
        "task:text net:text method:text ranks:positive steps:count composed_seconds:amount? "
        "whole_seconds:amount? error:number?",
        "parameters:count? task_options:options composed_time_to_target:amount? "
        "whole_time_to_target:amount? composed_final_loss:number? whole_final_loss:number?",
        row="validation",
    ),
    row_kind(
        "decisions",
        "",
        f"{_TRAIN} seed:integer step:count line:text",
        f"{_TRAIN_MORE} tried:tried",
        row="decision",
    ),
)


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
