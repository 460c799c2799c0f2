"""A folder of recorded gradients: consecutive steps of all ranks, at several points of a training.

    manifest.json          what was recorded, and the provenance of it
    at-00100-step-0.npy    fp32 [ranks, numel]: all ranks' gradients in one step

A rank's row has all parameters, one after the other, in the order of the manifest. The manifest is
written last, so a folder with one is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire.errors import ConfigError

MANIFEST = "manifest.json"
VERSION = 1

Named = list[tuple[str, torch.Tensor]]


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
