"""Methods of `bench train` without gradwire, rolling averages, and rows with them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from gradwire.bench import methods, train
from gradwire.bench.rolling import rolling, stalled
from gradwire.bench.train_config import TrainConfig
from gradwire.errors import ConfigError

TINY = TrainConfig(
    task="gpt",
    task_options={"layers": 1, "width": 32, "heads": 2, "validation_sequences": 16},
    nodes=2,
    net="none",
    methods=("torch-fp16-hook", "torch-powersgd:rank=1", "truncate:ratio=10"),
    steps=8,
    evaluate_every=2,
    rolling=3,
    ideal_steps=2,
    timeout_seconds=120,
)


def test_rolling_averages_are_of_the_last_values() -> None:
    assert rolling([4.0, 2.0, 3.0, 1.0], 2) == [4.0, 3.0, 2.5, 2.0]
    assert rolling([5.0], 3) == [5.0]


@pytest.mark.parametrize(
    ("averages", "patience", "expected"),
    [
        ([3.0, 2.0, 1.0], 2, False),
        ([3.0, 1.0, 2.0, 1.0], 2, True),
        ([3.0, 1.0, 2.0, 0.9], 2, False),
        ([3.0, 2.0], 2, False),
        ([3.0, math.nan, math.nan], 2, True),
        ([math.nan, math.nan, 2.0], 2, False),
    ],
)
def test_a_run_stalls_without_a_new_least_average(
    averages: list[float], patience: int, expected: bool
) -> None:
    assert stalled(averages, patience) is expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("truncate:ratio=0.5", "write truncate:ratio=N, with a number of 1 or more"),
        ("truncate:ratio=nan", "write truncate:ratio=N"),
        ("truncate:ratio=many", "write truncate:ratio=N"),
        ("truncate", "write truncate:ratio=N"),
        ("truncate:bits=4", "write truncate:ratio=N"),
        ("torch-powersgd:rank=1.5", "write torch-powersgd:rank=N, with a whole number"),
        ("torch-powersgd:rank=0", "with a whole number of 1 or more"),
        ("torch-powersgd:rank", "expected OPTION=VALUE"),
    ],
)
def test_wrong_numbers_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TrainConfig(methods=(text,)).check()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"target_at": 1.5}, "target_at is 1.5"),
        ({"target_at": 0.6, "target": 2.0}, "exclude each other"),
        ({"patience": 0}, "patience is 0, must be at least 1"),
        ({"validate": True}, "give nets to compose"),
        ({"nets": ("1gbit,1ms", "1gbit,1ms")}, "nets contain duplicates"),
        ({"nets": ("1gbit,1hour",)}, "1hour"),
    ],
)
def test_wrong_options_of_a_run_are_named(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TrainConfig(**fields).check()


@pytest.mark.multiprocess
def test_baselines_and_rolling_averages_in_rows() -> None:
    rows = list(train.run(TINY, announce=lambda text: None))
    evaluations = [row for row in rows if row["row"] == "evaluation"]
    summaries = {row["method"]: row for row in rows if row["row"] == "summary"}
    for method in TINY.methods:
        mine = [row for row in evaluations if row["method"] == method]
        losses = [row["loss"] for row in mine]
        expected = [sum(losses[max(0, n - 2) : n + 1]) / min(n + 1, 3) for n in range(5)]
        assert [row["rolling_loss"] for row in mine] == pytest.approx(expected)
        assert summaries[method]["rolling_loss"] == mine[-1]["rolling_loss"]
        assert {row["timing_only"] for row in mine} == {method.startswith("truncate")}
    parameters = evaluations[0]["parameters"]
    sent = summaries["truncate:ratio=10"]["wire_bytes"]
    assert sent == pytest.approx(8 * parameters * 4 / 10, rel=0.001)
    assert summaries["truncate:ratio=10"]["time_to_target"] is None
    assert summaries["torch-fp16-hook"]["utility"] == 1.0
    lower = methods.parse("torch-powersgd:rank=1")
    assert lower.options == {"rank": 1}
    assert summaries[lower.name]["wire_bytes"] < 8 * parameters * 2


@pytest.mark.multiprocess
def test_patience_ends_each_method_by_itself() -> None:
    """What truncate leaves out never learns: it stalls before the others do."""
    options = {**TINY.task_options, "peak_learning_rate": 0.5, "warmup": 2}
    config = replace(TINY, task_options=options, steps=200, patience=4, rolling=1)
    config = replace(config, methods=("torch-fp16-hook", "truncate:ratio=100"))
    rows = list(train.run(config, announce=lambda text: None))
    for method in config.methods:
        mine = [r for r in rows if r["row"] == "evaluation" and r["method"] == method]
        losses = [row["rolling_loss"] for row in mine]
        assert not stalled(losses[:-1], 4)
        assert stalled(losses, 4)
        assert mine[-1]["step"] < 200
        summary = next(r for r in rows if r["row"] == "summary" and r["method"] == method)
        assert summary["steps"] == mine[-1]["step"]


def test_a_policy_chooses_while_a_method_trains() -> None:
    adaptive = "qsgd:bits=4:policy=lgreco:every=20:first=4:average=4:share=1.0"
    names = ("torch-fp16-hook", "qsgd:bits=4", adaptive)
    config = replace(TINY, methods=names, steps=160, evaluate_every=80)
    rows = [r for r in train.run(config, announce=lambda _: None) if r["row"] == "summary"]
    torchs, uniform, chosen = rows
    assert (torchs["mean_ratio"], torchs["plan_changes"]) == (None, None)
    assert uniform["plan_changes"] == 0
    assert chosen["plan_changes"] >= 1
    assert chosen["mean_ratio"] > 1.01 * uniform["mean_ratio"] > 6


def test_methods_with_a_policy_are_checked_before_a_run() -> None:
    def said(text: str) -> str:
        with pytest.raises(ConfigError) as raised:
            methods.parse(text).check(2, [("a", (64, 64))])
        return str(raised.value)

    methods.parse("topk:density=0.01:policy=accordion:stale=none").check(2, [("a", (64, 64))])
    assert "unknown policy 'best'" in said("qsgd:policy=best")
    assert "no choices around" in said("terngrad:policy=lgreco")
    assert "Replan: every=0" in said("qsgd:policy=lgreco:every=0")
    assert "'every'" in said("qsgd:every=30")
    with pytest.raises(ConfigError, match="a policy is for `bench train`"):
        methods.parse("qsgd:policy=lgreco").how()
