"""Tiny runs of `bench train` and what they gave."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from gradwire_tools.bench.train import run
from gradwire_tools.bench.train.config import TrainConfig
from gradwire_tools.report.rows import kind_of

OPTIONS: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "validation_sequences": 16}
TINY = TrainConfig(
    task="gpt", task_options=OPTIONS, nodes=2, net="none", methods=("torch-fp32",),
    steps=8, evaluate_every=4, ideal_steps=2, timeout_seconds=250.0,
)  # fmt: skip
TIMES = {"run", "peak_extra_bytes", "time_to_target", "time_to_target_by_seed", "utility"}
TIMES |= {"utility_against", "times_to_by_seed"}


@dataclass
class Found:
    """What a run gave: rows in order, and lines for people."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["row"] == "evaluation"]

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """By method."""
        return {row["method"]: row for row in self.rows if row["row"] == "summary"}

    def of(self, method: str) -> list[dict[str, Any]]:
        """A method's evaluations."""
        return [row for row in self.evaluations if row["method"] == method]

    @property
    def losses(self) -> dict[tuple[str, int, int], float]:
        return {(row["method"], row["seed"], row["step"]): row["loss"] for row in self.evaluations}


def trained(config: TrainConfig, **options: Any) -> Found:
    """All of a run's rows; JSON can hold them."""
    found = Found()
    found.rows += run.run(config, None, found.said.append, **options)
    json.dumps(found.rows, allow_nan=False)
    return found


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in TIMES and "seconds" not in key}
        for row in json.loads(json.dumps(rows))
    ]


def keys_of(row: dict[str, Any]) -> set[str]:
    """All that rows of its kind may have; tests_tools/cli/interface.txt has the list."""
    kind = kind_of(row)
    assert kind is not None, row
    return {*kind.marks, *kind.keys, *kind.more, "run"}
