"""The process that `bench train` starts on every node: `python -m gradwire.bench.train_worker`.

Arguments: the file with the run's `TrainConfig`, and the file to which rank 0 appends what happens,
one JSON object a line, each with an `event`:

- `setup`: `parameters`;
- `length`: `steps`, and why, once it is settled;
- `step`: a contestant trained: `method, seed, step, steps, seconds, train_loss`;
- `evaluation`: `method, seed, step, seconds, metric, loss, wire_bytes, link_bytes,
  peak_extra_bytes`;
- `finished`: `method, seed, step_seconds, ideal_step_seconds, peak_extra_bytes`;
- `done`.

Methods take turns: each trains up to the next evaluation, in an order that rotates. Evaluating is
outside of their clocks.
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
from gradwire.bench.contestant import Contestant
from gradwire.bench.tasks import Task
from gradwire.bench.train_config import TrainConfig
from gradwire.bench.workers import Events

_STEP_EVENT_SECONDS = 0.25  # live progress, no more often than this


def main(arguments: list[str]) -> None:
    """Trains as the configuration says, in the process group that the environment describes."""
    config_file, events_file = arguments
    config = TrainConfig.from_json(Path(config_file).read_text())
    timeout = timedelta(seconds=config.collective_timeout_seconds)
    dist.init_process_group("gloo", timeout=timeout)
    with open(events_file if dist.get_rank() == 0 else "/dev/null", "a") as stream:
        Training(config, StepEvents(stream)).all_seeds()
    dist.barrier()
    dist.destroy_process_group()


class StepEvents(Events):
    """Events, and those of steps, which are thinned out."""

    _last_step = 0.0

    def step(self, contestant: Contestant, steps: int) -> None:
        """Appends a `step` event, unless the last one is very recent."""
        now = time.monotonic()
        if now - self._last_step < _STEP_EVENT_SECONDS:
            return
        self._last_step = now
        self.write(
            "step",
            method=contestant.name,
            seed=contestant.seed,
            step=contestant.step,
            steps=steps,
            seconds=sum(contestant.step_seconds),
            train_loss=contestant.last_loss,
        )


class Training:
    """One rank's part of a run."""

    def __init__(self, config: TrainConfig, events: StepEvents) -> None:
        self.config = config
        self.events = events
        self.steps = config.steps
        self.settled = config.budget_seconds is None
        self.evaluation_seconds: list[float] = []

    def all_seeds(self) -> None:
        """Every method with every seed."""
        task = self.config.check()
        for seed in self.config.seeds:
            self._one_seed(task, seed)
        self.events.write("done")

    def _one_seed(self, task: Task, seed: int) -> None:
        contestants = [
            Contestant.enter(methods.parse(name), task, seed) for name in self.config.methods
        ]
        if seed == self.config.seeds[0]:
            model = contestants[0].model
            self.events.write("setup", parameters=sum(p.numel() for p in model.parameters()))
        start = time.perf_counter()
        self._evaluate(contestants)
        turn = 0
        while contestants[0].step < self.steps:
            first = turn % len(contestants)
            in_turn = contestants[first:] + contestants[:first]
            until = min(contestants[0].step + self.config.evaluate_every, self.steps)
            for contestant in in_turn:
                self._train(contestant, until)
            self._evaluate(in_turn)
            if not self.settled:
                self._settle_length(contestants, time.perf_counter() - start)
            turn += 1
        self._finish(contestants)

    def _train(self, contestant: Contestant, until: int) -> None:
        dist.barrier()
        while contestant.step < until:
            contestant.train(1, self.steps)
            self.events.step(contestant, self.steps)

    def _evaluate(self, contestants: list[Contestant]) -> None:
        for contestant in contestants:
            start = time.perf_counter()
            score = contestant.evaluate()
            self.evaluation_seconds.append(time.perf_counter() - start)
            traffic = contestant.traffic()
            self.events.write(
                "evaluation",
                method=contestant.name,
                seed=contestant.seed,
                step=contestant.step,
                seconds=sum(contestant.step_seconds),
                metric=contestant.task.metric_of(score),
                loss=score.mean_loss,
                wire_bytes=traffic.wire_bytes,
                link_bytes=contestant.link_bytes,
                peak_extra_bytes=traffic.peak_extra_bytes,
            )

    def _settle_length(self, contestants: list[Contestant], spent: float) -> None:
        """How many steps fit into the budget, from the first turns' times; one answer for all."""
        assert self.config.budget_seconds is not None
        budget = self.config.budget_seconds / len(self.config.seeds)
        every = self.config.evaluate_every
        turn = every * sum(statistics.median(c.step_seconds) for c in contestants)
        turn += len(contestants) * statistics.median(self.evaluation_seconds)
        turns = 1 + max(1, int((budget - spent) / turn))
        agreed = torch.tensor([min(self.config.steps, turns * every)])
        dist.broadcast(agreed, 0)
        self.steps = int(agreed.item())
        self.settled = True
        reason = f"{turn:.1f} s for {every} steps of each method, budget {budget:.0f} s"
        self.events.write("length", steps=self.steps, reason=reason)

    def _finish(self, contestants: list[Contestant]) -> None:
        ideal: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
        for _ in range(self.config.ideal_steps):
            for contestant in contestants:
                dist.barrier()
                ideal[contestant.name].append(contestant.ideal_step())
        for contestant in contestants:
            counted = contestant.step_seconds[self.config.skip_steps :] or contestant.step_seconds
            self.events.write(
                "finished",
                method=contestant.name,
                seed=contestant.seed,
                step_seconds=statistics.median(counted) if counted else None,
                ideal_step_seconds=statistics.median(ideal[contestant.name][1:]),
                peak_extra_bytes=contestant.traffic().peak_extra_bytes,
            )
            contestant.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
