"""`gradwire bench record`: gradients of a real training, for `gradwire bench error`.

It trains a task of `bench train` and stores every rank's gradients of consecutive steps at several
points. Consecutive, since error feedback carries errors from step to step; at several points, since
gradients change as training goes on.

No rank is a process of its own: this one computes the gradients of all ranks in turn, from the
batches that `bench train` gives them, and takes steps with their exact average in fp32. So the
gradients are those of uncompressed data-parallel training.

A row per point: task, at, steps, ranks, numel, loss (mean over ranks and recorded steps),
gradient_norm (L2 norm of the average, mean over recorded steps), nbytes (of its files), seconds
(since the start), output (the folder).

The folder:

    manifest.json          what was recorded, and the provenance of it
    at-00100-step-0.npy    fp32 [ranks, numel]: all ranks' gradients in one step

A rank's row has all parameters, one after the other, in the order of the manifest. The manifest is
written last, so a folder with one is complete.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from gradwire.errors import ConfigError
from gradwire_tools.bench import memory, tasks
from gradwire_tools.bench.progress import progress
from gradwire_tools.bench.provenance import here
from gradwire_tools.bench.rows import Row, row_kind
from gradwire_tools.bench.tasks import Task

KINDS = (
    row_kind(
        "bench record",
        "gradient_norm nbytes",
        "task:text at:count steps:positive ranks:positive numel:count loss:number? "
        "gradient_norm:amount nbytes:count seconds:amount output:text",
    ),
)
MANIFEST = "manifest.json"
VERSION = 1
AT = (0, 100, 400)
QUICK_OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 1, "width": 64, "heads": 4},
    "gpt-32k": {"layers": 1, "width": 64, "heads": 4, "sequences": 1, "vocabulary": 2048},
    "gpt-124m": {"layers": 1, "width": 64, "heads": 4, "sequences": 1, "vocabulary": 2048},
    "image": {"channels": 8, "hidden": 64, "images": 8},
    "image-resnet50": {"channels": 8, "images": 8},
}
_FREE = 1 << 28  # bytes that recording leaves on the disk

Named = list[tuple[str, torch.Tensor]]


def run(
    output: str | Path,
    task: str = "gpt",
    at: Sequence[int] | None = None,
    steps: int | None = None,
    ranks: int = 4,
    seed: int = 0,
    quick: bool = False,
    task_options: dict[str, Any] | None = None,
) -> Iterator[Row]:
    """Record, and yield a row per point.

    Args:
        output: a folder; it is made, and must not have a recording.
        at: steps at which recording begins, ascending; 0, 100, 400, or 0, 8 if `quick`.
        steps: consecutive steps at each; 8, or 4 if `quick`.
        quick: end within 45 seconds on two idle cores: a small model.

    Raises:
        ConfigError: an unknown task, a number out of range, points that overlap, or a folder that
            cannot be written, is not empty, or has too little room.
    """
    options = {**(QUICK_OPTIONS.get(task, {}) if quick else {}), **(task_options or {})}
    made = tasks.get(task, **options)
    points = tuple(at) if at is not None else ((0, 8) if quick else AT)
    steps = steps if steps is not None else (4 if quick else 8)
    _check(points, steps, ranks, seed)
    model = made.model(seed)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    shapes = tuple((name, tuple(p.shape)) for name, p in named)
    found = Recording(Path(output), task, options, seed, ranks, points, steps, shapes, here())
    memory.check(f"--ranks {ranks}", 4 * found.numel * (2 * ranks + 6))
    _make_folder(found.folder, 4 * found.numel * ranks * steps * len(points))
    yield from _points(found, made, model)
    found.write()


@contextmanager
def recordings(
    folders: Sequence[str | Path], at: Sequence[int] | None, quick: bool
) -> Iterator[list[Recording]]:
    """The recordings in these folders; if `quick` and there is none, a tiny one, made and deleted.

    Raises:
        ConfigError: a folder without a complete recording, or without one of the points `at`.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-") as tiny:
        made = quick and not folders
        if made:
            for _ in run(tiny, ranks=2, quick=True):
                pass
        found = [Recording.read(Path(one)) for one in ([tiny] if made else folders)]
        for recording in found:
            for unknown in (one for one in at or () if one not in recording.at):
                where = "the quick recording" if made else recording.folder
                known = ", ".join(map(str, recording.at))
                raise ConfigError(f"--at {unknown}: {where} has the points {known}")
        yield found


