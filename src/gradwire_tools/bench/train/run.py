"""`gradwire bench train`: time to accuracy of every method on one task and one network.

The measure is the time in which a method reaches the validation loss of the uncompressed baseline
(Beyond Throughput, 2.2), since bytes and throughput do not measure learning. The baseline for time
is 16 bit, not 32. Every row names its method:

- a row per evaluation (`row: evaluation`): the metric and the loss after given steps and seconds;
- a row per method at the end (`row: summary`), over all its seeds: time to target, step time, and
  the ideal step time, which is the time of a step without communication, measured in the same run.

docs/laboratory/benchmarks.md lists every key.

With `nets` (`--compose`), what a method learns does not depend on the network; only the time of a
step does. So

1. each method trains with each seed on `net` (none), one after the other;
2. on each of `nets`, and in each phase of one that changes, all methods, interleaved, train for
   `timed_steps` steps: their times, and the bytes that they send in them, both without the first
   `skip_steps`, or, of replicas that meet, the first meeting. Those that did not always send the
   same in 1 (a warm-up of density, a policy's plans) are timed once more, from where the first
   seed's run in 1 has ended;
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

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from gradwire.errors import GradwireError
from gradwire_tools.bench import workers
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import Row
from gradwire_tools.bench.train import state, worker
from gradwire_tools.bench.train.config import TrainConfig
from gradwire_tools.bench.train.rows import alike, bytes_per_step, evaluations_of, summaries, varies
from gradwire_tools.lab import Schedule

Announce = Callable[[str], None]

# Is told the progress of one method: an event `step` (`worker`) with `phase`, what it trains for:
# "training", "timing NET" or "whole run NET".
Advance = Callable[[Row], None]

StepTime = Callable[[float], float]  # seconds of a step on one network, by the bytes that it sends
# Summary rows of a method's timed steps: at the start of a run, and of some at its end.
Timed = list[Row]

_COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class Paused(GradwireError):
    """The run is saved, and ends before its end."""


@stamped
def run(
    config: TrainConfig,
    progress: Advance | None,
    announce: Announce,
    folder: Path | None = None,
    resume: bool = False,
) -> Iterator[Row]:
    """Train, and yield rows as they come; closing the iterator ends all processes.

    Composed rows come at the end, those of validation last.

    Args:
        progress: called a few times per second while a method trains.
        announce: called with lines for people: what is emulated, what was substituted.
        folder: in which the run keeps what it needs to continue after it is killed; it is removed
            at the end.
        resume: continue the run in `folder`, if there is one; its rows come again, from the first.

    Raises:
        ConfigError: the configuration cannot run, or not on this machine; or `resume`, and the run
            in `folder` has another configuration, or is damaged; or `folder` is something else.
        WorkerError: a rank failed or timed out.
        Paused: `pause_seconds` have passed.
    """
    announce(config.check().describe())
    train = _composed if config.nets else trained
    if folder is None:
        yield from train(config, progress, announce)
        return
    with state.lease(folder):
        if state.prepare(folder, dataclasses.asdict(replace(config, pause_seconds=None)), resume):
            announce(f"Continuing the run in {folder}, from where it last saved")
        elif resume:
            announce(f"There is no run to continue in {folder}: it starts from the beginning")
        saving = dataclasses.replace(config, state=str(folder / "train"))
        yield from train(saving, progress, announce)
        state.remove(folder)


def trained(
    config: TrainConfig, progress: Advance | None, announce: Announce, phase: str = "training"
) -> Iterator[Row]:
    """The rows of one training on one network, as they come, those of a run that is continued
    first; then a summary per method."""
    evaluations, ends = [], []
    for event in _events(config, announce):
        match event["event"]:
            case "length":
                announce(event["text"])
            case "step" if progress is not None:
                progress({"phase": phase, **event})
            case "paused":
                raise Paused(f"{event['text']}; the same command with --resume goes on")
            case "finished":
                ends.append(event)
            case "row":
                evaluations.append(event["row"])
                yield event["row"]
    yield from summaries(config, [r for r in evaluations if r["row"] == "evaluation"], ends)


def _events(config: TrainConfig, announce: Announce) -> Iterator[Row]:
    """What the ranks report, after what they had when the run was saved."""
    saved = None if config.state is None else state.load(Path(config.state), 0, look=True)
    if saved is not None:
        yield from saved["events"]
    if saved is None or not saved["ended"]:
        where = config.nodes, Schedule.parse(config.net), config.timeout_seconds, announce
        job = partial(worker.train, config)
        how: dict[str, Any] = {"collective_timeout": _COLLECTIVE_TIMEOUT}
        yield from workers.events(job, *where, config.per_node, **how)


def _composed(config: TrainConfig, progress: Advance | None, announce: Announce) -> Iterator[Row]:
    """The rows of every network, composed; then those of validation."""
    alone = replace(config, nets=(), validate=False)

    def train(phase: str, state: str, **fields: Any) -> list[Row]:
        """The rows of one training, which keeps its state beside that of the others."""
        one = replace(alone, state=_beside(config, state), **fields)
        return list(trained(one, progress, announce, phase))

    def time(net: str, varied: tuple[str, ...], ends: str) -> dict[str, Timed]:
        """The timed steps on a network, by method: all methods in turns, with one seed."""
        how: dict[str, Any] = {"net": net, "seeds": config.seeds[:1], "interleaved": True}
        how |= dict.fromkeys(("patience", "target", "target_at"))
        found: list[Row] = []
        for cycle, delay in sorted({config.method(m).cycle for m in config.methods}):
            alike = tuple(m for m in config.methods if config.method(m).cycle == (cycle, delay))
            # The first meeting opens connections, as the first steps of others do.
            skip, timed = config.skip_steps, config.timed_steps
            if cycle > 1:
                skip, timed = cycle + delay, 2 * cycle
            steps = skip + timed
            how |= {"methods": alike, "skip_steps": skip, "steps": steps}
            # An evaluation waits for a meeting that is under way, which nothing may end early.
            how |= {"evaluate_every": steps if delay else max(1, steps // 4)}
            of = f"{net}, every {cycle}" + f", {delay} late" * bool(delay) if cycle > 1 else net
            found += train(f"timing {of}", f"timing-{of}", **how)
            late = tuple(m for m in alike if m in varied)
            if late and cycle == 1:
                again = {**how, "methods": late, "starts_from": ends}
                found += train(f"timing {net}, last steps", f"timing-late-{net}", **again)
        ends_of = [row for row in found if row["row"] == "summary"]
        return {m: [row for row in ends_of if row["method"] == m] for m in config.methods}

    with tempfile.TemporaryDirectory() as temporary:
        ends = _beside(config, "ends") or temporary
        scored = train("training", "train", ends_to=ends)
        varied = tuple(m for m in config.methods if varies(scored, m, config.seeds[0]))
        composed: dict[str, list[Row]] = {}
        timed: dict[str, dict[str, Timed]] = {}
        for net in config.nets:
            for one in (str(phase.net) for phase in Schedule.parse(net).phases):
                timed[one] = timed.get(one) or time(one, varied, ends)
            composed[net] = list(_compose(replace(alone, net=net), scored, timed))
            yield from composed[net]
        for net in config.nets if config.validate else ():
            whole = train(f"whole run {net}", f"whole-{net}", net=net, interleaved=True)
            yield from _compared(composed[net], whole)


def _beside(config: TrainConfig, name: str) -> str | None:
    """A state folder beside that of the training."""
    return None if config.state is None else str(Path(config.state).with_name(name))


def _compose(
    config: TrainConfig, scored: list[Row], timed: dict[str, dict[str, Timed]]
) -> Iterator[Row]:
    """The rows of one network: the scores of `scored` at the times of `timed`."""
    schedule = Schedule.parse(config.net)
    keys = config.keys() | {"composed": True}
    evaluations, ends = [], []
    for method in config.methods:
        of = {str(phase.net): timed[str(phase.net)][method] for phase in schedule.phases}
        times = {net: step_time(*rows) for net, rows in of.items()}
        for seed in config.seeds:
            mine = evaluations_of(scored, method, seed)
            seconds = composed_seconds(mine, times, schedule, config.steps)
            for row, after in zip(mine, seconds, strict=True):
                evaluations.append({**row, **keys, "seconds": after})
            ended = of[str(schedule.first)][-1]  # most of a run is like its end
            if schedule.changes:
                mean = seconds[-1] / max(1, mine[-1]["step"])
                ended = {**ended, **dict.fromkeys(_OF_A_NETWORK), "step_seconds_mean": mean}
            ends.append({**ended, "seed": seed})
    yield from evaluations
    yield from summaries(config, evaluations, ends)


_OF_A_NETWORK = ("step_seconds", "step_seconds_quartiles", "exposed_seconds")


def step_time(timed: Row, late: Row | None = None) -> StepTime:
    """What a step takes on one network, by the formula above.

    The bytes of a timed step are those of the steps whose mean time is known, without the first
    ones, which may be dense.

    Args:
        timed, late: the summary rows of the method's timed steps, at the start of a run and, for a
            method that does not always send the same, at its end.
    """
    sent, step = timed["timed_bytes"], timed["step_seconds_mean"]
    per_byte = max(0.0, step - timed["ideal_step_seconds"]) / sent if sent else 0.0
    if late is not None and not alike(sent, late["timed_bytes"]):
        per_byte = (step - late["step_seconds_mean"]) / (sent - late["timed_bytes"])
    return lambda nbytes: step + per_byte * (nbytes - sent)


def composed_seconds(
    evaluations: list[Row], times: Mapping[str, StepTime], schedule: Schedule, steps: int
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
            after += times[str(schedule.at(step, steps, after))](sent)
        seconds.append(after)
    return seconds


def _compared(composed: list[Row], whole: list[Row]) -> Iterator[Row]:
    """A row per method: the composed and the measured time, and the error of the former."""
    mine = [row for row in composed if row["row"] == "summary"]
    measured = [row for row in whole if row["row"] == "summary"]
    told = ("task", "task_options", "net", "ranks", "parameters", "method")
    for ours, theirs in zip(mine, measured, strict=True):
        error = ours["seconds"] / theirs["seconds"] - 1 if theirs["seconds"] else None
        yield {
            "row": "validation",
            **{key: ours[key] for key in told},
            "steps": theirs["steps"],
            "composed_seconds": ours["seconds"],
            "whole_seconds": theirs["seconds"],
            "error": error,
            "composed_time_to_target": ours["time_to_target"],
            "whole_time_to_target": theirs["time_to_target"],
            "composed_final_loss": ours["final_loss"],
            "whole_final_loss": theirs["final_loss"],
        }
