"""`bench train` end to end, on real processes: rows, repeatability, bytes, and failures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire import lab
from gradwire.bench import train, train_rows, workers
from gradwire.bench.train_config import TrainConfig
from products import EXHAUSTIVE

pytestmark = pytest.mark.multiprocess

TINY = TrainConfig(
    task="gpt",
    task_options={"layers": 1, "width": 32, "heads": 2, "validation_sequences": 16},
    nodes=2,
    net="none",
    methods=("torch-fp32", "torch-fp16-hook", "torch-powersgd", "gradwire-qsgd4"),
    steps=8,
    evaluate_every=4,
    ideal_steps=2,
    timeout_seconds=120,
)
EVALUATION = {
    *("row", "task", "net", "ranks", "parameters", "method", "seed", "step", "seconds"),
    *("metric", "metric_name", "loss", "wire_bytes", "link_bytes", "peak_extra_bytes", "run"),
    *("rolling_metric", "rolling_loss", "timing_only", "task_options", "composed"),
}
SUMMARY = {
    *("row", "task", "net", "ranks", "parameters", "method", "seeds", "steps", "target"),
    *("target_from", "time_to_target", "final_metric", "final_loss", "metric_name", "seconds"),
    *("step_seconds", "ideal_step_seconds", "wire_bytes", "link_bytes", "peak_extra_bytes"),
    *("step_seconds_quartiles", "time_to_target_by_seed", "final_loss_by_seed", "run"),
    *("rolling_metric", "rolling_loss", "timing_only", "task_options", "composed"),
    *("final_metric_by_seed", "final_metric_difference_by_seed", "step_seconds_mean"),
    *("utility", "utility_against", "kernel_seconds", "exposed_seconds"),
    *("mean_ratio", "plan_changes"),
    *("timed_steps", "timed_bytes", "evaluation_gap_seconds", "steps_by_seed"),
    *("wire_bytes_per_step", "link_bytes_per_step"),
}


def rows_of(config: TrainConfig) -> tuple[list[Any], list[Any], list[str]]:
    said: list[str] = []
    rows = list(train.run(config, announce=said.append))
    kinds = [[row for row in rows if row["row"] == kind] for kind in ("evaluation", "summary")]
    return kinds[0], kinds[1], said


@pytest.fixture(scope="module")
def tiny() -> tuple[list[Any], list[Any], list[str]]:
    return rows_of(TINY)


def test_rows_have_their_keys_and_are_json(tiny: tuple[list[Any], list[Any], list[str]]) -> None:
    evaluations, summaries, said = tiny
    assert all(set(row) == EVALUATION for row in evaluations)
    assert all(set(row) == SUMMARY for row in summaries)
    assert [row["method"] for row in summaries] == list(TINY.methods)
    assert len(evaluations) == 3 * len(TINY.methods)
    json.dumps([evaluations, summaries], allow_nan=False)
    assert "GPT" in said[0]
    assert "loopback" in said[1]


def test_all_methods_start_equal_and_learn(tiny: tuple[list[Any], list[Any], list[str]]) -> None:
    evaluations, summaries, _ = tiny
    starts = {row["loss"] for row in evaluations if row["step"] == 0}
    assert len(starts) == 1
    full = summaries[0]["final_loss"]
    assert full < 0.95 * starts.pop()
    for row in summaries:
        assert row["final_loss"] == pytest.approx(full, rel=0.02), row["method"]
        assert row["ideal_step_seconds"] > 0
        assert 0 < row["step_seconds"] <= row["seconds"]


def test_what_gradwire_spends_is_measured(tiny: tuple[list[Any], list[Any], list[str]]) -> None:
    """Kernels and waiting fit into a step; torch's hooks do not tell."""
    *torchs, ours = tiny[1]
    assert {(row["kernel_seconds"], row["exposed_seconds"]) for row in torchs} == {(None, None)}
    assert 0 < ours["kernel_seconds"] < ours["step_seconds_mean"]
    assert 0 < ours["exposed_seconds"] < ours["step_seconds_mean"]


