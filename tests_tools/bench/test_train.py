"""`bench train` end to end, on real processes: rows, repeatability, bytes, and failures."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_runs import OPTIONS, TINY, Found, keys_of, trained

from forked import STAND_IN, Loopback
from gradwire_tools import lab
from gradwire_tools.bench import workers
from gradwire_tools.bench.train import methods, run
from gradwire_tools.bench.train.worker import rolling, stalled
from products import EXHAUSTIVE

pytestmark = pytest.mark.multiprocess

FULL, HALF, OURS = "torch-fp32", "torch-fp16-hook", "qsgd:bits=4"
LOW, LOWER, CUT = "torch-powersgd", "torch-powersgd:rank=1", "truncate:ratio=10"
CONFIG = replace(TINY, methods=(FULL, HALF, LOW, OURS, LOWER, CUT), evaluate_every=2, rolling=3)
OF_OTHERS = {"sharded", "policy", "accumulate", "weights_wire_bytes", "gradients_wire_bytes"}
OF_OTHERS |= {"device", "replicas", "per_node", "replicas_wire_bytes"}


@pytest.fixture(scope="module")
def tiny() -> Found:
    return trained(CONFIG)


def test_all_methods_start_equal_and_learn(tiny: Found) -> None:
    (start,) = {row["loss"] for row in tiny.evaluations if row["step"] == 0}
    full = tiny.summaries[FULL]["final_loss"]
    assert full < 0.95 * start
    for method in (HALF, LOW, OURS):
        assert tiny.summaries[method]["final_loss"] == pytest.approx(full, rel=0.02), method


def test_rolling_averages_are_those_of_the_last_three(tiny: Found) -> None:
    for method in CONFIG.methods:
        losses = [row["loss"] for row in tiny.of(method)]
        expected = [sum(losses[max(0, n - 2) : n + 1]) / min(n + 1, 3) for n in range(5)]
        assert [row["rolling_loss"] for row in tiny.of(method)] == pytest.approx(expected)
        assert tiny.summaries[method]["rolling_loss"] == pytest.approx(expected[-1])
        assert {row["timing_only"] for row in tiny.of(method)} == {method == CUT}
    assert tiny.summaries[CUT]["time_to_target"] is None
    assert tiny.summaries[HALF]["utility"] == 1.0


def test_bytes_are_accounted(tiny: Found) -> None:
    sent = {method: row["wire_bytes"] for method, row in tiny.summaries.items()}
    parameters = tiny.evaluations[0]["parameters"]
    assert sent[FULL] == 8 * parameters * 4  # two ranks: 2 (N-1)/N is 1
    assert sent[HALF] == 8 * parameters * 2
    assert sent[CUT] == pytest.approx(8 * parameters * 4 / 10, rel=0.001)
    assert sent[methods.parse(LOWER).name] < sent[LOW] < sent[FULL]
    # Biases and norms are uncompressed, a large share in a model this small.
    assert sent[FULL] / sent[OURS] > 4


def test_rows_have_their_keys(tiny: Found) -> None:
    assert all(set(row) == keys_of(row) - OF_OTHERS for row in tiny.rows)
    assert not any(row["composed"] for row in tiny.rows)
    assert list(tiny.summaries) == list(CONFIG.methods)
    assert len(tiny.evaluations) == 5 * len(CONFIG.methods)
    assert "GPT" in tiny.said[0]
    assert "loopback" in tiny.said[1]
    # Torch's hooks do not tell.
    for method, row in tiny.summaries.items():
        assert row["step_seconds"] > 0 < row["ideal_step_seconds"]
        spent = row["kernel_seconds"], row["exposed_seconds"]
        assert all(spent) if method == OURS else spent == (None, None), method


@pytest.mark.parametrize("ranks", [STAND_IN, pytest.param(lab, id="users", marks=EXHAUSTIVE)])
def test_a_run_repeats_bit_for_bit(
    tiny: Found, monkeypatch: pytest.MonkeyPatch, ranks: object
) -> None:
    """Whatever else trains beside a method; also on ranks as users start them."""
    monkeypatch.setattr(workers, "lab", ranks)
    again = trained(replace(CONFIG, methods=(OURS, FULL), steps=4)).losses
    assert again == {key: tiny.losses[key] for key in again}


@EXHAUSTIVE
def test_buffers_and_seeds_and_a_budget() -> None:
    options = {"data": "digits", "network": "cnn", "channels": 4, "hidden": 16}
    config = replace(
        TINY, task="image", task_options={**options, "channels_last": True}, nodes=3,
        methods=(FULL, OURS), seeds=(0, 1), steps=40, budget_seconds=1e-3,
    )  # fmt: skip
    found = trained(config)
    assert any("budget" in line for line in found.said)
    assert {row["seed"] for row in found.evaluations} == {0, 1}
    for row in found.summaries.values():
        assert row["steps"] == 8  # the turn that fixed it, and one more
        assert row["seeds"] == [0, 1]


def test_a_run_stalls_without_a_new_least_average() -> None:
    assert rolling([4.0, 2.0, 3.0, 1.0], 2) == [4.0, 3.0, 2.5, 2.0]
    assert rolling([5.0], 3) == [5.0]
    # A run stalls without a new least average.
    for averages, expected in (
        ([3.0, 2.0, 1.0], False),
        ([3.0, 1.0, 2.0, 1.0], True),
        ([3.0, 1.0, 2.0, 0.9], False),
        ([3.0, 2.0], False),
        ([3.0, math.nan, math.nan], True),
        ([math.nan, math.nan, 2.0], False),
    ):
        assert stalled(averages, 2) is expected, averages


def test_patience_ends_each_method_by_itself() -> None:
    """At so high a rate of learning, losses rise again: those of truncate at another step."""
    options = {**OPTIONS, "peak_learning_rate": 0.5, "warmup": 2}
    names = ("torch-fp16-hook", "truncate:ratio=100")
    config = replace(TINY, task_options=options, methods=names, steps=200, evaluate_every=2)
    found = trained(replace(config, patience=4, rolling=1))
    for method in names:
        losses = [row["rolling_loss"] for row in found.of(method)]
        assert not stalled(losses[:-1], 4)
        assert stalled(losses, 4)
        last = found.of(method)[-1]["step"]
        assert found.summaries[method]["steps"] == last < 200


def test_a_policy_chooses_while_a_method_trains() -> None:
    adaptive = "qsgd:bits=4:policy=lgreco:every=8:first=4:average=4:share=1.0"
    names = ("torch-fp16-hook", "qsgd:bits=4", adaptive)
    config = replace(TINY, methods=names, steps=48, evaluate_every=24)
    torchs, uniform, chosen = trained(config).summaries.values()
    assert (torchs["mean_ratio"], torchs["plan_changes"]) == (None, None)
    assert uniform["plan_changes"] == 0
    assert chosen["plan_changes"] >= 1
    assert chosen["mean_ratio"] > 1.01 * uniform["mean_ratio"] > 6


def failed(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """How a run ends whose workers do `body`, with the node's number in `rank`."""
    lines = f"import os, sys, time\nrank = int(os.environ['RANK'])\n{body}\n"
    (folder / "failing_worker.py").write_text(lines)
    monkeypatch.setattr(workers, "lab", lab)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(workers, "WORKER", "failing_worker")
    with pytest.raises(workers.WorkerError) as error:
        list(run.run(TINY, None, lambda text: None))
    return str(error.value)


