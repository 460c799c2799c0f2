"""`bench train --compose`: train once, time the steps on each network, and compose the rows.

What a method learns does not depend on the network; only the time of a step does. So

1. each method trains with each seed on `net` (none), one after the other;
2. on each of `nets` all methods, interleaved, train for `timed_steps` steps: their times, and the
   bytes that they send in them;
3. the rows of a network have the scores of 1 and, at an evaluation after n more steps,

       seconds = seconds before + n (c + (t - c) b / s)

   where t is the mean timed step, c the step without communication, s the bytes of a timed step
   and b those of a step in 1 since the evaluation before. For a method that always sends the same,
   b = s and the seconds are n t; the fraction follows methods that send less and less (a warm-up of
   density, dense first steps).

Composed rows have `composed: true`. Their seconds have no start-up: connections, compilation.

`validate` trains on every network as a whole, too, and yields a row per method: `row: validation`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradwire.bench.train_config import TrainConfig
from gradwire.bench.train_rows import (
    Advance,
    Announce,
    common_keys,
    evaluation_row,
    train_rows,
)
from gradwire.bench.train_summary import Summary

Row = dict[str, Any]


def composed_rows(
    config: TrainConfig, progress: Advance | None, announce: Announce
) -> Iterator[Row]:
    """The rows of every network, composed; then those of validation.

    Raises:
        ConfigError: the configuration cannot run, or not on this machine.
        WorkerError: a rank failed or timed out.
    """
    alone = dataclasses.replace(config, nets=(), validate=False)
    trained = list(train_rows(alone, progress, announce))
    composed: dict[str, list[Row]] = {}
    for net in config.nets:
        timed = list(train_rows(_timing(alone, net), progress, announce, f"timing {net}"))
        composed[net] = list(_compose(dataclasses.replace(alone, net=net), trained, timed))
        yield from composed[net]
    for net in config.nets if config.validate else ():
        as_whole = dataclasses.replace(
            alone, net=net, interleaved=True, state=_folder(alone, f"whole-{net}")
        )
        whole = list(train_rows(as_whole, progress, announce, f"whole run {net}"))
        yield from _compared(composed[net], whole)


def _timing(config: TrainConfig, net: str) -> TrainConfig:
    """The run that times steps: all methods in turns, one seed, few steps."""
    steps = config.skip_steps + config.timed_steps
    return dataclasses.replace(
        config,
        net=net,
        seeds=config.seeds[:1],
        steps=steps,
        evaluate_every=max(1, steps // 4),
        interleaved=True,
        patience=None,
        target=None,
        target_at=None,
        state=_folder(config, f"timing-{net}"),
    )


def _folder(config: TrainConfig, name: str) -> str | None:
    """A state folder beside that of the training."""
    return None if config.state is None else str(Path(config.state).with_name(name))


def _compose(config: TrainConfig, trained: list[Row], timed: list[Row]) -> Iterator[Row]:
    """The rows of one network: the scores of `trained` at the times of `timed`."""
    task = config.check()
    summary = Summary(config)
    parameters = trained[0]["parameters"]
    common = common_keys(config) | {"parameters": parameters, "composed": True}
    steps = {row["method"]: row for row in timed if row["row"] == "summary"}
    for method in config.methods:
        for seed in config.seeds:
            mine = [
                row
                for row in trained
                if (row["row"], row["method"], row.get("seed")) == ("evaluation", method, seed)
            ]
            for row, seconds in zip(mine, composed_seconds(mine, steps[method]), strict=True):
                event = {key: row[key] for key in _SCORES} | {"seconds": seconds}
                summary.evaluations.append(event)
                yield evaluation_row(common, event, task)
            summary.finished.append({"seed": seed, **steps[method]})
    for row in summary.rows():
        yield {"row": "summary", **common, **row, "metric_name": task.metric}


_SCORES = (
    *("method", "seed", "step", "metric", "loss", "rolling_metric", "rolling_loss", "wire_bytes"),
    *("link_bytes", "peak_extra_bytes"),
)


def composed_seconds(evaluations: list[Row], timed: Row) -> list[float]:
    """The training time at each evaluation of a run, by the formula above.

    Args:
        evaluations: rows with `step` and `wire_bytes`, from step 0 on.
        timed: the summary row of the method's timed steps.
    """
    step, computing = timed["step_seconds_mean"], timed["ideal_step_seconds"]
    sent = timed["wire_bytes"] / timed["steps"]
    seconds = [0.0]
    for before, now in itertools.pairwise(evaluations):
        steps = now["step"] - before["step"]
        bytes_per_step = (now["wire_bytes"] - before["wire_bytes"]) / steps
        waiting = max(0.0, step - computing)
        share = bytes_per_step / sent if sent else 1.0
        seconds.append(seconds[-1] + steps * (step - waiting + waiting * share))
    return seconds


def _compared(composed: list[Row], whole: list[Row]) -> Iterator[Row]:
    """A row per method: the composed and the measured time, and the error of the former."""
    found = [
        {row["method"]: row for row in rows if row["row"] == "summary"}
        for rows in (composed, whole)
    ]
    for method, mine in found[0].items():
        theirs = found[1][method]
        error = mine["seconds"] / theirs["seconds"] - 1 if theirs["seconds"] else None
        common = {key: mine[key] for key in ("task", "task_options", "net", "ranks", "parameters")}
        yield {
            "row": "validation", **common, "method": method, "steps": theirs["steps"],
            "composed_seconds": mine["seconds"], "whole_seconds": theirs["seconds"],
            "error": error,
            "composed_time_to_target": mine["time_to_target"],
            "whole_time_to_target": theirs["time_to_target"],
            "composed_final_loss": mine["final_loss"], "whole_final_loss": theirs["final_loss"],
        }  # fmt: skip