def test_bytes_are_accounted(tiny: tuple[list[Any], list[Any], list[str]]) -> None:
    _, summaries, _ = tiny
    bytes_of = {row["method"]: row["wire_bytes"] for row in summaries}
    parameters = summaries[0]["parameters"]
    assert bytes_of["torch-fp32"] == 8 * parameters * 4  # two ranks: 2 (N-1)/N is 1
    assert bytes_of["torch-fp16-hook"] == 8 * parameters * 2
    assert bytes_of["torch-powersgd"] < bytes_of["torch-fp32"]
    # Biases and norms are uncompressed, a large share in a model this small.
    assert bytes_of["torch-fp32"] / bytes_of["gradwire-qsgd4"] > 4


@EXHAUSTIVE
def test_a_run_repeats_bit_for_bit(tiny: tuple[list[Any], list[Any], list[str]]) -> None:
    def losses(evaluations: list[Any]) -> dict[tuple[str, int], float]:
        return {(row["method"], row["step"]): row["loss"] for row in evaluations}

    again, _, _ = rows_of(replace(TINY, methods=("gradwire-qsgd4", "torch-fp32")))
    first = losses(tiny[0])
    assert losses(again) == {key: first[key] for key in losses(again)}


@EXHAUSTIVE
def test_buffers_and_seeds_and_a_budget() -> None:
    config = replace(
        TINY,
        task="image",
        task_options={
            "data": "digits",
            "network": "cnn",
            "channels": 4,
            "hidden": 16,
            "channels_last": True,
        },
        nodes=3,
        methods=("torch-fp32", "gradwire-qsgd4"),
        seeds=(0, 1),
        steps=40,
        budget_seconds=1e-3,
    )
    evaluations, summaries, said = rows_of(config)
    assert any("budget" in line for line in said)
    assert {row["seed"] for row in evaluations} == {0, 1}
    assert {row["steps"] for row in summaries} == {8}  # the turn that fixed it, and one more
    assert all(row["seeds"] == [0, 1] for row in summaries)


def failing_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> Callable[[], list[Any]]:
    """A run whose workers do `body`, with the node's number in `rank`."""
    (folder / "failing_worker.py").write_text(
        f"import os, sys, time\nrank = int(os.environ['RANK'])\n{body}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(train_rows, "WORKER", "failing_worker")
    config = replace(TINY, timeout_seconds=2.0)
    return lambda: list(train.run(config, announce=lambda text: None))


def test_a_failed_node_is_named_with_its_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_GRACE_SECONDS", 0.5)
    body = "if rank: sys.exit('the disk is on fire')\ntime.sleep(60)"
    start = time.monotonic()
    with pytest.raises(workers.WorkerError) as error:
        failing_worker(tmp_path, monkeypatch, body)()
    assert "rank 1 failed with exit code 1" in str(error.value)
    assert "[rank 1] the disk is on fire" in str(error.value)
    assert "rank 0 was still running" in str(error.value)
    assert time.monotonic() - start < 20


def test_a_hanging_run_ends_with_the_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "print('waiting for nobody', flush=True)\ntime.sleep(60)"
    start = time.monotonic()
    with pytest.raises(workers.WorkerError, match=r"(?s)within 2 s.*waiting for nobody"):
        failing_worker(tmp_path, monkeypatch, body)()
    assert time.monotonic() - start < 20


@EXHAUSTIVE
def test_closing_the_iterator_ends_the_run() -> None:
    rows = train.run(replace(TINY, steps=10**6), announce=lambda text: None)
    next(rows)
    start = time.monotonic()
    rows.close()  # type: ignore[attr-defined]
    assert time.monotonic() - start < 10


@EXHAUSTIVE
@pytest.mark.lab
def test_link_bytes_in_the_lab_match_wire_bytes() -> None:
    reason = lab.available()
    if reason is not None:
        pytest.skip(reason)
    config = replace(TINY, net="100mbit,1ms", methods=("torch-fp32", "gradwire-qsgd4"))
    options = {**TINY.task_options, "width": 128}
    _, summaries, _ = rows_of(replace(config, task_options=options))
    for row in summaries:
        # Links also carry headers of TCP and IP, and acknowledgements.
        assert 1.0 < row["link_bytes"] / row["wire_bytes"] < 1.1, row["method"]
    assert summaries[1]["step_seconds"] < summaries[0]["step_seconds"]
