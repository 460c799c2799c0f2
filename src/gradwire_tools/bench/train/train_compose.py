"""`bench train --compose`: train once, time the steps on each network, and compose the rows.

What a method learns does not depend on the network; only the time of a step does. So

1. each method trains with each seed on `net` (none), one after the other;
2. on each of `nets`, and in each phase of one that changes, all methods, interleaved, train for
   `timed_steps` steps: their times, and the bytes that they send in them, both without the first
   `skip_steps`. Those that did not always send the same in 1 (a warm-up of density, a policy's
   plans) are timed once more, from where the first seed's run in 1 has ended;
3. the rows of a network have the scores of 1 and, at an evaluation after n more steps,

       seconds = seconds before + n t(b)

   where b are the bytes of a step in 1 since the evaluation before, and t(b) lies on the straight
   line through the timed steps: through their mean bytes and times at the start and at the end.
   Where these send the same, t is the mean timed step if b is what it sends too; otherwise the
   step beyond computing is proportional to b (payloads whose length follows the gradients).

Where a policy decides is in 1, not in 2: what deciding takes is not in these seconds.

On a network that changes, t is that of the network that holds at each step. Composed rows have
`composed: true`. Their seconds have no start-up: connections, compilation.

`validate` trains on every network as a whole, too, and yields a row per method: `row: validation`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire_tools.bench.train.train_config import TrainConfig
from gradwire_tools.bench.train.train_rows import (
    Advance,
    Announce,
    common_keys,
    evaluation_row,
    train_rows,
)
from gradwire_tools.bench.train.train_summary import Summary
from gradwire_tools.lab import Schedule

Row = dict[str, Any]
# Summary rows by method of timed steps on a network: at the start of a run, and at its end.
Timed = tuple[dict[str, Row], dict[str, Row]]


def composed_rows(
    config: TrainConfig, progress: Advance | None, announce: Announce
) -> Iterator[Row]:
    """The rows of every network, composed; then those of validation.

    Raises:
        ConfigError: the configuration cannot run, or not on this machine.
        WorkerError: a rank failed or timed out.
    """
    with contextlib.ExitStack() as stack:
        ends = _folder(config, "ends") or stack.enter_context(tempfile.TemporaryDirectory())
        yield from _composed_rows(config, ends, progress, announce)


def _composed_rows(
    config: TrainConfig, ends: str, progress: Advance | None, announce: Announce
) -> Iterator[Row]:
    alone = dataclasses.replace(config, nets=(), validate=False)
    training = dataclasses.replace(alone, ends_to=ends)
    trained = list(train_rows(training, progress, announce))
    composed: dict[str, list[Row]] = {}
    varied = tuple(method for method in config.methods if varies(_of(trained, method)))
    timed: dict[str, Timed] = {}
    for net in config.nets:
        for phase in Schedule.parse(net).phases:
            one = str(phase.net)
            if one not in timed:
                timed[one] = _timed(alone, one, varied, ends, progress, announce)
        composed[net] = list(_compose(dataclasses.replace(alone, net=net), trained, timed))
        yield from composed[net]
    for net in config.nets if config.validate else ():
        as_whole = dataclasses.replace(
            alone, net=net, interleaved=True, state=_folder(alone, f"whole-{net}")
        )
        whole = list(train_rows(as_whole, progress, announce, f"whole run {net}"))
        yield from _compared(composed[net], whole)


def _timed(
    config: TrainConfig,
    net: str,
    varied: tuple[str, ...],
    ends: str,
    progress: Advance | None,
    announce: Announce,
) -> Timed:
    """The timed steps on a network: of all methods in turns, with one seed."""
    steps = config.skip_steps + config.timed_steps
    timing = dataclasses.replace(
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
    first = _summaries(train_rows(timing, progress, announce, f"timing {net}"))
    if not varied:
        return first, {}
    late = dataclasses.replace(
        timing,
        methods=varied,
        starts_from=ends,
        state=_folder(config, f"timing-late-{net}"),
    )
    return first, _summaries(train_rows(late, progress, announce, f"timing {net}, last steps"))


def _summaries(rows: Iterable[Row]) -> dict[str, Row]:
    """By method."""
    return {row["method"]: row for row in rows if row["row"] == "summary"}


def _folder(config: TrainConfig, name: str) -> str | None:
    """A state folder beside that of the training."""
    return None if config.state is None else str(Path(config.state).with_name(name))


def _compose(config: TrainConfig, trained: list[Row], timed: dict[str, Timed]) -> Iterator[Row]:
    """The rows of one network: the scores of `trained` at the times of `timed`."""
    task = config.check()
    schedule = Schedule.parse(config.net)
    nets = [str(phase.net) for phase in schedule.phases]
    summary = Summary(config)
    common = common_keys(config) | {"parameters": trained[0]["parameters"], "composed": True}
    for method in config.methods:
        of = {net: [by[method] for by in timed[net] if method in by] for net in nets}
        times = {net: StepTimes.of(*rows) for net, rows in of.items()}
        for seed in config.seeds:
            mine = _of(trained, method, seed)
            seconds = composed_seconds(mine, times, schedule, config.steps)
            for row, after in zip(mine, seconds, strict=True):
                event = {key: row[key] for key in _SCORES if key in row} | {"seconds": after}
                summary.evaluations.append(event)
                yield evaluation_row(config, common, event, task)
            ended = of[nets[0]][-1]  # most of a run is like its end
            if schedule.changes:
                mean = seconds[-1] / max(1, mine[-1]["step"])
                ended = {**ended, **dict.fromkeys(_OF_A_NETWORK), "step_seconds_mean": mean}
            summary.finished.append({"seed": seed, **ended})
    for row in summary.rows():
        yield {"row": "summary", **common, **row, "metric_name": task.metric}


_OF_A_NETWORK = ("step_seconds", "step_seconds_quartiles", "exposed_seconds")
_SCORES = (
    *("method", "seed", "step", "metric", "loss", "rolling_metric", "rolling_loss", "wire_bytes"),
    *("link_bytes", "peak_extra_bytes"),
    *("weights_wire_bytes", "gradients_wire_bytes"),  # under FSDP2
)


def _of(rows: list[Row], method: str, seed: int | None = None) -> list[Row]:
    """A method's evaluations with a seed; None: with the first."""
    mine = [row for row in rows if (row["row"], row["method"]) == ("evaluation", method)]
    seed = mine[0]["seed"] if seed is None else seed
    return [row for row in mine if row["seed"] == seed]


