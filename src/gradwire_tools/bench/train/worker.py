"""What `bench train` does on every rank. Events of rank 0 (`bench.workers`):

- `row`: an evaluation or a decision, whole, as docs/laboratory/benchmarks.md has it;
- `length`: `text`, once the number of steps is fixed;
- `step`: progress of a method: `method, seed, step, steps, seconds`;
- `paused`: `text`, once `pause_seconds` have passed and everything is saved;
- `finished`: of a method and a seed, what a summary has of its steps.

The methods of a group are interleaved: each trains up to the next evaluation, in an order that
rotates. Their clocks exclude evaluation. A turn ends once its averages are there, also those that
cross_barrier leaves late (`method_run`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire_tools.bench import tasks, workers
from gradwire_tools.bench.interleaved import quartiles
from gradwire_tools.bench.train import state
from gradwire_tools.bench.train.config import TrainConfig
from gradwire_tools.bench.train.method_run import MethodRun
from gradwire_tools.bench.train.rows import varies
from gradwire_tools.lab import Schedule

_STEP_EVENT_SECONDS = 0.25  # at least, between two `step` events


def train(config: TrainConfig, events: workers.Events) -> None:
    """One rank's part of the run, in the default group."""
    with nullcontext() if config.state is None else state.used_by_rank(Path(config.state)):
        Training(config, events).all_groups()


