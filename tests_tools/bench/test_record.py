"""`bench record`: gradients of real training, on disk; and what is wrong with a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_runs import refused

from gradwire.errors import ConfigError
from gradwire_tools.bench import tasks
from gradwire_tools.bench.adapt import record
from gradwire_tools.bench.adapt.recording import MANIFEST, Recording

SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 1, "width": 16, "heads": 2, "context": 16},
    "image": {"data": "digits", "network": "cnn", "channels": 4, "hidden": 16, "images": 4},
}


def recorded(
    folder: Path, task: str = "gpt", at: tuple[int, ...] = (0, 3), steps: int = 2, ranks: int = 2
) -> list[dict[str, Any]]:
    return list(record.run(folder, task, at, steps, ranks, task_options=SMALL[task]))


@pytest.mark.parametrize("task", ["gpt", "image"])
def test_gradients_are_those_of_training(task: str, tmp_path: Path) -> None:
    """A plain loop over big batches has the same weights; each rank's gradient is its own."""
    rows = recorded(tmp_path / "made", task)
    assert [row["at"] for row in rows] == [0, 3]
    found = Recording.read(tmp_path / "made")
    made = tasks.get(task, **SMALL[task])
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
                stored = found.gradients(tmp_path / "made", at, step - at)[rank]
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


def test_rows_and_manifest_say_what_was_recorded(tmp_path: Path) -> None:
    rows = recorded(tmp_path / "made")
    keys = {
        "task", "at", "steps", "ranks", "numel", "loss", "gradient_norm", "nbytes", "seconds",
        "output", "run",
    }  # fmt: skip
    found = Recording.read(tmp_path / "made")
    for row in rows:
        assert row.keys() == keys
        assert row["numel"] == found.numel
        assert row["nbytes"] == 4 * found.numel * 2 * 2
        assert row["run"] == found.run
    assert found.run["commit"]
    norms = []
    for step in range(2):
        ranks = found.gradients(tmp_path / "made", 3, step)
        mean = [sum(parts) / 2 for parts in zip(*ranks, strict=True)]
        norms.append(float(torch.cat([part.view(-1) for part in mean]).norm()))
    assert rows[1]["gradient_norm"] == pytest.approx(sum(norms) / 2, rel=1e-5)


def test_a_spoilt_folder_is_refused(tmp_path: Path) -> None:
    """Every file of a whole folder is spoilt in turn, and mended."""
    recorded(tmp_path / "made")
    manifest, file = tmp_path / "made" / MANIFEST, tmp_path / "made" / "at-00003-step-1.npy"
    fields, whole = json.loads(manifest.read_text()), file.read_bytes()
    lacking = {key: value for key, value in fields.items() if key != "ranks"}
    for content, said in (
        (None, "gradwire bench record"),
        ("{", "is not JSON"),
        (json.dumps({**fields, "version": 2}), "version is not 1"),
        (json.dumps(lacking), "ranks"),
    ):
        manifest.unlink() if content is None else manifest.write_text(content)
        with pytest.raises(ConfigError, match=said):
            Recording.read(manifest.parent)
    manifest.write_text(json.dumps(fields))
    for values, said in (
        (None, "at-00003-step-1.npy cannot be read"),
        (whole[:-100], "at-00003-step-1.npy is truncated"),
        (b"", "at-00003-step-1.npy is truncated"),
        (np.zeros((2, 7), np.float32), r"float32 values of shape \(2, 7\)"),
        (np.load(file).astype(np.float64), "float64 values"),
    ):
        file.unlink(missing_ok=True)
        if isinstance(values, np.ndarray):
            np.save(file, values)
        elif values is not None:
            file.write_bytes(values)
        with pytest.raises(ConfigError, match=said):
            Recording.read(manifest.parent)
    file.write_bytes(whole)
    Recording.read(manifest.parent)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"task": "poem"}, "unknown task 'poem'"),
    ({"at": ()}, "--at"),
    ({"at": (-1,)}, "--at -1"),
    ({"at": (0, 1)}, "the point after 0 is 2 or later, not 1"),
    ({"at": (3, 0)}, "not 0"),
    ({"steps": 0}, "--steps 0"),
    ({"ranks": 0}, "--ranks 0"),
    ({"ranks": 1 << 40}, "--ranks"),
    ({"steps": 1 << 40, "at": (0,)}, "do not fit"),
    ({"seed": -1}, "--seed -1"),
    ({"seed": 2**63}, r"seeds are below 2\^63"),
]


def test_bad_arguments_leave_no_folder(tmp_path: Path) -> None:
    def make(arguments: dict[str, Any]) -> None:
        given = {"task": "gpt", "at": (0, 3), "steps": 2, "ranks": 2, **arguments}
        list(record.run(tmp_path / "made", task_options=SMALL.get(given["task"]), **given))

    refused(make, WRONG)
    assert not (tmp_path / "made").exists()


def test_a_folder_is_recorded_once_and_has_a_manifest_at_the_end(tmp_path: Path) -> None:
    rows = record.run(tmp_path / "made", "gpt", (0, 3), 2, 2, task_options=SMALL["gpt"])
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="cannot be read"):
        Recording.read(tmp_path / "made")
    recorded(tmp_path / "whole")
    with pytest.raises(ConfigError, match=f"has a {MANIFEST}"):
        recorded(tmp_path / "whole")
