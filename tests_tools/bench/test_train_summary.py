"""Summary rows: the target, the time to it, medians over seeds, and missing losses; and what the
terminal shows of them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from gradwire_tools.bench.train import run, view
from gradwire_tools.bench.train.config import TrainConfig
from gradwire_tools.bench.train.rows import summaries


def summary(losses: dict[tuple[str, int], list[float | None]], **fields: Any) -> list[Any]:
    """Summary rows of runs whose losses, at steps 0, 10, ..., are given; a step takes 1 s,
    with seed 1 a tenth more."""
    names = tuple(dict.fromkeys(method for method, _ in losses))
    seeds = tuple(dict.fromkeys(seed for _, seed in losses))
    evaluations: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    for (method, seed), values in losses.items():
        for turn, loss in enumerate(values):
            known = dict.fromkeys(("metric", "loss", "rolling_metric", "rolling_loss"), loss)
            evaluations.append({
                "method": method, "seed": seed, "step": 10 * turn, "seconds": (10.0 + seed) * turn,
                **known, "wire_bytes": 100 * turn, "link_bytes": None, "peak_extra_bytes": None,
                "metric_name": "accuracy", "timing_only": method.startswith("truncate"),
            })  # fmt: skip
        ends.append({
            "method": method, "seed": seed, "step_seconds": 1.0 + seed,
            "step_seconds_quartiles": [0.9 + seed, 1.1 + seed], "step_seconds_mean": 1.25 + seed,
            "timed_steps": 10, "timed_bytes": 10.0, "ideal_step_seconds": 0.5,
            "kernel_seconds": 0.25 + seed, "exposed_seconds": None, "mean_ratio": 4.0 + seed,
            "plan_changes": 2 * seed,
        })  # fmt: skip
    config = TrainConfig(methods=names, seeds=seeds, **fields)
    return list(summaries(config, evaluations, ends))


def test_the_target_is_the_baselines_last_loss_with_the_tolerance() -> None:
    rows = summary({("gradwire-qsgd4", 0): [5.0, 2.0, 1.0], ("torch-fp32", 0): [5.0, 3.0, 2.0]})
    assert [row["target"] for row in rows] == [pytest.approx(2.02)] * 2
    assert {row["target_from"] for row in rows} == {"torch-fp32"}
    assert [row["time_to_target"] for row in rows] == [10.0, 20.0]
    assert [row["final_loss"] for row in rows] == [1.0, 2.0]
    # Without the baseline, the first method is named instead; a given target counts.
    rows = summary({("gradwire-fp16", 0): [5.0, 3.0], ("gradwire-qsgd4", 0): [5.0, 3.1]})
    assert {row["target_from"] for row in rows} == {"gradwire-fp16"}
    assert [row["time_to_target"] for row in rows] == [10.0, None]
    (row,) = summary({("torch-fp32", 0): [5.0, 3.0, 2.0]}, target=4.0)
    assert (row["target"], row["target_from"], row["time_to_target"]) == (4.0, "given", 10.0)


def test_a_method_that_fails_with_one_seed_has_no_time_to_target() -> None:
    rows = summary(
        {
            ("torch-fp32", 0): [5.0, 2.0],
            ("torch-fp32", 1): [5.0, 2.0],
            ("gradwire-qsgd4", 0): [5.0, 2.0],
            ("gradwire-qsgd4", 1): [5.0, 4.0],
        }
    )
    assert rows[0]["time_to_target"] == 10.5
    assert rows[0]["step_seconds"] == 1.5
    assert rows[0]["evaluation_gap_seconds"] == 11.0  # the longest of all seeds
    assert rows[0]["step_seconds_quartiles"] == [0.9, 2.1]
    assert (rows[0]["kernel_seconds"], rows[0]["exposed_seconds"]) == (0.75, None)
    assert (rows[0]["mean_ratio"], rows[0]["plan_changes"]) == (4.5, 1)
    assert rows[1]["time_to_target_by_seed"] == [10.0, None]
    assert rows[1]["final_loss_by_seed"] == [2.0, 4.0]
    assert rows[1]["time_to_target"] is None
    assert rows[1]["final_loss"] == 3.0


def test_seeds_end_by_themselves() -> None:
    row = summary({("torch-fp32", 0): [5.0, 4.0], ("torch-fp32", 1): [5.0, 4.0, 3.0, 3.0]})[0]
    assert (row["steps"], row["steps_by_seed"]) == (10, [10, 30])
    assert row["wire_bytes"] == 200
    assert (row["wire_bytes_per_step"], row["link_bytes_per_step"]) == (10.0, None)
    # Each seed has its own target so the baseline meets it.
    rows = summary({("torch-fp32", 0): [5.0, 2.0], ("torch-fp32", 1): [5.0, 3.0]})
    assert rows[0]["target"] == pytest.approx(1.01 * 2.5)
    assert rows[0]["time_to_target"] == 10.5
    # A loss that is not finite is not averaged away.
    rows = summary({("torch-fp32", 0): [5.0, None], ("gradwire-qsgd4", 0): [5.0, 1.0]})
    assert rows[0]["final_loss"] is None
    assert rows[0]["target"] is None
    assert "not finite" in rows[0]["target_from"]
    assert rows[1]["time_to_target"] is None


def rows() -> list[dict[str, Any]]:
    common = {"task": "gpt", "net": "none", "ranks": 2, "method": "torch-fp32"}
    at = {"seed": 0, "step": 10, "seconds": 1.5, "loss": 3.14159}
    summary = {
        **common, "row": "summary", "steps": 10, "target": 3.17, "target_from": "torch-fp32",
        "time_to_target": None, "final_loss": 3.14159, "step_seconds": 0.15,
        "ideal_step_seconds": 0.1, "wire_bytes": 1000,
    }  # fmt: skip
    return [{**common, "row": "evaluation", **at}, summary]


def test_watching_passes_every_row_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(
        config: TrainConfig, progress: Any, announce: Any, state: Any, resume: bool
    ) -> Iterator[dict[str, Any]]:
        announce("two nodes")
        at = {"phase": "training", "method": "torch-fp32", "seed": 0, "step": 5, "steps": 10}
        progress({**at, "seconds": 0.7})
        yield from rows()

    monkeypatch.setattr(run, "run", made_up)
    config = TrainConfig(methods=("torch-fp32",), steps=10)
    for terminal in (False, True):
        screen = io.StringIO()
        console = Console(file=screen, width=120, force_terminal=terminal)
        assert list(view.watch(config, console)) == rows()
        assert "two nodes" in screen.getvalue()
        assert "3.142" in screen.getvalue()
        assert ("step   10" in screen.getvalue()) == (not terminal)


def test_the_table_has_what_matters() -> None:
    screen = io.StringIO()
    summary = rows()[1]
    faster = {**summary, "method": "torch-fp16-hook", "step_seconds": 0.1, "time_to_target": 1.0}
    ours = {**summary, "method": "gradwire-qsgd4", "step_seconds": 0.04, "final_loss": 3.173}
    made = view.table([summary, faster, ours])
    Console(file=screen, width=80).print(made)
    text = screen.getvalue()
    for expected in ("150 ms", "0.40×", "+1.00 %", "not met", "target loss 3.170", "loopback"):
        assert expected in text
    for method in ("torch-fp32", "torch-fp16-hook", "gradwire-qsgd4"):
        assert method in text  # the table fits into 80 columns
