"""`bench record`: gradients of real training, on disk; and what is wrong with a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.bench import record, tasks
from gradwire.bench.recording import MANIFEST, Recording
from gradwire.errors import ConfigError

SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 1, "width": 16, "heads": 2, "context": 16},
    "image": {"data": "digits", "channels": 4, "hidden": 16, "images": 4},
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


def _no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def _no_json(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


def _other_version(folder: Path) -> None:
    fields = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**fields, "version": 2}))


def _lacks_a_field(folder: Path) -> None:
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["ranks"]
    (folder / MANIFEST).write_text(json.dumps(fields))


def _truncated(folder: Path) -> None:
    file = folder / "at-00003-step-1.npy"
    file.write_bytes(file.read_bytes()[:-100])


def _no_header(folder: Path) -> None:
    (folder / "at-00003-step-1.npy").write_bytes(b"")


def _missing(folder: Path) -> None:
    (folder / "at-00003-step-1.npy").unlink()


def _unlike_shape(folder: Path) -> None:
    np.save(folder / "at-00003-step-1.npy", np.zeros((2, 7), np.float32))


def _unlike_dtype(folder: Path) -> None:
    file = folder / "at-00003-step-1.npy"
    np.save(file, np.load(file).astype(np.float64))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_no_manifest, "gradwire bench record"),
        (_no_json, "is not JSON"),
        (_other_version, "version is not 1"),
        (_lacks_a_field, "ranks"),
        (_truncated, "at-00003-step-1.npy is truncated"),
        (_no_header, "at-00003-step-1.npy is truncated"),
        (_missing, "at-00003-step-1.npy cannot be read"),
        (_unlike_shape, r"float32 values of shape \(2, 7\)"),
        (_unlike_dtype, "float64 values"),
    ],
)
def test_a_spoilt_folder_is_refused(spoil: Any, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    recorded(folder)
    Recording.read(folder)
    spoil(folder)
    with pytest.raises(ConfigError, match=said):
        Recording.read(folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
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
    ],
)
def test_bad_arguments_leave_no_folder(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"task": "gpt", "at": (0, 3), "steps": 2, "ranks": 2, **arguments}
    options = SMALL.get(given["task"])
    with pytest.raises(ConfigError, match=said):
        list(record.run(tmp_path / "made", task_options=options, **given))
    assert not (tmp_path / "made").exists()


def test_a_folder_is_recorded_once(tmp_path: Path) -> None:
    recorded(tmp_path / "made")
    with pytest.raises(ConfigError, match=f"has a {MANIFEST}"):
        recorded(tmp_path / "made")


def test_an_unfinished_recording_has_no_manifest(tmp_path: Path) -> None:
    rows = record.run(tmp_path / "made", "gpt", (0, 3), 2, 2, task_options=SMALL["gpt"])
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="cannot be read"):
        Recording.read(tmp_path / "made")
