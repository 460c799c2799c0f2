"""Composed rows: the formula of their times, scores as trained, and validation by whole runs."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire import lab
from gradwire.bench import train
from gradwire.bench.train_compose import composed_seconds
from gradwire.bench.train_config import TrainConfig

TINY = TrainConfig(
    task="gpt",
    task_options={"layers": 1, "width": 32, "heads": 2, "validation_sequences": 16},
    nodes=2,
    net="none",
    nets=("none",),
    methods=("torch-fp32", "torch-powersgd"),
    steps=9,
    evaluate_every=4,
    interleaved=False,
    timed_steps=8,
    ideal_steps=2,
    timeout_seconds=120,
)


def evaluations(*sent: int) -> list[dict[str, Any]]:
    return [{"step": 10 * turn, "wire_bytes": total} for turn, total in enumerate(sent)]


def timed(sent: float) -> dict[str, Any]:
    mean = {"step_seconds_mean": 0.5, "ideal_step_seconds": 0.1}
    return {**mean, "wire_bytes": 7 * sent, "steps": 7}


def test_a_method_that_sends_always_the_same_takes_the_measured_time() -> None:
    assert composed_seconds(evaluations(0, 200, 400), timed(20)) == pytest.approx([0.0, 5.0, 10.0])


def test_communication_scales_with_the_bytes_sent() -> None:
    # The first ten steps send three times as much: 0.1 s + 3 x 0.4 s each.
    assert composed_seconds(evaluations(0, 600, 800), timed(20)) == pytest.approx([0, 13.0, 18.0])


@pytest.mark.multiprocess
def test_composed_rows_have_the_scores_of_training() -> None:
    alone = train.run(
        TrainConfig(**{**TINY.__dict__, "nets": (), "interleaved": True}), announce=print
    )
    scores = {
        (row["method"], row["step"]): row["loss"] for row in alone if row["row"] == "evaluation"
    }
    rows = list(train.run(TINY, announce=lambda text: None))
    found = [row for row in rows if row["row"] == "evaluation"]
    assert {(row["method"], row["step"]): row["loss"] for row in found} == scores
    summaries = [row for row in rows if row["row"] == "summary"]
    assert [row["method"] for row in summaries] == list(TINY.methods)
    assert all(row["composed"] for row in rows)
    for row in summaries:
        last = [e for e in found if e["method"] == row["method"]][-1]
        assert last["step"] == 9
        assert row["seconds"] == last["seconds"] > 0


@pytest.mark.multiprocess
@pytest.mark.lab
def test_composed_times_are_those_of_a_whole_run() -> None:
    reason = lab.available()
    if reason is not None:
        pytest.skip(reason)
    options = {**TINY.task_options, "width": 128}
    fields = {**TINY.__dict__, "task_options": options, "nets": ("20mbit,1ms",), "validate": True}
    config = TrainConfig(**{**fields, "steps": 20, "methods": ("torch-fp32", "gradwire-qsgd4")})
    rows = list(train.run(config, announce=lambda text: None))
    compared = [row for row in rows if row["row"] == "validation"]
    assert [row["method"] for row in compared] == list(config.methods)
    for row in compared:
        assert row["net"] == "20mbit,1ms"
        assert row["error"] == pytest.approx(row["composed_seconds"] / row["whole_seconds"] - 1)
        assert row["composed_final_loss"] == pytest.approx(row["whole_final_loss"], rel=1e-3)
    assert abs(compared[0]["error"]) < 0.3  # fp32: the wire decides
