"""`bench record`: gradients of real training, on disk; and what is wrong with a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_runs import keys_of

from gradwire.errors import ConfigError
from gradwire_tools.bench import tasks
from gradwire_tools.bench.adapt import record
from gradwire_tools.bench.adapt.record import MANIFEST, Recording
from products import exhaustive

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
