"""The summary rows of `bench train`: one per method, over all its seeds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from gradwire_tools.bench.train.baselines import Baselines
from gradwire_tools.bench.train.train_config import TOLERANCE, TrainConfig

Row = dict[str, Any]

# Keys of which a summary has the median over seeds: of last evaluations, and of ends of runs.
_OF_LAST = ("seconds", "wire_bytes", "link_bytes", "peak_extra_bytes")
_OF_SHARDED = ("weights_wire_bytes", "gradients_wire_bytes")
_OF_END = (
    *("step_seconds", "step_seconds_mean", "ideal_step_seconds", "timed_steps", "timed_bytes"),
    *("kernel_seconds", "exposed_seconds"),
)


class Summary:
    """Collects a run's events and computes its summary rows."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.baselines = Baselines.of(config.sharded)
        self.evaluations: list[Row] = []
        self.finished: list[Row] = []

    def rows(self) -> Iterator[Row]:
        """One row per method, over all seeds: medians of times, means of scores."""
        targets, origin = self._targets()
        for method in self.config.methods:
            runs = self._runs(method)
            last = [run[-1] for run in runs]
            times = self._times_to(targets, method)
            ended = [event for event in self.finished if event["method"] == method]
            gaps = [b["seconds"] - a["seconds"] for run in runs for a, b in itertools.pairwise(run)]
            yield {
                "method": method,
                "seeds": list(self.config.seeds),
                "steps": last[0]["step"],
                "steps_by_seed": [event["step"] for event in last],
                "target": _mean(targets),
                "target_from": origin,
                "time_to_target": _median(times),
                "time_to_target_by_seed": times,
                "evaluation_gap_seconds": max(gaps, default=None),
                "final_metric": _mean(_each(last, "metric")),
                "final_loss": _mean(_each(last, "loss")),
                "final_loss_by_seed": _each(last, "loss"),
                "rolling_loss": _mean(_each(last, "rolling_loss")),
                "rolling_metric": _mean(_each(last, "rolling_metric")),
                "wire_bytes_per_step": _median(_per_step(last, "wire_bytes")),
                "link_bytes_per_step": _median(_per_step(last, "link_bytes")),
                **{key: _median(_each(last, key)) for key in _OF_LAST},
                **{key: _median(_each(ended, key)) for key in _OF_END},
                "step_seconds_quartiles": _over_seeds(
                    lambda known: [min(low for low, _ in known), max(high for _, high in known)],
                    _each(ended, "step_seconds_quartiles"),
                ),
                "mean_ratio": _mean(_each(ended, "mean_ratio")),
                "plan_changes": _mean(_each(ended, "plan_changes")),
                **self._against_full(last),
                **self._utility(targets, times),
                **{key: _median(_each(last, key)) for key in _OF_SHARDED if key in last[0]},
                "timing_only": self.config.method(method).timing_only,
            }

    def _runs(self, method: str) -> list[list[Row]]:
        """A method's evaluations with each seed."""
        mine = [event for event in self.evaluations if event["method"] == method]
        return [[e for e in mine if e["seed"] == seed] for seed in self.config.seeds]

    def _against_full(self, last: list[Row]) -> Row:
        """The final metric with each seed, and its difference to fp32's; None without fp32."""
        metrics = _each(last, "metric")
        full: list[Any] = [None] * len(metrics)
        if self.baselines.full in self.config.methods:
            full = [run[-1]["metric"] for run in self._runs(self.baselines.full)]
        differences = [
            None if None in (mine, theirs) else mine - theirs
            for mine, theirs in zip(metrics, full, strict=True)
        ]
        return {
            "final_metric_by_seed": metrics,
            "final_metric_difference_by_seed": differences,
        }

    def _utility(self, targets: list[float | None], times: list[float | None]) -> Row:
        """The time to target of the best 16-bit baseline, over this method's (UTIL 1)."""
        best = {
            name: _median(self._times_to(targets, name))
            for name in self.baselines.sixteen_bits
            if name in self.config.methods
        }
        reached = {name: time for name, time in best.items() if time}
        against = min(reached, key=lambda name: reached[name], default=None)
        mine = _median(times)
        utility = reached[against] / mine if against is not None and mine else None
        return {"utility": utility, "utility_against": against}

    def _targets(self) -> tuple[list[float | None], str]:
        """The target loss per seed, and its origin.

        The target is the baseline's last loss plus the tolerance, or its loss at `target_at`, from
        the same initial weights and batches. Without the fp32 method, the first is the baseline.
        """
        config, full = self.config, self.baselines.full
        if config.target is not None:
            return [config.target] * len(config.seeds), "given"
        baseline = full if full in config.methods else config.methods[0]
        share, tolerance, origin = config.target_at, 0.0, baseline
        if share is None:
            share, tolerance = 1.0, TOLERANCE
        else:
            origin = f"{baseline} at {share:g} of its run"
        losses = [
            [event["loss"] for event in run if event["step"] <= share * run[-1]["step"]][-1]
            for run in self._runs(baseline)
        ]
        if None in losses:
            return [None] * len(losses), f"{baseline} (its loss was not finite)"
        return [loss * (1 + tolerance) for loss in losses], origin

    def _times_to(self, targets: list[float | None], method: str) -> list[float | None]:
        """With each seed, the training time at the first evaluation that meets its target.

        None if a seed never meets its target, or the method is for timing only. The time is not
        interpolated between evaluations.
        """
        if self.config.method(method).timing_only:
            return [None] * len(targets)
        return [
            next(
                (
                    float(event["seconds"])
                    for event in run
                    if None not in (target, event["loss"]) and event["loss"] <= target
                ),
                None,
            )
            for run, target in zip(self._runs(method), targets, strict=True)
        ]


def _each(events: list[Row], key: str) -> list[Any]:
    return [event[key] for event in events]


def _per_step(last: list[Row], key: str) -> list[float | None]:
    """What each run has of `key` per step; runs may differ in length."""
    return [
        None if event[key] is None or not event["step"] else event[key] / event["step"]
        for event in last
    ]


def _over_seeds(of: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """`of` the values; None if one is missing, so that a failed seed is visible."""
    return of(values) if values and None not in values else None


def _mean(values: list[Any]) -> Any:
    return _over_seeds(statistics.mean, values)


def _median(values: list[Any]) -> Any:
    return _over_seeds(statistics.median, values)
