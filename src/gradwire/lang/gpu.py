"""Target triton: a codec's forms compiled by Triton and launched on the current stream.

One launch covers all rows of a call, whatever their sizes: the table of rows goes to the device
together with how many tiles come before each row, and every program finds its own row there.
Nothing waits for the device: the copy of the table is queued like the kernels behind it, and both
allocators keep the memory until the stream has passed.

With TRITON_INTERPRET=1 Triton interprets the kernels, slowly, and addresses are the host's.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from gradwire.errors import ConfigError
from gradwire.lang import forms, jit
from gradwire.lang.call import Call
from gradwire.lang.codec import Codec
from gradwire.lang.emit import triton, triton_rows
from gradwire.lang.layout import Layout, layout, native_name
from gradwire.lang.rows import ROW

THREADS = 1024  # of a program at most
VALUES_A_THREAD = 16
FIXED = ROW.itemsize // 8  # columns that a table of rows brings along
REDUCED = 1024  # partial results that one pass makes into one
REDUCED_COLUMNS = 8  # reduced side by side


def missing() -> str | None:
    """Why there is no target triton here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not interpreting() and not torch.cuda.is_available():
        return "there is no CUDA or ROCm device, and TRITON_INTERPRET=1 is not set"
    return None


def interpreting() -> bool:
    """Whether Triton was told to interpret kernels on the host."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def source(codec: Codec, dtype: torch.dtype | str = "fp32") -> str:
    """The generated Triton source of the codec's kernels, without the prelude.

    `ConfigError` for a codec with operations that it has no rules for.
    """
    native = native_name(dtype)
    programs = forms.derive(codec, native).programs.values()
    lacking = triton.lacking(programs)
    if lacking:
        raise ConfigError(
            f"target 'triton' has no {', '.join(lacking)} yet, which {codec!r} uses: use target 'c'"
        )
    return triton.emit(programs, layout(codec, native), native)


@functools.cache
def load(text: str) -> ModuleType:
    """The module of a generated source, as a file in the private cache: Triton reads it there."""
    name = f"gradwire_{jit.digest(text)}"
    path = jit.cache_folder() / f"{name}.py"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Tiles:
    """How a call's rows are divided among programs.

    Attributes:
        table: int64[rows, columns]: those of `ROW`, the tiles and the floats of the workspace that
            come before the row. triton_prelude.py names the columns.
        number: of tiles of all rows.
        blocks: of the longest row.
        partials: floats of the workspace for all rows.
    """

    table: np.ndarray
    number: int
    blocks: int
    partials: int


def divide(rows: np.ndarray, layout: Layout) -> Tiles:
    """Tiles of full blocks and, for a ragged last block, one of its own."""
    full, rest = np.divmod(rows["numel"], layout.block)
    group = triton_rows.group(layout)
    tiles = np.cumsum((full + group - 1) // group + (rest > 0))
    partials = np.cumsum((full + (rest > 0) + 1) * layout.partials)
    table = np.zeros((rows.size, FIXED + 2), np.int64)
    table[:, :FIXED] = rows.view(np.int64).reshape(rows.size, FIXED)
    table[1:, -2], table[1:, -1] = tiles[:-1], partials[:-1]
    if not rows.size:
        return Tiles(table, 0, 0, 0)
    return Tiles(table, int(tiles[-1]), int(full.max()) + 1, int(partials[-1]))


class Device:
    """A codec's compiled forms. Raises `ConfigError` where target triton cannot be.

    Attributes:
        device: where the memory of rows lies; of several GPUs, the current one.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype) -> None:
        reason = missing()
        if reason is not None:
            raise ConfigError(f"target 'triton': {reason}; use target 'c' or 'eager' on the CPU")
        self.device = torch.device("cpu" if interpreting() else "cuda")
        self.layout = layout(codec, dtype)
        self.sweeps = load(source(codec, dtype)).SWEEPS
        self.options = options(self.layout, warp=64 if torch.version.hip else 32)
        table = forms.derive(codec, native_name(dtype)).table
        self.numbers = functools.cache(lambda device: torch.tensor(table or (0.0,), device=device))

    def run(self, form: str, rows: np.ndarray, call: Call) -> None:
        """The backend's one method; see `kernels.Backend`."""
        tiles = divide(rows, self.layout)
        if not tiles.number:
            return
        table = self.upload(tiles.table)
        numbers = workspace = self.numbers(table.device)
        if call.workspace is not None:
            workspace = call.workspace[: 4 * tiles.partials].view(torch.float32)
        n = rows.size
        for kernel, completes in self.sweeps[form]:
            kernel[(tiles.number,)](
                table, n, n.bit_length(), call.ranks, call.rank, call.stride, call.factor,
                numbers, workspace, **self.options,
            )  # fmt: skip
            for index, kind in completes:
                self.complete(table, tiles, workspace, index, kind)

    def complete(
        self, table: torch.Tensor, tiles: Tiles, workspace: torch.Tensor, index: int, kind: str
    ) -> None:
        """Reduce what a sweep left for every block to a number a row."""
        from gradwire.lang.emit import triton_prelude

        columns, done = triton_rows.power2(tiles.blocks), 0
        while done == 0 or columns > 1:
            columns = max(1, columns // REDUCED)
            grid = (len(tiles.table), -(-columns // REDUCED_COLUMNS))
            triton_prelude.complete[grid](
                table, workspace, index, done,
                BLOCK=self.layout.block, PARTIAL=self.layout.partials, KIND=kind,
                R=REDUCED, LOG=REDUCED.bit_length() - 1, C=REDUCED_COLUMNS,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
            done += 1

    def upload(self, table: np.ndarray) -> torch.Tensor:
        """The table on the device, queued on the current stream."""
        if self.device.type == "cpu":
            return torch.from_numpy(table)
        # the pinned memory's allocator waits for the copy before it gives the memory out again
        staged = torch.empty(table.shape, dtype=torch.int64, pin_memory=True)
        staged.numpy()[:] = table
        return staged.to(self.device, non_blocking=True)


def options(layout: Layout, warp: int) -> dict[str, Any]:
    """What a sweep is compiled with: no contraction, since targets must agree on every bit."""
    values = triton_rows.group(layout) * triton_rows.power2(layout.block)
    warps = max(4, min(THREADS, values // VALUES_A_THREAD) // warp)
    return {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
