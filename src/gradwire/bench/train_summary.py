"""The summary rows of `bench train`: one per method, over all its seeds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from gradwire.bench.baselines import Baselines
from gradwire.bench.train_config import TrainConfig

Row = dict[str, Any]

_KINDS = ("weights_wire_bytes", "gradients_wire_bytes")  # of FSDP2's rows


class Summary:
    """Collects a run's events and computes its summary rows."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.baselines = Baselines.of(config.sharded)
        self.evaluations: list[dict[str, Any]] = []
        self.finished: list[dict[str, Any]] = []

    def rows(self) -> Iterator[Row]:
        """One row per method, over all seeds: medians of times, means of scores."""
        targets, origin = self._targets()
        for method in self.config.methods:
            last = self._last(method)
            times = self._times_to(targets, method)
            ended = [event for event in self.finished if event["method"] == method]
            yield {
                "method": method,
                "seeds": list(self.config.seeds),
                "steps": last[0]["step"],
                "steps_by_seed": [event["step"] for event in last],
                "target": _mean(targets),
                "target_from": origin,
                "time_to_target": _median(times),
                "time_to_target_by_seed": times,
                "evaluation_gap_seconds": self._longest_gap(method),
                "final_metric": _mean([event["metric"] for event in last]),
                "final_loss": _mean([event["loss"] for event in last]),
                "final_loss_by_seed": [event["loss"] for event in last],
                "seconds": _median([event["seconds"] for event in last]),
                "step_seconds": _median([event["step_seconds"] for event in ended]),
                "step_seconds_quartiles": _widest(
                    [event["step_seconds_quartiles"] for event in ended]
                ),
                "ideal_step_seconds": _median([event["ideal_step_seconds"] for event in ended]),
                "wire_bytes": _median([event["wire_bytes"] for event in last]),
                "link_bytes": _median([event["link_bytes"] for event in last]),
                "wire_bytes_per_step": _median(_per_step(last, "wire_bytes")),
                "link_bytes_per_step": _median(_per_step(last, "link_bytes")),
                "peak_extra_bytes": _median([event["peak_extra_bytes"] for event in last]),
                "rolling_loss": _mean([event["rolling_loss"] for event in last]),
                "rolling_metric": _mean([event["rolling_metric"] for event in last]),
                "step_seconds_mean": _median([event["step_seconds_mean"] for event in ended]),
                "timed_steps": _median([event["timed_steps"] for event in ended]),
                "timed_bytes": _median([event["timed_bytes"] for event in ended]),
                "kernel_seconds": _median([event["kernel_seconds"] for event in ended]),
                "exposed_seconds": _median([event["exposed_seconds"] for event in ended]),
                "mean_ratio": _mean([event["mean_ratio"] for event in ended]),
                "plan_changes": _mean([event["plan_changes"] for event in ended]),
                **self._against_full(last),
                **self._utility(targets, times),
                **{
                    key: _median([event[key] for event in last]) for key in _KINDS if key in last[0]
                },
                "timing_only": self.config.method(method).timing_only,
            }

    def _against_full(self, last: list[dict[str, Any]]) -> Row:
        """The final metric with each seed, and its difference to fp32's; None without fp32."""
        metrics = [event["metric"] for event in last]
        found: list[float | None] = [None] * len(metrics)
        if self.baselines.full in self.config.methods:
            full = [event["metric"] for event in self._last(self.baselines.full)]
            found = [
                None if None in (mine, theirs) else mine - theirs
                for mine, theirs in zip(metrics, full, strict=True)
            ]
        return {"final_metric_by_seed": metrics, "final_metric_difference_by_seed": found}

    def _utility(self, targets: list[float | None], times: list[float | None]) -> Row:
        """The time to target of the best 16-bit baseline, over this method's (UTIL 1)."""
        best = {
            name: _median(self._times_to(targets, name)) for name in self.baselines.sixteen_bits
        }
        reached = {name: time for name, time in best.items() if time}
        against = min(reached, key=lambda name: reached[name]) if reached else None
        mine = _median(times)
        utility = reached[against] / mine if against is not None and mine else None
        return {"utility": utility, "utility_against": against}

    def _last(self, method: str) -> list[dict[str, Any]]:
        """The last evaluation with each seed."""
        by_seed = {e["seed"]: e for e in self.evaluations if e["method"] == method}
        return [by_seed[seed] for seed in self.config.seeds]

    def _longest_gap(self, method: str) -> float | None:
        """The longest training time between two evaluations; None with fewer than two."""
        gaps = [
            after["seconds"] - before["seconds"]
            for seed in self.config.seeds
            for before, after in itertools.pairwise(
                event
                for event in self.evaluations
                if (event["method"], event["seed"]) == (method, seed)
            )
        ]
        return max(gaps, default=None)

    def _targets(self) -> tuple[list[float | None], str]:
        """The target loss per seed, and its origin.

        The target is the baseline's last loss plus the tolerance, or its loss at `target_at`, from
        the same initial weights and batches. Without the fp32 method, the first is the baseline.
        """
        seeds = self.config.seeds
        if self.config.target is not None:
            return [self.config.target] * len(seeds), "given"
        full = self.baselines.full
        baseline = full if full in self.config.methods else self.config.methods[0]
        last = self._last(baseline)
        losses = [event["loss"] for event in last]
        tolerance, origin = self.config.tolerance, baseline
        if self.config.target_at is not None:
            losses = [self._loss_at(baseline, event, self.config.target_at) for event in last]
            tolerance, origin = 0.0, f"{baseline} at {self.config.target_at:g} of its run"
        if None in losses:
            return [None] * len(seeds), f"{baseline} (its loss was not finite)"
        return [loss * (1 + tolerance) for loss in losses if loss is not None], origin

    def _loss_at(self, method: str, last: dict[str, Any], share: float) -> float | None:
        """The loss at the last evaluation within a share of the run that `last` ends."""
        within = [
            event["loss"]
            for event in self.evaluations
            if (event["method"], event["seed"]) == (method, last["seed"])
            and event["step"] <= share * last["step"]
        ]
        loss: float | None = within[-1]
        return loss

    def _times_to(self, targets: list[float | None], method: str) -> list[float | None]:
        """With each seed, the training time at the first evaluation that meets its target.

        None if a seed never meets its target, or the method is for timing only. The time is not
        interpolated between evaluations.
        """
        if method not in self.config.methods or self.config.method(method).timing_only:
            return [None] * len(targets)
        times: list[float | None] = []
        for seed, target in zip(self.config.seeds, targets, strict=True):
            reached = (
                float(event["seconds"])
                for event in self.evaluations
                if (event["method"], event["seed"]) == (method, seed)
                and None not in (target, event["loss"])
                and event["loss"] <= target
            )
            times.append(next(reached, None))
        return times


def _per_step(last: list[Row], key: str) -> list[float | None]:
    """What each run has of `key` per step; runs may differ in length."""
    return [
        None if event[key] is None or not event["step"] else event[key] / event["step"]
        for event in last
    ]


def _mean(values: list[float | None]) -> float | None:
    """The mean; None if a value is missing, so that a failed seed is visible."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def _median(values: list[float | None]) -> float | None:
    """The median; None as in `_mean`."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def _widest(spreads: list[list[float] | None]) -> list[float] | None:
    """From the least lower bound to the greatest upper one; None as in `_mean`."""
    known = [spread for spread in spreads if spread is not None]
    if not known or len(known) < len(spreads):
        return None
    return [min(low for low, _ in known), max(high for _, high in known)]
