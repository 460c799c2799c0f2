"""The process that `bench train` starts on every node: `python -m gradwire.bench.train_worker`.

Arguments: the file with the run's `TrainConfig`, and the file to which rank 0 appends events, one
JSON object per line, each with the key `event`:

- `setup`: `parameters`;
- `length`: `steps` and `reason`, once the number of steps is fixed;
- `step`: progress of a method: `method, seed, step, steps, seconds, train_loss`;
- `evaluation`: `method, seed, step, seconds, metric, loss, wire_bytes, link_bytes,
  peak_extra_bytes`;
- `finished`: `method, seed, step_seconds, step_seconds_quartiles, ideal_step_seconds,
  peak_extra_bytes`;
- `done`.

Methods are interleaved: each trains up to the next evaluation, in an order that rotates. Their
clocks exclude evaluation.
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.bench import methods
from gradwire.bench.interleaved import quartiles
from gradwire.bench.method_run import MethodRun
from gradwire.bench.tasks import Task
from gradwire.bench.train_config import TrainConfig
from gradwire.bench.workers import Events

_STEP_EVENT_SECONDS = 0.25  # at least, between two `step` events


def main(arguments: list[str]) -> None:
    """Train by the configuration, in the process group that the environment describes."""
    config_file, events_file = arguments
    config = TrainConfig.from_json(Path(config_file).read_text())
    timeout = timedelta(seconds=config.collective_timeout_seconds)
    dist.init_process_group("gloo", timeout=timeout)
    with open(events_file if dist.get_rank() == 0 else "/dev/null", "a") as stream:
        Training(config, StepEvents(stream)).all_seeds()
    dist.barrier()
    dist.destroy_process_group()


class StepEvents(Events):
    """Events, of which those of steps are thinned out."""

    _last_step = 0.0

    def step(self, run: MethodRun, steps: int) -> None:
        """Append a `step` event, unless the last one is very recent."""
        now = time.monotonic()
        if now - self._last_step < _STEP_EVENT_SECONDS:
            return
        self._last_step = now
        self.write(
            "step",
            method=run.name,
            seed=run.seed,
            step=run.step,
            steps=steps,
            seconds=sum(run.step_seconds),
            train_loss=run.last_loss,
        )


class Training:
    """One rank's part of a run."""

    def __init__(self, config: TrainConfig, events: StepEvents) -> None:
        self.config = config
        self.events = events
        self.steps = config.steps
        self.length_fixed = config.budget_seconds is None
        self.evaluation_seconds: list[float] = []

    def all_seeds(self) -> None:
        """Every method with every seed."""
        task = self.config.check()
        for seed in self.config.seeds:
            self._one_seed(task, seed)
        self.events.write("done")

    def _one_seed(self, task: Task, seed: int) -> None:
        runs = [MethodRun.start(methods.parse(name), task, seed) for name in self.config.methods]
        if seed == self.config.seeds[0]:
            model = runs[0].model
            self.events.write("setup", parameters=sum(p.numel() for p in model.parameters()))
        start = time.perf_counter()
        self._evaluate(runs)
        turn = 0
        while runs[0].step < self.steps:
            first = turn % len(runs)
            in_turn = runs[first:] + runs[:first]
            until = min(runs[0].step + self.config.evaluate_every, self.steps)
            for run in in_turn:
                self._train(run, until)
            self._evaluate(in_turn)
            if not self.length_fixed:
                self._fix_length(runs, time.perf_counter() - start)
            turn += 1
        self._finish(runs)

    def _train(self, run: MethodRun, until: int) -> None:
        dist.barrier()
        while run.step < until:
            run.train(1, self.steps)
            self.events.step(run, self.steps)

    def _evaluate(self, runs: list[MethodRun]) -> None:
        for run in runs:
            start = time.perf_counter()
            score = run.evaluate()
            self.evaluation_seconds.append(time.perf_counter() - start)
            traffic = run.traffic()
            self.events.write(
                "evaluation",
                method=run.name,
                seed=run.seed,
                step=run.step,
                seconds=sum(run.step_seconds),
                metric=run.task.metric_of(score),
                loss=score.mean_loss,
                wire_bytes=traffic.wire_bytes,
                link_bytes=run.link_bytes,
                peak_extra_bytes=traffic.peak_extra_bytes,
            )

    def _fix_length(self, runs: list[MethodRun], spent: float) -> None:
        """Fix the number of steps that fit into the budget, from the times of the first turn.

        Rank 0 decides.
        """
        assert self.config.budget_seconds is not None
        budget = self.config.budget_seconds / len(self.config.seeds)
        every = self.config.evaluate_every
        turn = every * sum(statistics.median(run.step_seconds) for run in runs)
        turn += len(runs) * statistics.median(self.evaluation_seconds)
        turns = 1 + max(1, int((budget - spent) / turn))
        agreed = torch.tensor([min(self.config.steps, turns * every)])
        dist.broadcast(agreed, 0)
        self.steps = int(agreed.item())
        self.length_fixed = True
        reason = f"{turn:.1f} s for {every} steps of each method, budget {budget:.0f} s"
        self.events.write("length", steps=self.steps, reason=reason)

    def _finish(self, runs: list[MethodRun]) -> None:
        ideal: dict[str, list[float]] = {run.name: [] for run in runs}
        for _ in range(self.config.ideal_steps):
            for run in runs:
                dist.barrier()
                ideal[run.name].append(run.ideal_step())
        for run in runs:
            counted = run.step_seconds[self.config.skip_steps :] or run.step_seconds
            self.events.write(
                "finished",
                method=run.name,
                seed=run.seed,
                step_seconds=statistics.median(counted) if counted else None,
                step_seconds_quartiles=quartiles(counted) if counted else None,
                ideal_step_seconds=statistics.median(ideal[run.name][1:]),
                peak_extra_bytes=run.traffic().peak_extra_bytes,
            )
            run.close()


if __name__ == "__main__":
    main(sys.argv[1:])
