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


@dataclass(frozen=True)
class Recording:
    """The contents of a manifest.

    Attributes:
        task, task_options, seed: what was trained.
        ranks: whose gradients are recorded.
        at: the points: the step of each at which recording begins.
        steps: consecutive steps recorded at each point.
        parameters: (name, shape) of each, in order.
        run: provenance; see `bench.provenance`.
    """

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

    def file(self, folder: Path, at: int, step: int) -> Path:
        return folder / f"at-{at:05d}-step-{step}.npy"

    def write(self, folder: Path) -> None:
        """Write the manifest."""
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1)
        (folder / MANIFEST).write_text(text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """The manifest of a folder, whose files are there with the right shapes.

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
            made = cls._made(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{file} is not a manifest of recorded gradients ({error!r}): record anew"
            ) from error
        for at in made.at:
            for step in range(made.steps):
                made._open(folder, at, step)
        return made

    @classmethod
    def _made(cls, fields: dict[str, Any]) -> Recording:
        if fields.pop("version") != VERSION:
            raise ValueError(f"its version is not {VERSION}")
        parameters = tuple((str(name), tuple(map(int, shape))) for name, shape in fields.pop(
            "parameters"
        ))  # fmt: skip
        at = tuple(map(int, fields.pop("at")))
        made = cls(at=at, parameters=parameters, **fields)
        if made.ranks < 1 or made.steps < 1 or not at or not parameters:
            raise ValueError("it has no ranks, steps, points or parameters")
        return made

    def gradients(self, folder: Path, at: int, step: int) -> list[list[torch.Tensor]]:
        """The gradients of every rank in one step, per parameter, in their shapes; copies.

        Raises:
            ConfigError: as `read`.
        """
        values = torch.from_numpy(np.array(self._open(folder, at, step)))
        lengths = [math.prod(shape) for _, shape in self.parameters]
        return [
            [
                part.view(shape)
                for part, (_, shape) in zip(row.split(lengths), self.parameters, strict=True)
            ]
            for row in values
        ]

    def _open(self, folder: Path, at: int, step: int) -> np.ndarray:
        file = self.file(folder, at, step)
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


def save(file: Path, ranks: Sequence[torch.Tensor]) -> None:
    """Write one step: a vector per rank.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        np.save(file, np.stack([values.numpy() for values in ranks]))
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror})") from error