class Training:
    """One rank's part of a run: groups of methods, one group after the other.

    Its position, the state of the group in training and all events but those of steps are saved
    between two turns.
    """

    def __init__(self, config: TrainConfig, events: workers.Events) -> None:
        self.config, self.events = config, events
        self.schedule = Schedule.parse(config.net)
        self.net = self.schedule.first  # as the lab begins
        self.folder = None if config.state is None else Path(config.state)
        self.rank = dist.get_rank()
        if config.device == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        self.task = tasks.get(config.task, **config.task_options)
        self.common: dict[str, Any] = {}  # keys of all rows
        self.groups = config.groups()
        self.position = {"group": 0, "turn": 0}
        self.steps = config.steps
        self.length_fixed = config.budget_seconds is None
        self.kept: list[dict[str, Any]] = []
        self.evaluation_seconds: list[float] = []
        self.told_at = -math.inf
        self.began_at = self.saved_at = time.monotonic()
        self.saving_seconds = 0.0

    def all_groups(self) -> None:
        """Every method with every seed, from where a saved run ended."""
        saved: dict[str, Any] = {}
        if self.folder is not None and (found := state.load(self.folder, self.rank)) is not None:
            self.position, self.steps, saved = found["position"], found["steps"], found["runs"]
            self.kept, self.length_fixed = found["events"], True
        while self.position["group"] < len(self.groups):
            self._one_group(saved)
            saved = {}
            self.position = {"group": self.position["group"] + 1, "turn": 0}
            self._save([])

    def _one_group(self, saved: dict[str, Any]) -> None:
        seed, names = self.groups[self.position["group"]]
        self.follow(0, [])  # some methods measure the network as they start
        dist.barrier()
        methods = [self.config.method(name) for name in names]
        how = self.config.accumulate, self.config.device
        runs = [MethodRun.start(method, self.task, seed, *how) for method in methods]
        start = time.perf_counter()
        numel = sum(p.numel() for p in runs[0].model.parameters())
        self.common = {**self.config.keys(), "parameters": numel}
        if saved:
            assert self.folder is not None
            replicas = state.load(self.folder, 0)
            assert replicas is not None
            for run in runs:
                run.load(saved[run.name], replicas["runs"][run.name])
        else:
            if self.config.starts_from is not None:
                ends = Path(self.config.starts_from)
                for run in runs:
                    files = (state.end_of(ends, run.name, rank) for rank in (self.rank, 0))
                    run.go_on(*(torch.load(file, weights_only=True) for file in files))
            self._evaluate(runs)
        while going := [run for run in runs if not self._ended(run)]:
            first = self.position["turn"] % len(going)
            going = going[first:] + going[:first]
            for run in going:
                self._train(run, min(run.step + self.config.evaluate_every, run.first + self.steps))
            self._evaluate(going)
            if not self.length_fixed:
                self._fix_length(runs, time.perf_counter() - start)
            self.position["turn"] += 1
            self._save(runs)
        self._finish(runs)

    def _ended(self, run: MethodRun) -> bool:
        averages = rolling([loss for loss, _ in run.scores], self.config.rolling)
        patience = self.config.patience
        whole = run.step >= run.first + self.steps
        return whole or (patience is not None and stalled(averages, patience))

    def _train(self, run: MethodRun, until: int) -> None:
        dist.barrier()
        skipped = run.first + self.config.skip_steps
        self._step(run, min(until, skipped), skipped)
        with run.measured():
            self._step(run, until, skipped)

    def _step(self, run: MethodRun, until: int, skipped: int) -> None:
        while run.step < until:
            if self.schedule.at(run.step, self.steps, sum(run.step_seconds)) != self.net:
                run.settle()
            self.follow(run.step, run.step_seconds)
            run.train(1)
            if run.step == until:
                run.settle()
            if run.step == skipped:
                run.counted_from = run.traffic()["wire_bytes"]
            if time.monotonic() - self.told_at >= _STEP_EVENT_SECONDS:
                self.told_at = time.monotonic()
                at = {**_of(run), "steps": self.steps, "seconds": sum(run.step_seconds)}
                self.events.write("step", **at)

    def _evaluate(self, runs: list[MethodRun]) -> None:
        for run in runs:
            start = time.perf_counter()
            score = run.evaluate()
            self.evaluation_seconds.append(time.perf_counter() - start)
            losses, metrics = zip(*run.scores, strict=True)
            self._row(
                "evaluation",
                **_of(run),
                seconds=sum(run.step_seconds),
                metric=self.task.metric_of(score),
                loss=score.mean_loss,
                rolling_loss=rolling(losses, self.config.rolling)[-1],
                rolling_metric=rolling(metrics, self.config.rolling)[-1],
                link_bytes=run.link_bytes,
                **self._net_now(run),
                **run.traffic(),
                metric_name=self.task.metric,
                timing_only=run.method.timing_only,
            )

    def follow(self, step: int, step_seconds: list[float]) -> None:
        """Have the network that holds when so many steps are done.

        Rank 0 has the parent change the lab, while the other ranks wait for rank 0 in their next
        collective. Its clock stands still: no timed step has two networks.
        """
        net = self.schedule.at(step, self.steps, sum(step_seconds))
        if net != self.net:
            self.events.change(str(net))
            self.net = net

    def _net_now(self, run: MethodRun) -> dict[str, str]:
        """What an evaluation tells of a network that changes: that of the steps before it."""
        net = self.schedule.at(max(0, run.step - 1), self.steps, sum(run.step_seconds[:-1]))
        return {"net_now": str(net)} if self.schedule.changes else {}

    def _row(self, row: str, **keys: Any) -> None:
        self._tell("row", row=workers.finite({"row": row, **self.common, **keys}))

    def _tell(self, event: str, **fields: Any) -> None:
        """Append an event that is kept to be saved."""
        self.events.write(event, **fields)
        self.kept.append({"event": event, **workers.finite(fields)})

    def _save(self, runs: list[MethodRun]) -> None:
        """Save, at the end of a group or if it is time; rank 0 decides."""
        if self.folder is None:
            return
        # At most a twentieth of the time goes into saving.
        between = max(self.config.save_seconds, 20 * self.saving_seconds)
        start, until = time.monotonic(), self.config.pause_seconds
        pauses = until is not None and start - self.began_at >= until
        if not _of_rank_0(not runs or pauses or start - self.saved_at >= between):
            return
        own = {
            "position": self.position,
            "steps": self.steps,
            "runs": {run.name: run.state() for run in runs},
            "events": self.kept if self.rank == 0 else [],
            "ended": self.position["group"] == len(self.groups),
        }
        state.save(self.folder, self.rank, own)
        dist.barrier()
        if self.rank == 0:
            state.commit(self.folder)
            if pauses and not own["ended"]:
                self.events.write("paused", text=f"paused after {start - self.began_at:.0f} s")
        self.saved_at = time.monotonic()
        self.saving_seconds = self.saved_at - start

    def _fix_length(self, runs: list[MethodRun], spent: float) -> None:
        """Fix the number of steps that fit into the budget, from the times of the first turn."""
        assert self.config.budget_seconds is not None
        budget = self.config.budget_seconds / len(self.config.seeds)
        every = self.config.evaluate_every
        turn = every * sum(statistics.median(run.step_seconds) for run in runs)
        turn += len(runs) * statistics.median(self.evaluation_seconds)
        turn *= len(self.config.methods) / len(runs)  # others train after these
        turns = 1 + max(1, int((budget - spent) / turn))
        self.steps = _of_rank_0(min(self.config.steps, turns * every))
        self.length_fixed = True
        reason = f"{turn:.1f} s for {every} steps of each method, budget {budget:.0f} s"
        self._tell("length", text=f"{self.steps} steps: {reason}")

    def _finish(self, runs: list[MethodRun]) -> None:
        if self.config.ends_to is not None and runs[0].seed == self.config.seeds[0]:
            self._keep_ends(runs, Path(self.config.ends_to))
        ideal: dict[str, list[float]] = {run.name: [] for run in runs}
        for _ in range(self.config.ideal_steps):
            for run in runs:
                dist.barrier()
                ideal[run.name].append(run.ideal_step())
        for run in runs:
            skipped = self.config.skip_steps
            skipped = skipped if len(run.step_seconds) > skipped else 0
            counted = run.step_seconds[skipped:]
            sent = run.traffic()["wire_bytes"] - (run.counted_from if skipped else 0)
            self._tell(
                "finished",
                method=run.name,
                seed=run.seed,
                step_seconds=statistics.median(counted) if counted else None,
                step_seconds_quartiles=quartiles(counted) if counted else None,
                step_seconds_mean=statistics.mean(counted) if counted else None,
                timed_steps=len(counted),
                timed_bytes=sent / len(counted) if counted else None,
                ideal_step_seconds=statistics.median(ideal[run.name][1:]),
                **run.means(),
            )
            for decided in run.decisions():
                self._row("decision", **{**_of(run), **decided})
            run.applied.remove()

    def _keep_ends(self, runs: list[MethodRun], folder: Path) -> None:
        """Save the states of runs that did not always send the same; rank 0 decides."""
        rows = [event["row"] for event in self.kept if event["event"] == "row"]
        folder.mkdir(exist_ok=True)
        for run in runs:
            if _of_rank_0(varies(rows, run.name, run.seed)):
                torch.save(run.state(), state.end_of(folder, run.name, self.rank))


def _of(run: MethodRun) -> dict[str, Any]:
    """Where a run is, as rows and events have it."""
    return {"method": run.name, "seed": run.seed, "step": run.step}


def _of_rank_0(value: int) -> int:
    """On all ranks, what rank 0 has decided."""
    agreed = torch.tensor(value, dtype=torch.int64)
    dist.broadcast(agreed, 0)
    return int(agreed.item())


def rolling(values: Sequence[float], window: int) -> list[float]:
    """At each place, the mean of the last `window` values up to it, fewer at the beginning."""
    return [
        statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)
    ]


def stalled(averages: Sequence[float], patience: int) -> bool:
    """Whether the last `patience` averages are all at or above the least one before them, so that
    a run has stopped improving (UTIL 2.2 and 3). One that is not finite is no improvement."""
    before, last = averages[:-patience], averages[-patience:]
    if not before:
        return False
    least = min((a for a in before if math.isfinite(a)), default=math.inf)
    return not any(a < least for a in last)