def _points(recording: Recording, task: Task, model: nn.Module) -> Iterator[Row]:
    """Train to the end of the last point; a row per point."""
    optimizer = task.optimizer(model)
    model.train()
    begun, end = time.perf_counter(), recording.at[-1] + recording.steps
    told: list[tuple[float, float]] = []  # (loss, norm of the average) of a point's steps
    for step in range(end):
        point = next((at for at in recording.at if at <= step < at + recording.steps), None)
        what = "training" if point is None else f"recording at {point}"
        progress(f"{recording.task}, {what}", step, end)
        ranks, loss = gradients(task, model, recording.seed, recording.ranks, step)
        mean = torch.stack(ranks).mean(0)
        if not mean.isfinite().all():
            raise ConfigError(
                f"--task {recording.task}: the gradient of step {step} is not finite; use another "
                f"--seed than {recording.seed}"
            )
        if point is not None:
            recording.save(point, step - point, ranks)
            told.append((loss, float(mean.double().norm())))
        stepped(task, model, optimizer, mean, step)
        if len(told) == recording.steps:
            losses, norms = zip(*told, strict=True)
            yield {
                "task": recording.task,
                "at": point,
                "steps": recording.steps,
                "ranks": recording.ranks,
                "numel": recording.numel,
                "loss": sum(losses) / len(losses),
                "gradient_norm": sum(norms) / len(norms),
                "nbytes": 4 * recording.numel * recording.ranks * recording.steps,
                "seconds": time.perf_counter() - begun,
                "output": str(recording.folder),
                "run": dict(recording.run),
            }
            told = []
    progress(recording.task, end, end)


def gradients(
    task: Task, model: nn.Module, seed: int, ranks: int, step: int
) -> tuple[list[torch.Tensor], float]:
    """Every rank's gradient of one step, as a vector; the mean of their losses."""
    found, losses = [], 0.0
    parameters = [p for p in model.parameters() if p.requires_grad]
    for rank in range(ranks):
        loss = task.loss(model, task.batch(seed, rank, step, ranks))
        loss.backward()
        losses += loss.item()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        found.append(torch.cat([part.detach().float().reshape(-1) for part in parts]))
        model.zero_grad()
    return found, losses / ranks


def stepped(
    task: Task, model: nn.Module, optimizer: Optimizer, average: torch.Tensor, step: int
) -> None:
    """Take a step with an average of `gradients`."""
    task.set_learning_rate(optimizer, step)
    parameters = [p for p in model.parameters() if p.requires_grad]
    parts = average.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        gradient = torch.empty_like(parameter)  # in the parameter's memory format
        parameter.grad = gradient.copy_(part.view(parameter.shape))
    optimizer.step()
    optimizer.zero_grad()


def _check(at: Sequence[int], steps: int, ranks: int, seed: int) -> None:
    text = ",".join(map(str, at))
    if not at or min(at) < 0:
        raise ConfigError(f"--at {text}: give steps of 0 or more")
    if steps < 1:
        raise ConfigError(f"--steps {steps}: record 1 step or more at each point")
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: use 1 rank or more")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: seeds are 0 or more")
    if seed >= 2**63:
        raise ConfigError(f"--seed {seed}: seeds are below 2^63")
    for before, after in itertools.pairwise(at):
        if after < before + steps:
            raise ConfigError(
                f"--at {text}: with --steps {steps}, the point after {before} is {before + steps} "
                f"or later, not {after}"
            )


