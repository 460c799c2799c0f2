"""`bench error`: NMSE, bits and bytes against plain float64 references, on known gradients."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_runs import keys_of

from gradwire import algorithms
from gradwire.aggregators import ErrorFeedback, registry
from gradwire.codecs import QSGD, HardThreshold, RandomK, TopK
from gradwire.collectives import Options
from gradwire_tools.bench.adapt.in_process import InProcessRanks, bits_of
from gradwire_tools.bench.adapt.record import Recording
from gradwire_tools.bench.paper import error
from products import one_in

SHAPES = (("a", (40, 30)), ("bias", (17,)), ("b", (8, 5, 3)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks, three steps at two points."""
    where = tmp_path_factory.mktemp("recorded")
    made = Recording(where, "gpt", {}, 0, 3, (0, 50), 3, SHAPES, {"commit": "c0ffee"})
    draw = torch.Generator().manual_seed(7)
    for at in made.at:
        for step in range(made.steps):
            common = torch.randn(made.numel, generator=draw)
            made.save(at, step, [common + torch.randn(made.numel, generator=draw) for _ in "123"])
    made.write()
    return where


def gradients(folder: Path, at: int, name: str) -> np.ndarray:
    """float64 [steps, ranks, values] of one parameter."""
    found = Recording.read(folder)
    place = [one for one, _ in SHAPES].index(name)
    steps = [found.gradients(at, step) for step in range(3)]
    return np.array([[of[place].numpy().ravel() for of in step] for step in steps], np.float64)


def top(values: np.ndarray, density: float) -> np.ndarray:
    """The largest values, and zeros."""
    kept = np.zeros_like(values)
    places = np.argsort(-np.abs(values), kind="stable")[: max(1, int(density * values.size))]
    kept[places] = values[places]
    return kept


def averages(steps: np.ndarray, density: float, feedback: bool) -> tuple[np.ndarray, np.ndarray]:
    """What all-gathered TopK averages, and the mean of what is fed in, in float64: [steps, values].

    Args:
        steps: as `gradients`.
    """
    found, of_fed, residuals = [], [], np.zeros_like(steps[0])
    for step in steps:
        fed = step + residuals
        sent = np.stack([top(one, density) for one in fed])
        found.append(sent.mean(0))
        of_fed.append(fed.mean(0))
        if feedback:
            residuals = fed - sent
    return np.stack(found), np.stack(of_fed)


@pytest.mark.parametrize(("at", "feedback"), [(0, False), (50, True)])
def test_errors_are_those_of_a_float64_reference(folder: Path, at: int, feedback: bool) -> None:
    text = f"topk:density=0.1:values=fp32:algorithm=all_gather:error_feedback={feedback}".lower()
    rows = list(error.run([folder], [text], at=[at], layers=True))
    assert [row["layer"] for row in rows] == [None, "a", "b"]
    assert all(
        row.keys() == keys_of(row) | {"layer"} and row["error_feedback"] is feedback for row in rows
    )
    for row in rows:
        names = ["a", "b"] if row["layer"] is None else [row["layer"]]
        each = [gradients(folder, at, name) for name in names]
        exact = np.concatenate([steps.mean(1) for steps in each], 1)
        both = [averages(steps, 0.1, feedback) for steps in each]
        got, fed = (np.concatenate(parts, 1) for parts in zip(*both, strict=True))
        assert row["numel"] == exact.shape[1]
        for key, mean in (("nmse", exact), ("nmse_of_fed", fed)):
            expected = ((got - mean) ** 2).sum() / (mean**2).sum()
            assert row[key] == pytest.approx(expected, rel=1e-5)
        by_step = ((got - exact) ** 2).sum(1) / (exact**2).sum(1)
        assert row["nmse_by_step"] == pytest.approx(list(by_step), rel=1e-5)
        of_sum = ((got - exact).sum(0) ** 2).sum() / (exact.sum(0) ** 2).sum()
        assert row["nmse_of_sum"] == pytest.approx(of_sum, rel=1e-5)
        lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(exact, axis=1)
        assert row["cosine"] == pytest.approx(((got * exact).sum(1) / lengths).mean(), rel=1e-5)


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


@pytest.mark.parametrize("algorithm", one_in(6, sorted(algorithms.REGISTRY)))
def test_every_algorithm_runs(folder: Path, algorithm: str) -> None:
    rows = list(error.run([folder], ["qsgd:bits=4", "powersgd:rank=1"], algorithm, [0]))
    assert {row["algorithm"] for row in rows} == {algorithm}
    assert all(row["wire_bytes"] > 0 for row in rows)
    assert all(0.8 < row["cosine"] <= 1 for row in rows if row["method"].startswith("qsgd"))


def test_the_ranks_agree_and_law_2_holds(folder: Path) -> None:
    recording = Recording.read(folder)
    aggregator = ErrorFeedback(registry.get("qsgd", bits=4))
    with closing(InProcessRanks(3, SHAPES, aggregator, Options())) as ranks:
        step = recording.gradients(0, 0)
        before = [[part.clone() for part in of_rank] for of_rank in step]
        averages, _ = ranks.average(step)
        after = ranks.residual_mean()
        for place, average in enumerate(averages):
            mean = sum(of_rank[place].double() for of_rank in step) / 3
            torch.testing.assert_close(average.double() + after[place], mean, atol=1e-6, rtol=0)
            for rank in range(3):
                assert torch.equal(step[rank][place], before[rank][place])


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
