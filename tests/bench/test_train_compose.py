"""Composed rows: the formula of their times, scores as trained, and validation by whole runs."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire import lab
from gradwire.bench import train
from gradwire.bench.train_compose import StepTimes, composed_seconds
from gradwire.bench.train_config import TrainConfig
from products import EXHAUSTIVE

TINY = TrainConfig(
    task="gpt",
    task_options={"layers": 1, "width": 32, "heads": 2, "validation_sequences": 16},
    nodes=2,
    net="none",
    nets=("none",),
    methods=("torch-fp32", "torch-powersgd", "dgc:density=0.01:warmup=3:momentum=0"),
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
    return {**mean, "timed_bytes": sent, "wire_bytes": 11 * sent, "steps": 7}  # 4 steps' are dense


def composed(
    sent: list[dict[str, Any]], timed: dict[str, Any], late: dict[str, Any] | None = None
) -> list[float]:
    """On a network that stays."""
    times = {"none": StepTimes.of(timed, late)}
    return composed_seconds(sent, times, lab.Schedule.parse("none"), steps=10 * len(sent))


def test_a_network_that_changes_has_the_time_of_each_phase() -> None:
    text = "fast then slow({}: 0 1gbit,1ms; {} 100mbit,1ms)".replace(" then ", "-")
    times = {"1gbit,1ms": StepTimes(20, 0.5, 0.0), "100mbit,1ms": StepTimes(20, 2.0, 0.1)}
    sent = evaluations(0, 200, 420)  # 20 and 22 bytes a step
    of = {"share": (0.5, [0, 5.0, 27.0]), "step": (15, [0, 5.0, 5 * 0.5 + 5.0 + 5 * 2.2]),
          "second": (3.0, [0, 6 * 0.5 + 4 * 2.0, 11.0 + 22.0])}  # fmt: skip
    for unit, (start, expected) in of.items():
        schedule = lab.Schedule.parse(text.format(unit, start))
        assert composed_seconds(sent, times, schedule, 20) == pytest.approx(expected)


def test_a_method_that_sends_always_the_same_takes_the_measured_time() -> None:
    assert composed(evaluations(0, 200, 400), timed(20)) == pytest.approx([0.0, 5.0, 10.0])


def test_communication_scales_with_the_bytes_sent() -> None:
    # The first ten steps send three times as much: 0.1 s + 3 x 0.4 s each.
    assert composed(evaluations(0, 600, 800), timed(20)) == pytest.approx([0, 13.0, 18.0])


def test_times_lie_on_the_line_through_the_first_and_the_last_steps() -> None:
    # 100 bytes take 0.5 s and 20 bytes 0.3 s: encoding takes time where nearly nothing is sent.
    late = {**timed(20), "step_seconds_mean": 0.3}
    sent = evaluations(0, 1000, 1600, 1800)
    assert composed(sent, timed(100), late) == pytest.approx([0.0, 5.0, 9.0, 12.0])


def test_points_near_each_other_make_no_line() -> None:
    late = {**timed(19), "step_seconds_mean": 0.9}
    assert composed(evaluations(0, 600), timed(20), late) == pytest.approx([0.0, 13.0])


def test_dense_first_steps_do_not_make_the_others_cheap() -> None:
    """Two dense steps of 500 bytes, then steps of 20: nearly all take the mean timed step."""
    sent = evaluations(0, 2 * 500 + 8 * 20, *(1160 + 200 * turn for turn in range(1, 90)))
    for late in (None, timed(20)):
        seconds = composed(sent, timed(20), late)[-1]
        assert seconds == pytest.approx(898 * 0.5 + 2 * (0.1 + 25 * 0.4))
        assert seconds / 900 == pytest.approx(0.5, rel=0.1)


@pytest.mark.multiprocess
def test_the_bytes_of_timed_steps_are_without_the_dense_first_ones() -> None:
    fields = {**TINY.__dict__, "nets": (), "methods": ("torch-powersgd",), "steps": 12}
    rows = list(train.run(TrainConfig(**fields), announce=lambda text: None))
    before, last = rows[-3:-1]
    summary = rows[-1]
    assert summary["timed_bytes"] == (last["wire_bytes"] - before["wire_bytes"]) / 4
    assert summary["timed_bytes"] < summary["wire_bytes"] / 12 / 1.5


@pytest.mark.multiprocess
def test_steps_may_be_counted_from_the_end_of_a_warmup() -> None:
    def sent(first: int) -> int:
        method = "dgc:density=0.01:warmup=50:momentum=0"
        fields = {**TINY.__dict__, "nets": (), "methods": (method,), "steps": 4}
        rows = list(train.run(TrainConfig(**{**fields, "first_step": first}), announce=print))
        return int(rows[-1]["wire_bytes"])

    assert sent(50) < sent(0) / 3


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


@EXHAUSTIVE
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