def _make_folder(folder: Path, nbytes: int) -> None:
    """Make the folder of a recording of `nbytes`, unless it cannot hold it."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if there != folder:
        if not there.is_dir():
            raise ConfigError(f"--output {folder}: {there} is not a folder")
    elif not folder.is_dir() or any(folder.iterdir()):
        has = f"has a {MANIFEST}" if (folder / MANIFEST).exists() else "is not an empty folder"
        raise ConfigError(f"--output {folder} {has}: give a new folder")
    free = shutil.disk_usage(there).free
    if nbytes > free - _FREE:
        raise ConfigError(
            f"--output {folder}: {nbytes / 2**30:.1f} GiB do not fit into the {free / 2**30:.1f} "
            "GiB that are free: record fewer steps, points or ranks"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / MANIFEST
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written ({error.strerror})") from error


@dataclass(frozen=True, eq=False)
class Recording:
    """A folder, and the contents of its manifest.

    Attributes:
        task, task_options, seed: what was trained.
        ranks: whose gradients are recorded.
        at: the points: the step of each at which recording begins.
        steps: consecutive steps recorded at each point.
        parameters: (name, shape) of each, in order.
        run: provenance; see `bench.provenance`.
    """

    folder: Path
    task: str
    task_options: Mapping[str, Any]
    seed: int
    ranks: int
    at: tuple[int, ...]
    steps: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    run: Mapping[str, Any]

    @property
    def numel(self) -> int:
        """Values of one rank's gradient."""
        return sum(math.prod(shape) for _, shape in self.parameters)

    def file(self, at: int, step: int) -> Path:
        return self.folder / f"at-{at:05d}-step-{step}.npy"

    def save(self, at: int, step: int, ranks: Sequence[torch.Tensor]) -> None:
        """Write one step: a vector per rank.

        Raises:
            ConfigError: the file cannot be written.
        """
        file = self.file(at, step)
        try:
            np.save(file, np.stack([values.numpy() for values in ranks]))
        except OSError as error:
            raise ConfigError(f"{file} cannot be written ({error.strerror})") from error

    def write(self) -> None:
        """Write the manifest."""
        fields = {"version": VERSION, **asdict(self)}
        del fields["folder"]
        (self.folder / MANIFEST).write_text(json.dumps(fields, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """The recording in a folder, whose files are there with the right shapes.

        Raises:
            ConfigError: there is no manifest, it is not one of this version, or a file is missing,
                truncated, or of another shape.
        """
        file = folder / MANIFEST
        try:
            fields = json.loads(file.read_text())
        except OSError as error:
            raise ConfigError(
                f"{folder} has no recorded gradients: {file} cannot be read ({error.strerror}); "
                "make them with: gradwire bench record"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON ({error}): record anew") from error
        try:
            if fields.pop("version") != VERSION:
                raise ValueError(f"its version is not {VERSION}")
            given = [(str(name), tuple(map(int, of))) for name, of in fields.pop("parameters")]
            at = tuple(map(int, fields.pop("at")))
            made = cls(folder, at=at, parameters=tuple(given), **fields)
            if made.ranks < 1 or made.steps < 1 or not at or not given:
                raise ValueError("it has no ranks, steps, points or parameters")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{file} is not a manifest of recorded gradients ({error!r}): record anew"
            ) from error
        for point in made.at:
            for step in range(made.steps):
                made._open(point, step)
        return made

    def gradients(self, at: int, step: int) -> list[list[torch.Tensor]]:
        """The gradients of every rank in one step, per parameter, in their shapes; copies.

        Raises:
            ConfigError: as `read`.
        """
        values = torch.from_numpy(np.array(self._open(at, step)))
        shapes = [shape for _, shape in self.parameters]
        lengths = [math.prod(shape) for shape in shapes]
        return [
            [part.view(shape) for part, shape in zip(row.split(lengths), shapes, strict=True)]
            for row in values
        ]

    def averages(self, at: int) -> Named:
        """The mean over ranks and steps of a point's gradients, by parameter."""
        sums = [torch.zeros(shape, dtype=torch.float64) for _, shape in self.parameters]
        for step in range(self.steps):
            for of_rank in self.gradients(at, step):
                for total, gradient in zip(sums, of_rank, strict=True):
                    total += gradient
        count = self.steps * self.ranks
        names = [name for name, _ in self.parameters]
        return [(name, (total / count).float()) for name, total in zip(names, sums, strict=True)]

    def _open(self, at: int, step: int) -> np.ndarray:
        file = self.file(at, step)
        try:
            found: np.ndarray = np.load(file, mmap_mode="r")
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read ({error.strerror or error}): record anew"
            ) from error
        except (ValueError, EOFError) as error:
            raise ConfigError(f"{file} is truncated or no array ({error}): record anew") from error
        wanted = (self.ranks, self.numel)
        if found.shape != wanted or found.dtype != np.float32:
            raise ConfigError(
                f"{file} has {found.dtype} values of shape {found.shape}; the manifest says "
                f"float32 of shape {wanted} (ranks, values): record anew"
            )
        return found
