"""The rows of `bench train`: their keys, baselines, what a run has sent, a summary per method, and
how many steps the runs behind summaries had.

16 bits are the baseline for time: they cost almost no accuracy, so a codec that beats only 32 bits
gains nothing (Beyond Throughput, 2.2). 32 bits are the baseline for the loss. With `--patience`
every run ends by itself: the number of steps differs from seed to seed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire_tools.bench.quantities import plural
from gradwire_tools.bench.rows import Row, row_kind
from gradwire_tools.bench.train.config import TOLERANCE, TrainConfig

_TRAIN = "task:text net:text method:text ranks:positive"
_TRAIN_MORE = (
    "parameters:count? metric_name:text? link_bytes:amount? peak_extra_bytes:amount? "
    "rolling_loss:number? rolling_metric:number? timing_only:flag composed:flag "
    "task_options:options sharded:flag policy:text accumulate:positive "
    "weights_wire_bytes:amount? gradients_wire_bytes:amount? device:text replicas:positive "
    "per_node:positive replicas_wire_bytes:amount?"
)
KINDS = (
    row_kind(
        "bench train",
        "",
        f"{_TRAIN} seed:integer step:count seconds:amount loss:number? wire_bytes:amount?",
        f"{_TRAIN_MORE} metric:number?",
        row="evaluation",
    ),
    row_kind(
        "bench train",
        "",
        f"{_TRAIN} steps:count final_loss:number? target:number? time_to_target:amount? "
        "step_seconds:amount? ideal_step_seconds:amount? wire_bytes:amount?",
        f"{_TRAIN_MORE} seeds:integers? target_from:text? time_to_target_by_seed:times? "
        "times_to_by_seed:targets? "
        "final_metric:number? final_loss_by_seed:numbers? seconds:amount? "
        "step_seconds_quartiles:spread? step_seconds_mean:amount? timed_steps:amount? "
        "timed_bytes:amount? "
        "kernel_seconds:amount? "
        "exposed_seconds:amount? mean_ratio:amount? plan_changes:amount? "
        "utility:amount? evaluation_gap_seconds:amount? "
        "steps_by_seed:integers? wire_bytes_per_step:amount? link_bytes_per_step:amount? "
        "utility_against:text? final_metric_by_seed:numbers? "
        "final_metric_difference_by_seed:numbers?",
        row="summary",
    ),
    row_kind(
        "bench train",
        "",
        "task:text net:text method:text ranks:positive steps:count composed_seconds:amount? "
        "whole_seconds:amount? error:number?",
        "parameters:count? task_options:options composed_time_to_target:amount? "
        "whole_time_to_target:amount? composed_final_loss:number? whole_final_loss:number?",
        row="validation",
    ),
    row_kind(
        "decisions",
        "",
        f"{_TRAIN} seed:integer step:count line:text",
        f"{_TRAIN_MORE} tried:tried",
        row="decision",
    ),
)

# Keys that all rows of a run have alike.
_COMMON = (
    *("task", "task_options", "net", "ranks", "composed", "schedule", "sharded", "policy"),
    *("replicas", "per_node", "accumulate", "parameters", "device"),
)
# Keys of which a summary has the median over seeds: of last evaluations, and of ends of runs.
_OF_LAST = ("seconds", "wire_bytes", "link_bytes", "peak_extra_bytes")
_OF_SHARDED = ("weights_wire_bytes", "gradients_wire_bytes", "replicas_wire_bytes")
_OF_END = (
    *("step_seconds", "step_seconds_mean", "ideal_step_seconds", "timed_steps", "timed_bytes"),
    *("kernel_seconds", "exposed_seconds"),
)
# What a summary has not, of ranks that share a GPU.
_OF_TIME = (
    *("target", "target_from", "time_to_target", "time_to_target_by_seed", "times_to_by_seed"),
    *(
        "utility",
        "utility_against",
        "evaluation_gap_seconds",
        "seconds",
        "step_seconds_quartiles",
        *_OF_END,
    ),
)

# By name, targets to which every summary has its times: the baseline's loss at a share of its run,
# and the tolerance on it. A sparse method may reach the first and never the last.
TARGETS = {"0.6": (0.6, 0.0), "0.8": (0.8, 0.0), "last": (1.0, TOLERANCE)}

FULL = "torch-fp32"
SIXTEEN_BIT = "torch-fp16-hook"
SIXTEEN_BITS = (SIXTEEN_BIT, "torch-bf16-hook")  # the better one is the bar for utility


@dataclass(frozen=True)
class Baselines:
    """The baselines of one kind of run.

    Attributes:
        full: for the loss.
        sixteen_bits: for time: the best one is the bar for utility.
        compared: of these, those among which the best one is the baseline of tables.
    """

    full: str
    sixteen_bits: tuple[str, ...]
    compared: tuple[str, ...]

    @staticmethod
    def of(sharded: bool) -> Baselines:
        """Those of FSDP2 or of DDP."""
        return FSDP2 if sharded else DDP

    @staticmethod
    def of_rows(rows: Sequence[Row]) -> Baselines:
        """Those of the rows of one run."""
        return Baselines.of(bool(rows) and bool(rows[0].get("sharded")))

    @staticmethod
    def among(methods: Collection[str]) -> Baselines:
        """Those of FSDP2 if one of these methods is among them, else DDP's."""
        return Baselines.of(any(name in methods for name in (FSDP2.full, *FSDP2.sixteen_bits)))

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (self.full, *self.sixteen_bits)

    def best(self, summaries: Sequence[Row], key: str) -> Row | None:
        """The 16-bit baseline of a table: the row with the least time under `key`; rows that have
        none come last."""
        found = [row for row in summaries if row["method"] in self.compared]
        return min(found, key=lambda row: (row[key] is None, row[key] or 0.0), default=None)

    def against(self, baseline: Row | None) -> str:
        """The name of a table's baseline, which may be missing."""
        return self.compared[0] if baseline is None else str(baseline["method"])


