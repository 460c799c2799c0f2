"""The summary rows of `bench train`: one per method, over all its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from gradwire.bench.baselines import FULL
from gradwire.bench.train_config import TrainConfig

Row = dict[str, Any]


class Summary:
    """Collects a run's events and computes its summary rows."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
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
                "target": _mean(targets),
                "target_from": origin,
                "time_to_target": _median(times),
                "time_to_target_by_seed": times,
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
                "peak_extra_bytes": _median([event["peak_extra_bytes"] for event in last]),
            }

    def _last(self, method: str) -> list[dict[str, Any]]:
        """The last evaluation with each seed."""
        by_seed = {e["seed"]: e for e in self.evaluations if e["method"] == method}
        return [by_seed[seed] for seed in self.config.seeds]

    def _targets(self) -> tuple[list[float | None], str]:
        """The target loss per seed, and its origin.

        The target is the baseline's last loss plus the tolerance, from the same initial weights and
        batches. Without the fp32 method, the first method is the baseline.
        """
        seeds = self.config.seeds
        if self.config.target is not None:
            return [self.config.target] * len(seeds), "given"
        baseline = FULL if FULL in self.config.methods else self.config.methods[0]
        losses = [event["loss"] for event in self._last(baseline)]
        if None in losses:
            return [None] * len(seeds), f"{baseline} (its loss was not finite)"
        return [loss * (1 + self.config.tolerance) for loss in losses], baseline

    def _times_to(self, targets: list[float | None], method: str) -> list[float | None]:
        """With each seed, the training time at the first evaluation that meets its target.

        None if a seed never meets its target. The time is not interpolated between evaluations.
        """
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
