"""`bench record` and `bench error`: gradients of real training, on disk, and what is wrong with a
folder; NMSE, bits and bytes against plain float64 references, on known gradients."""

from __future__ import annotations

import json
import shutil
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
from gradwire.errors import ConfigError
from gradwire_tools.bench import tasks
from gradwire_tools.bench.adapt import record
from gradwire_tools.bench.adapt.in_process import InProcessRanks, bits_of
from gradwire_tools.bench.adapt.record import MANIFEST, Recording
from gradwire_tools.bench.paper import error
from products import exhaustive, one_in

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


Made = tuple[Path, list[dict[str, Any]]]

IMAGE = {"data": "digits", "network": "cnn", "channels": 4, "hidden": 16, "images": 4}


@pytest.mark.parametrize("task", ["gpt", *exhaustive("image")])
def test_gradients_are_those_of_training(task: str, recorded: Made, tmp_path: Path) -> None:
    """A plain loop over big batches has the same weights; each rank's gradient is its own."""
    folder = recorded[0]
    if task == "image":
        folder = tmp_path / "made"
        assert list(record.run(folder, task, (0, 3), 2, 2, task_options=IMAGE))
    found = Recording.read(folder)
    made = tasks.get(task, **found.task_options)
    model = made.model(0)
    optimizer = made.optimizer(model)
    named = dict(model.named_parameters())
    assert [name for name, _ in found.parameters] == list(named)
    for step in range(5):
        mean = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
        for rank in range(2):
            model.zero_grad()
            made.loss(model, made.batch(0, rank, step)).backward()
            at = 0 if step < 2 else 3
            if step != 2:
                stored = found.gradients(at, step - at)[rank]
                for part, p in zip(stored, named.values(), strict=True):
                    torch.testing.assert_close(part, p.grad, rtol=1e-3, atol=1e-6)
            for name, p in named.items():
                assert p.grad is not None
                mean[name] += p.grad / 2
        for name, p in named.items():
            p.grad = mean[name].float()
        factor = made.learning_rate(step)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        optimizer.step()


def test_rows_and_manifest_say_what_was_recorded(recorded: Made) -> None:
    folder, rows = recorded
    found = Recording.read(folder)
    assert [row["at"] for row in rows] == [0, 3]
    for row in rows:
        assert row.keys() == keys_of(row)
        assert row["numel"] == found.numel
        assert row["nbytes"] == 4 * found.numel * 2 * 2
        assert row["run"] == found.run
    assert found.run["commit"]
    norms = []
    for step in range(2):
        ranks = found.gradients(3, step)
        mean = [sum(parts) / 2 for parts in zip(*ranks, strict=True)]
        norms.append(float(torch.cat([part.view(-1) for part in mean]).norm()))
    assert rows[1]["gradient_norm"] == pytest.approx(sum(norms) / 2, rel=1e-5)


def test_averages_are_those_of_ranks_and_steps(recorded: Made) -> None:
    recording = Recording.read(recorded[0])
    found = recording.averages(3)
    parts = [r for step in range(2) for r in recording.gradients(3, step)]
    for i, (name, gradient) in enumerate(found):
        assert name == recording.parameters[i][0]
        expected = torch.stack([part[i] for part in parts]).double().mean(0)
        torch.testing.assert_close(gradient.double(), expected)


def test_a_spoilt_folder_is_refused(recorded: Made, tmp_path: Path) -> None:
    """Every file of a whole folder is spoilt in turn, and mended."""
    folder = shutil.copytree(recorded[0], tmp_path / "made")
    manifest, file = folder / MANIFEST, folder / "at-00003-step-1.npy"
    fields, whole = json.loads(manifest.read_text()), file.read_bytes()
    lacking = {key: value for key, value in fields.items() if key != "ranks"}
    array, of_float64 = np.load(file), tmp_path / "of-float64.npy"
    np.save(of_float64, array.astype(np.float64))
    short = tmp_path / "short.npy"
    np.save(short, array[:, :7])
    for spoilt, content, said in (
        (manifest, None, "gradwire bench record"),
        (manifest, b"{", "is not JSON"),
        (manifest, b"7", "is not a manifest"),
        (manifest, json.dumps({**fields, "version": 2}).encode(), "version is not 1"),
        (manifest, json.dumps(lacking).encode(), "ranks"),
        (file, None, "at-00003-step-1.npy cannot be read"),
        (file, whole[:-100], "at-00003-step-1.npy is truncated"),
        (file, b"", "at-00003-step-1.npy is truncated"),
        (file, short.read_bytes(), r"float32 values of shape \(2, 7\)"),
        (file, of_float64.read_bytes(), "float64 values"),
    ):
        before = spoilt.read_bytes()
        spoilt.unlink() if content is None else spoilt.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            Recording.read(folder)
        spoilt.write_bytes(before)
    Recording.read(folder)


def test_a_folder_is_recorded_once_and_has_a_manifest_at_the_end(
    recorded: Made, tmp_path: Path
) -> None:
    options = {"layers": 1, "width": 16, "heads": 2, "context": 16}
    rows = record.run(tmp_path / "made", "gpt", (0, 3), 2, 2, task_options=options)
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="cannot be read"):
        Recording.read(tmp_path / "made")
    with pytest.raises(ConfigError, match=f"has a {MANIFEST}"):
        list(record.run(recorded[0], "gpt"))
