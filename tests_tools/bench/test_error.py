"""`bench error`: NMSE, bits and bytes against plain float64 references, on known gradients."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_runs import refused

from gradwire.aggregators import ErrorFeedback, registry
from gradwire.codecs import QSGD, HardThreshold, RandomK, TopK
from gradwire.collectives import Options
from gradwire_tools.bench.adapt import error
from gradwire_tools.bench.adapt.in_process import InProcessRanks, bits_of
from gradwire_tools.bench.adapt.recording import Recording, save

SHAPES = (("a", (40, 30)), ("bias", (17,)), ("b", (8, 5, 3)))
NUMEL = {"a": 1200, "b": 120}
KEYS = {
    "row", "task", "at", "steps", "ranks", "method", "algorithm", "error_feedback", "layer",
    "numel", "nmse", "nmse_by_step", "nmse_of_fed", "nmse_of_sum", "cosine", "input_bits",
    "packed_bits", "wire_bytes", "recorded", "run",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three ranks, three steps at two points."""
    made = Recording("gpt", {}, 0, 3, (0, 50), 3, SHAPES, {"commit": "c0ffee"})
    draw = torch.Generator().manual_seed(7)
    for at in made.at:
        for step in range(made.steps):
            common = torch.randn(made.numel, generator=draw)
            rows = [common + torch.randn(made.numel, generator=draw) for _ in range(3)]
            save(made.file(tmp_path, at, step), rows)
    made.write(tmp_path)
    return tmp_path


def gradients(folder: Path, at: int, name: str) -> np.ndarray:
    """float64 [steps, ranks, values] of one parameter."""
    found = Recording.read(folder)
    place = [one for one, _ in SHAPES].index(name)
    return np.stack(
        [
            np.stack([of[place].numpy().ravel() for of in found.gradients(folder, at, step)])
            for step in range(3)
        ]
    ).astype(np.float64)


def top(values: np.ndarray, density: float) -> np.ndarray:
    """The largest values, and zeros."""
    k = max(1, int(density * values.size))
    kept = np.zeros_like(values)
    places = np.argsort(-np.abs(values), kind="stable")[:k]
    kept[places] = values[places]
    return kept


def averages(folder: Path, at: int, name: str, density: float, feedback: bool) -> np.ndarray:
    """What all-gathered TopK averages, in float64: [steps, values]."""
    found, residuals = [], np.zeros((3, NUMEL[name]))
    for step in gradients(folder, at, name):
        fed = step + residuals
        sent = np.stack([top(one, density) for one in fed])
        found.append(sent.mean(0))
        if feedback:
            residuals = fed - sent
    return np.stack(found)


@pytest.mark.parametrize(("at", "feedback"), [(0, False), (50, True)])
def test_errors_are_those_of_a_float64_reference(folder: Path, at: int, feedback: bool) -> None:
    text = f"topk:density=0.1:values=fp32:algorithm=all_gather:error_feedback={feedback}".lower()
    rows = list(error.run([folder], [text], at=[at], layers=True))
    assert [row["layer"] for row in rows] == [None, "a", "b"]
    assert all(row.keys() == KEYS and row["error_feedback"] is feedback for row in rows)
    for row in rows:
        names = ["a", "b"] if row["layer"] is None else [row["layer"]]
        exact = np.concatenate([gradients(folder, at, n).mean(1) for n in names], 1)
        got = np.concatenate([averages(folder, at, n, 0.1, feedback) for n in names], 1)
        lost, of_sum = got - exact, (got - exact).sum(0)
        assert row["numel"] == exact.shape[1]
        assert row["nmse"] == pytest.approx((lost**2).sum() / (exact**2).sum(), rel=1e-5)
        by_step = (lost**2).sum(1) / (exact**2).sum(1)
        assert row["nmse_by_step"] == pytest.approx(list(by_step), rel=1e-5)
        whole = (exact.sum(0) ** 2).sum()
        assert row["nmse_of_sum"] == pytest.approx((of_sum**2).sum() / whole, rel=1e-5)
        lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(exact, axis=1)
        assert row["cosine"] == pytest.approx(((got * exact).sum(1) / lengths).mean(), rel=1e-5)
        if not feedback:
            assert row["nmse_of_fed"] == row["nmse"]


def test_with_error_feedback_what_was_fed_in_includes_residuals(folder: Path) -> None:
    text = "topk:density=0.1:values=fp32:algorithm=all_gather:error_feedback=true"
    (row,) = error.run([folder], [text], at=[0])
    lost = fed_in = 0.0
    for name, numel in NUMEL.items():
        residuals = np.zeros((3, numel))
        for step in gradients(folder, 0, name):
            fed = step + residuals
            residuals = fed - np.stack([top(one, 0.1) for one in fed])
            lost += (residuals.mean(0) ** 2).sum()
            fed_in += (fed.mean(0) ** 2).sum()
    assert row["nmse_of_fed"] == pytest.approx(lost / fed_in, rel=1e-5)