DDP = Baselines(FULL, SIXTEEN_BITS, (SIXTEEN_BIT,))
_FSDP2_SIXTEEN_BITS = ("fsdp-bf16", "fsdp-mixed")
FSDP2 = Baselines("fsdp-fp32", _FSDP2_SIXTEEN_BITS, _FSDP2_SIXTEEN_BITS)


def evaluations_of(rows: list[Row], method: str, seed: int) -> list[Row]:
    """A method's evaluations with a seed."""
    wanted = ("evaluation", method, seed)
    return [r for r in rows if (r["row"], r["method"], r.get("seed")) == wanted]


def bytes_per_step(evaluations: list[Row]) -> list[float]:
    """What a step sends between each two evaluations, from step 0 on."""
    return [
        (now["wire_bytes"] - before["wire_bytes"]) / (now["step"] - before["step"])
        for before, now in itertools.pairwise(evaluations)
    ]


def varies(rows: list[Row], method: str, seed: int) -> bool:
    """Whether a run did not always send the same."""
    sent = bytes_per_step(evaluations_of(rows, method, seed))
    return bool(sent) and not alike(min(sent), max(sent))


def alike(one: float, other: float) -> bool:
    """Whether two numbers of bytes are too near to draw a line through their times."""
    return abs(one - other) <= 0.1 * max(one, other)


def summaries(config: TrainConfig, evaluations: list[Row], ends: list[Row]) -> Iterator[Row]:
    """One row per method, over all seeds: medians of times, means of scores.

    Args:
        ends: events `finished` of `worker`, one per method and seed.
    """
    baselines, first = Baselines.of(config.sharded), evaluations[0]
    runs = {  # by method, of each seed
        method: [
            [row for row in evaluations if (row["method"], row["seed"]) == (method, seed)]
            for seed in config.seeds
        ]
        for method in config.methods
    }
    targets, origin = _targets(config, runs)
    times = {method: _times_to(targets, mine) for method, mine in runs.items()}
    _, reference = _reference(config, runs)
    further = {name: _losses_at(reference, *at) for name, at in TARGETS.items()}
    full = [run[-1]["metric"] for run in runs.get(baselines.full, [])]
    bars = {name: _median(times[name]) for name in baselines.sixteen_bits if name in times}
    bars = {name: bar for name, bar in bars.items() if bar}
    bar = min(bars, key=lambda name: bars[name], default=None)
    for method, mine in runs.items():
        last = [run[-1] for run in mine]
        ended = [event for event in ends if event["method"] == method]
        gaps = [b["seconds"] - a["seconds"] for run in mine for a, b in itertools.pairwise(run)]
        time, metrics = _median(times[method]), _each(last, "metric")
        yield {
            "row": "summary",
            **{key: first[key] for key in _COMMON if key in first},
            "method": method,
            "seeds": list(config.seeds),
            "steps": last[0]["step"],
            "steps_by_seed": _each(last, "step"),
            "target": _mean(targets),
            "target_from": origin,
            "time_to_target": time,
            "time_to_target_by_seed": times[method],
            "times_to_by_seed": {name: _times_to(of, mine) for name, of in further.items()},
            "evaluation_gap_seconds": max(gaps, default=None),
            "final_metric": _mean(metrics),
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
            "final_metric_by_seed": metrics,
            "final_metric_difference_by_seed": [
                None if None in (metric, of_full) else metric - of_full
                for metric, of_full in zip(metrics, full or [None] * len(metrics), strict=True)
            ],
            "utility": bars[bar] / time if bar is not None and time else None,  # UTIL 1
            "utility_against": bar,
            **{key: _median(_each(last, key)) for key in _OF_SHARDED if key in last[0]},
            "timing_only": last[0]["timing_only"],
            "metric_name": first["metric_name"],
            **dict.fromkeys(_OF_TIME if config.device != "cpu" else ()),
        }