def bytes_per_step(evaluations: list[Row]) -> list[float]:
    """What a step sends between each two evaluations, from step 0 on."""
    return [
        (now["wire_bytes"] - before["wire_bytes"]) / (now["step"] - before["step"])
        for before, now in itertools.pairwise(evaluations)
    ]


def varies(evaluations: list[Row]) -> bool:
    """Whether a run did not always send the same."""
    sent = bytes_per_step(evaluations)
    return bool(sent) and not _alike(min(sent), max(sent))


def _alike(one: float, other: float) -> bool:
    """Whether two numbers of bytes are too near to draw a line through their times."""
    return abs(one - other) <= 0.1 * max(one, other)


@dataclass(frozen=True)
class StepTimes:
    """What a step takes on one network, by the bytes that it sends.

    Attributes:
        sent, seconds: bytes and time of a step that was timed.
        per_byte: seconds per byte more.
    """

    sent: float
    seconds: float
    per_byte: float

    @classmethod
    def of(cls, timed: Row, late: Row | None = None) -> StepTimes:
        """By the formula above.

        The bytes of a timed step are those of the steps whose mean time is known, without the first
        ones, which may be dense.

        Args:
            timed, late: the summary rows of the method's timed steps, at the start of a run and,
                for a method that does not always send the same, at its end.
        """
        sent, step = timed["timed_bytes"], timed["step_seconds_mean"]
        per_byte = max(0.0, step - timed["ideal_step_seconds"]) / sent if sent else 0.0
        if late is not None:
            last, its_step = late["timed_bytes"], late["step_seconds_mean"]
            if not _alike(sent, last):
                per_byte = (step - its_step) / (sent - last)
        return cls(sent, step, per_byte)

    def of_bytes(self, sent: float) -> float:
        return self.seconds + self.per_byte * (sent - self.sent)


def composed_seconds(
    evaluations: list[Row], times: Mapping[str, StepTimes], schedule: Schedule, steps: int
) -> list[float]:
    """The training time at each evaluation of a run.

    Args:
        evaluations: rows with `step` and `wire_bytes`, from step 0 on.
        times: by network.
        schedule: of these networks.
        steps: that shares of the run count.
    """
    seconds = [0.0]
    for (before, now), sent in zip(
        itertools.pairwise(evaluations), bytes_per_step(evaluations), strict=True
    ):
        after = seconds[-1]
        for step in range(before["step"], now["step"]):
            after += times[str(schedule.at(step, steps, after))].of_bytes(sent)
        seconds.append(after)
    return seconds


def _compared(composed: list[Row], whole: list[Row]) -> Iterator[Row]:
    """A row per method: the composed and the measured time, and the error of the former."""
    others = _summaries(whole)
    for method, mine in _summaries(composed).items():
        theirs = others[method]
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
