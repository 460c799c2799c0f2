"""The process that `bench train` starts on every node.

Arguments: the file with the run's `TrainConfig`, and the file to which rank 0 appends events, one
JSON object per line, each with the key `event`:

- `setup`: `parameters`;
- `length`: `steps` and `reason`, once the number of steps is fixed;
- `step`: progress of a method: `method, seed, step, steps, seconds`;
- `evaluation`: `method, seed, step, seconds, metric, loss, rolling_metric, rolling_loss,
  wire_bytes, link_bytes, peak_extra_bytes`, under FSDP2 also `weights_wire_bytes,
  gradients_wire_bytes`, on a network that changes also `net_now`;
- `network`: a change of the network, see `scheduled`;
- `finished`: `method, seed, step_seconds, step_seconds_quartiles, step_seconds_mean, timed_steps,
  timed_bytes, ideal_step_seconds, kernel_seconds, exposed_seconds, mean_ratio, plan_changes,
  peak_extra_bytes`;
- `done`.

The methods of a group are interleaved: each trains up to the next evaluation, in an order that
rotates. Their clocks exclude evaluation.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire_tools.bench import workers
from gradwire_tools.bench.interleaved import quartiles
from gradwire_tools.bench.sharded.sharded_methods import ShardedMethod
from gradwire_tools.bench.sharded.sharded_run import ShardedRun
from gradwire_tools.bench.train.method_run import MethodRun
from gradwire_tools.bench.train.rolling import rolling, stalled
from gradwire_tools.bench.train.scheduled import Follower
from gradwire_tools.bench.train.train_compose import varies
from gradwire_tools.bench.train.train_config import TrainConfig
from gradwire_tools.bench.train.train_state import (
    Turns,
    load_end,
    save_end,
    saved_events,
    used_by_rank,
)
from gradwire_tools.lab import Schedule

_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
_STEP_EVENT_SECONDS = 0.25  # at least, between two `step` events


def main(arguments: list[str]) -> None:
    """Train by the configuration, in the process group that the environment describes."""
    config, events = workers.configured(TrainConfig, arguments)
    dist.init_process_group("gloo", timeout=_COLLECTIVE_TIMEOUT)
    asks = arguments[1] if dist.get_rank() == 0 else None
    network = Follower(Schedule.parse(config.net), events.write, asks)
    if config.state is None:
        Training(config, events, network).all_groups()
    else:
        with used_by_rank(Path(config.state)):
            Training(config, events, network).all_groups()
    dist.barrier()
    dist.destroy_process_group()


class Training:
    """One rank's part of a run: groups of methods, one group after the other.

    Its position, the state of the group in training and all events but those of steps are saved
    between two turns.
    """

    def __init__(self, config: TrainConfig, events: workers.Events, network: Follower) -> None:
        self.config = config
        self.network = network
        self.events = events
        self.told_at = -math.inf
        self.turns: Turns | None = None
        self.kept: list[dict[str, Any]] = []
        if config.state is not None:
            self.turns = Turns(Path(config.state), dist.get_rank())
            self.kept = saved_events(self.turns.folder)
        self.task = config.check()
        self.groups = config.groups()
        self.position = {"group": 0, "turn": 0}
        self.steps = config.steps
        self.length_fixed = config.budget_seconds is None
        self.evaluation_seconds: list[float] = []
        self.saved_at = time.monotonic()
        self.saving_seconds = 0.0

    def all_groups(self) -> None:
        """Every method with every seed, from where a saved run ended."""
        saved = self.turns.load(dist.get_rank()) if self.turns else None
        if saved is not None:
            self.position, self.steps = saved["position"], saved["steps"]
            self.length_fixed = True
        while self.position["group"] < len(self.groups):
            self._one_group(saved["runs"] if saved else {})
            saved = None
            self.position = {"group": self.position["group"] + 1, "turn": 0}
            self._save([])
        self._tell("done")

    def _tell(self, event: str, **fields: Any) -> None:
        """Append an event that is kept to be saved."""
        self.events.write(event, **fields)
        self.kept.append({"event": event, **workers.finite(fields)})

    def _one_group(self, saved: dict[str, Any]) -> None:
        seed, names = self.groups[self.position["group"]]
        self.network.follow(0, self.steps, [])  # some methods measure it as they start
        dist.barrier()
        runs = [self._start(name, seed) for name in names]
        start = time.perf_counter()
        if saved:
            assert self.turns is not None
            replicas = self.turns.load(0)
            assert replicas is not None
            for run in runs:
                run.load(saved[run.name], replicas["runs"][run.name])
        else:
            if not self.position["group"]:
                model = runs[0].model
                self._tell("setup", parameters=sum(p.numel() for p in model.parameters()))
            if self.config.starts_from is not None:
                ends = Path(self.config.starts_from)
                for run in runs:
                    run.go_on(*(load_end(ends, run.name, r) for r in (dist.get_rank(), 0)))
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

    def _start(self, name: str, seed: int) -> MethodRun:
        method = self.config.method(name)
        if isinstance(method, ShardedMethod):
            return ShardedRun.start(method, self.task, seed, self.config.accumulate)
        return MethodRun.start(method, self.task, seed)

    def _ended(self, run: MethodRun) -> bool:
        losses = [loss for loss, _ in run.scores]
        patience = self.config.patience
        if run.step >= run.first + self.steps:
            return True
        return patience is not None and stalled(rolling(losses, self.config.rolling), patience)

    def _train(self, run: MethodRun, until: int) -> None:
        dist.barrier()
        self._step(run, min(until, run.first + self.config.skip_steps))
        with run.measured():
            self._step(run, until)

    def _step(self, run: MethodRun, until: int) -> None:
        while run.step < until:
            self.network.follow(run.step, self.steps, run.step_seconds)
            run.train(1)
            if run.step == run.first + self.config.skip_steps:
                run.counted_from = run.traffic().wire_bytes
            if time.monotonic() - self.told_at >= _STEP_EVENT_SECONDS:
                self.told_at = time.monotonic()
                self.events.write(
                    "step",
                    method=run.name,
                    seed=run.seed,
                    step=run.step,
                    steps=self.steps,
                    seconds=sum(run.step_seconds),
                )

    def _evaluate(self, runs: list[MethodRun]) -> None:
        for run in runs:
            start = time.perf_counter()
            score = run.evaluate()
            self.evaluation_seconds.append(time.perf_counter() - start)
            traffic = run.traffic()
            losses, metrics = zip(*run.scores, strict=True)
            self._tell(
                "evaluation",
                method=run.name,
                seed=run.seed,
                step=run.step,
                seconds=sum(run.step_seconds),
                metric=run.task.metric_of(score),
                loss=score.mean_loss,
                rolling_loss=rolling(losses, self.config.rolling)[-1],
                rolling_metric=rolling(metrics, self.config.rolling)[-1],
                link_bytes=run.link_bytes,
                **self.network.keys(run.step, self.steps, run.step_seconds),
                **traffic.keys(),
            )

    def _save(self, runs: list[MethodRun]) -> None:
        """Save, at the end of a group or if it is time; rank 0 decides."""
        if self.turns is None:
            return
        # At most a twentieth of the time goes into saving.
        pause = max(self.config.save_seconds, 20 * self.saving_seconds)
        due = torch.tensor(not runs or time.monotonic() - self.saved_at >= pause, dtype=torch.int64)
        dist.broadcast(due, 0)
        if not due.item():
            return
        start = time.monotonic()
        state = {"position": self.position, "steps": self.steps}
        state["runs"] = {run.name: run.state() for run in runs}
        self.turns.write(state, self.kept)
        dist.barrier()
        if dist.get_rank() == 0:
            self.turns.commit(self.position["group"] == len(self.groups))
        self.saved_at = time.monotonic()
        self.saving_seconds = self.saved_at - start

    def _fix_length(self, runs: list[MethodRun], spent: float) -> None:
        """Fix the number of steps that fit into the budget, from the times of the first turn.

        Rank 0 decides.
        """
        assert self.config.budget_seconds is not None
        budget = self.config.budget_seconds / len(self.config.seeds)
        every = self.config.evaluate_every
        turn = every * sum(statistics.median(run.step_seconds) for run in runs)
        turn += len(runs) * statistics.median(self.evaluation_seconds)
        turn *= len(self.config.methods) / len(runs)  # others train after these
        turns = 1 + max(1, int((budget - spent) / turn))
        agreed = torch.tensor(min(self.config.steps, turns * every), dtype=torch.int64)
        dist.broadcast(agreed, 0)
        self.steps = int(agreed.item())
        self.length_fixed = True
        reason = f"{turn:.1f} s for {every} steps of each method, budget {budget:.0f} s"
        self._tell("length", steps=self.steps, reason=reason)

    def _keep_ends(self, runs: list[MethodRun], folder: Path) -> None:
        """Save the states of runs that did not always send the same; rank 0 decides."""
        evaluated = [event for event in self.kept if event["event"] == "evaluation"]
        for run in runs:
            mine = [e for e in evaluated if (e["method"], e["seed"]) == (run.name, run.seed)]
            chosen = torch.tensor(varies(mine), dtype=torch.int64)
            dist.broadcast(chosen, 0)
            if chosen.item():
                save_end(folder, run.name, dist.get_rank(), run.state())

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
            sent = run.traffic().wire_bytes - (run.counted_from if skipped else 0)
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
                peak_extra_bytes=run.traffic().peak_extra_bytes,
                **run.means(),
            )
            for decided in run.decisions():
                self._tell("decision", method=run.name, seed=run.seed, **decided)
            run.close()


if __name__ == "__main__":
    main(sys.argv[1:])