def test_bits_are_counted_as_papers_do_and_as_they_are_packed(folder: Path) -> None:
    threshold = HardThreshold(threshold=1.0, density=0.1)
    cases: list[tuple[Any, int, float | None, float | None]] = [
        (None, 1000, 32.0, 32.0),
        (QSGD(bits=4), 1280, 4.25, 4.25),
        # 10 fp16 values; positions of 10 bits; counts of blocks of 1024 values, two bytes each
        (TopK(density=0.01), 1000, None, 0.48),
        (TopK(density=0.01, values="fp32"), 1000, None, 0.64),
        (RandomK(density=0.1), 1000, 1.6, 1.6),
        (threshold, 1000, None, None),
    ]
    for codec, numel, packed, counted in cases:
        found, as_papers = (bits / numel for bits in bits_of(torch.zeros(numel), codec))
        assert packed is None or found == pytest.approx(packed, rel=0.02), codec
        assert counted is None or as_papers == pytest.approx(counted), codec
        assert found <= as_papers, codec
    # Positions that an aggregator packs are counted as papers do.
    for leader in ("round_robin", "variance"):
        method = f"artopk:density=0.1:scope=layer:leader={leader}"
        for row in error.run([folder], [method], at=[0], layers=True):
            if row["layer"]:
                scores = 128 / row["numel"] if leader == "variance" else 0.0  # two in fp64
                share = row["numel"] // 10 / row["numel"]
                assert row["input_bits"] == pytest.approx(share * (32 + 16) + scores)
                assert row["packed_bits"] < row["input_bits"]


def test_every_algorithm_runs(folder: Path) -> None:
    for algorithm in ("sra", "ring", "tree", "parameter_server", "all_gather", "hierarchical"):
        rows = list(error.run([folder], ["qsgd:bits=4", "powersgd:rank=1"], algorithm, [0]))
        assert {row["algorithm"] for row in rows} == {algorithm}
        assert all(row["wire_bytes"] > 0 for row in rows)
        assert all(0.8 < row["cosine"] <= 1 for row in rows if row["method"].startswith("qsgd"))


def test_the_ranks_agree_and_law_2_holds(folder: Path) -> None:
    recording = Recording.read(folder)
    aggregator = ErrorFeedback(registry.get("qsgd", bits=4))
    with closing(InProcessRanks(3, SHAPES, aggregator, Options())) as ranks:
        step = recording.gradients(folder, 0, 0)
        before = [[part.clone() for part in of_rank] for of_rank in step]
        averages, _ = ranks.average(step)
        after = ranks.residual_mean()
        for place, average in enumerate(averages):
            mean = sum(of_rank[place].double() for of_rank in step) / 3
            torch.testing.assert_close(average.double() + after[place], mean, atol=1e-6, rtol=0)
            for rank in range(3):
                assert torch.equal(step[rank][place], before[rank][place])


def test_bad_methods_points_and_folders_are_named(folder: Path, tmp_path: Path) -> None:
    methods = [
        ("no-such-thing", "unknown codec or aggregator"),
        ("torch-powersgd", "unknown codec or aggregator"),
        ("qsgd:bits=99", "bits"),
        ("qsgd:bitten=4", "bitten"),
        ("qsgd:algorithm=pigeon", "pigeon"),
        ("qsgd:error_feedback=2", "error_feedback"),
        ("topk:density=0", "density"),
    ]
    alone = tmp_path / "alone"
    alone.mkdir()
    made = Recording("gpt", {}, 0, 1, (0,), 1, SHAPES, {})
    save(made.file(alone, 0, 0), [torch.ones(made.numel)])
    made.write(alone)
    refused(
        lambda given: list(error.run(*given)),
        [
            *((([folder], ["qsgd", name]), f"(?=.*method {name!r}).*{told}")
              for name, told in methods),
            (([folder], None, None, [7]), r"--at 7: .* has the points 0, 50"),
            ((), "gradwire bench record"),
            (([tmp_path / "nowhere"],), "gradwire bench record"),
            (([alone],), "1 rank"),
        ],
    )  # fmt: skip


def test_what_is_averaged(folder: Path) -> None:
    (row,) = error.run([folder], ["none:error_feedback=false"], at=[0])
    assert row["nmse"] < 1e-13
    assert row["cosine"] == pytest.approx(1)
    assert row["input_bits"] == row["packed_bits"] == 32
    # 2 (N - 1) / N of 1320 fp32 values, and headers
    assert 4 * 1320 * 4 / 3 < row["wire_bytes"] < 1.2 * 4 * 1320 * 4 / 3
    # State starts fresh at each point.
    method = ["powersgd:rank=1:error_feedback=true"]
    both = list(error.run([folder], method))
    (second,) = error.run([folder], method, at=[50])
    assert [row["at"] for row in both] == [0, 50]
    assert both[1]["nmse_by_step"] == second["nmse_by_step"]
    # Both kinds unless one is asked for.
    rows = list(error.run([folder], ["qsgd:bits=3", "qsgd:error_feedback=true"], at=[0]))
    found = [(row["method"], row["error_feedback"]) for row in rows]
    assert found == [
        ("qsgd:bits=3", False), ("qsgd:bits=3", True), ("qsgd:error_feedback=true", True)
    ]  # fmt: skip
    # Quick needs no folder.
    rows = list(error.run(quick=True, methods=["qsgd:error_feedback=false"]))
    assert [row["at"] for row in rows] == [0, 8]
    assert all(0.001 < row["nmse"] < 0.2 for row in rows)