def _targets(
    config: TrainConfig, runs: dict[str, list[list[Row]]]
) -> tuple[list[float | None], str]:
    """The target loss per seed, and its origin.

    The target is the baseline's last loss plus the tolerance, or its loss at `target_at`, from the
    same initial weights and batches. Without the fp32 method, the first is the baseline.
    """
    if config.target is not None:
        return [config.target] * len(config.seeds), "given"
    baseline, reference = _reference(config, runs)
    share, tolerance, origin = 1.0, TOLERANCE, baseline
    if config.target_at is not None:
        share, tolerance = config.target_at, 0.0
        origin = f"{baseline} at {share:g} of its run"
    losses = _losses_at(reference, share, tolerance)
    return losses, origin if None not in losses else f"{baseline} (its loss was not finite)"


def _reference(
    config: TrainConfig, runs: dict[str, list[list[Row]]]
) -> tuple[str, list[list[Row]]]:
    """The method whose losses are the targets, and its runs."""
    full = Baselines.of(config.sharded).full
    name = full if full in runs else config.methods[0]
    return name, runs[name]


def _losses_at(reference: list[list[Row]], share: float, tolerance: float) -> list[float | None]:
    """Of each seed, the loss at a share of the run, plus the tolerance; None of all, where one was
    not finite. Of a run that starts later than that, its first."""
    losses = [
        [run[0], *(row for row in run if row["step"] <= share * run[-1]["step"])][-1]["loss"]
        for run in reference
    ]
    return [None if None in losses else loss * (1 + tolerance) for loss in losses]


def _times_to(targets: list[float | None], runs: list[list[Row]]) -> list[float | None]:
    return [_time_to(target, run) for target, run in zip(targets, runs, strict=True)]


def _time_to(target: float | None, run: list[Row]) -> float | None:
    """The training time at the first evaluation that meets the target, not interpolated between
    evaluations; None if it is never met, or the method is for timing only."""
    for row in run:
        if None not in (target, row["loss"]) and row["loss"] <= target and not row["timing_only"]:
            return float(row["seconds"])
    return None


def _each(rows: list[Row], key: str) -> list[Any]:
    return [row[key] for row in rows]


def _per_step(last: list[Row], key: str) -> list[float | None]:
    """What each run has of `key` per step; runs may differ in length."""
    return [None if row[key] is None or not row["step"] else row[key] / row["step"] for row in last]


def _over_seeds(of: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """`of` the values; None if one is missing, so that a failed seed is visible."""
    return of(values) if values and None not in values else None


def _mean(values: list[Any]) -> Any:
    return _over_seeds(statistics.mean, values)


def _median(values: list[Any]) -> Any:
    return _over_seeds(statistics.median, values)


# ---- steps


def per_step(row: Row, key: str) -> float | None:
    """Of the bytes under `key`, those of a step: the median over seeds, where the row has it."""
    value: float | None = row.get(f"{key}_per_step")
    if value is not None:
        return float(value)
    whole = row.get(key)
    return None if whole is None or not row["steps"] else float(whole) / row["steps"]


def length(rows: Sequence[Row]) -> str:
    """ "60 steps"; "30 to 60 steps", if the runs of these rows ended at different ones."""
    least, most = min(_ends(rows)), max(_ends(rows))
    return plural(most, "step") if least == most else f"{least:,} to {most:,} steps"


def lengths_told(rows: Sequence[Row]) -> list[str]:
    """A sentence, if the runs ended at different steps."""
    if len(_ends(rows)) < 2:
        return []
    each = ", ".join(f"{row['method']} after {length([row])}" for row in rows)
    differ = "So last losses, and bytes and times in all, are not of the same steps."
    return [f"Runs ended at different steps: {each}. {differ}"]


def _ends(rows: Sequence[Row]) -> set[int]:
    return {step for row in rows for step in row.get("steps_by_seed") or [row["steps"]]}