def test_a_failed_node_is_named_with_its_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_GRACE_SECONDS", 0.2)
    body = "if rank: sys.exit('the disk is on fire')\ntime.sleep(900)"
    told = failed(tmp_path, monkeypatch, body)
    assert "rank 1 failed with exit code 1" in told
    assert "[rank 1] the disk is on fire" in told
    assert "rank 0 was still running" in told


def test_a_hanging_run_ends_with_the_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once rank 0 has written its line, the clock jumps beyond the limit with every look."""
    done, looks = tmp_path / "written", itertools.count(1)

    def now() -> float:
        return time.monotonic() + (1e6 * next(looks) if done.exists() else 0)

    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    body = "if rank: time.sleep(900)\nprint('waiting for nobody', flush=True)\n"
    body += f"open({str(done)!r}, 'w').close()\ntime.sleep(900)"
    told = failed(tmp_path, monkeypatch, body)
    assert "within 250 s" in told
    assert "waiting for nobody" in told


def test_closing_the_iterator_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    leave = Loopback.__exit__

    def noting(self: Loopback, *given: object) -> None:
        started.extend(self.ranks)
        leave(self, *given)

    monkeypatch.setattr(Loopback, "__exit__", noting)
    found = run.run(replace(TINY, steps=10**6), None, lambda text: None)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert len(started) == 2
    assert not any(rank.poll() is None for rank in started)


@EXHAUSTIVE
@pytest.mark.lab
def test_link_bytes_in_the_lab_match_wire_bytes() -> None:
    options = {**OPTIONS, "width": 128}
    config = replace(TINY, net="100mbit,1ms", methods=(FULL, OURS), task_options=options)
    for method, row in trained(config).summaries.items():
        # Links also carry headers of TCP and IP, and acknowledgements.
        assert 1.0 < row["link_bytes"] / row["wire_bytes"] < 1.1, method
