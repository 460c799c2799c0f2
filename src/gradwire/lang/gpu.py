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
from types import ModuleType
from typing import Any

import numpy as np
import torch

from gradwire.errors import CodecError, ConfigError
from gradwire.lang import forms, jit, tiles
from gradwire.lang.call import Call
from gradwire.lang.codec import Codec
from gradwire.lang.emit import triton, triton_rows
from gradwire.lang.layout import Layout, layout, native_name
from gradwire.lang.tiles import COLUMN, Tiles

THREADS = 1024  # of a program at most
VALUES_A_THREAD = 16
REDUCED = 1024  # partial results that one pass makes into one
REDUCED_COLUMNS = 8  # reduced side by side
WARPS = 8  # of a program between sweeps
CHUNK = 4096  # counts of blocks that one step of a scan adds up
BYTES = (24, 16, 8, 0)  # of a key, the highest first: by how much they are shifted


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


def device() -> torch.device:
    """Where target triton's kernels run. Raises `ConfigError` where it cannot be."""
    reason = missing()
    if reason is not None:
        raise ConfigError(f"target 'triton': {reason}; use target 'c' or 'eager' on the CPU")
    return torch.device("cpu" if interpreting() else "cuda")


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


class Device:
    """A codec's compiled forms. Raises `ConfigError` where target triton cannot be.

    Attributes:
        device: where the memory of rows lies; of several GPUs, the current one.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype) -> None:
        self.device = device()
        self.codec = codec
        self.layout = layout(codec, dtype)
        self.steps = load(source(codec, dtype)).STEPS
        self.options = options(self.layout, warp=64 if torch.version.hip else 32)
        derived = forms.derive(codec, native_name(dtype))
        self.statistics = triton_rows.statistics(derived.programs.values())
        table = derived.table or (0.0,)
        self.numbers = functools.cache(lambda device: torch.tensor(table, device=device))
        # given to kernels that read no payload, which never write there
        self.unread = functools.cache(
            lambda device: torch.zeros(1, dtype=torch.int32, device=device)
        )

    def workspace_nbytes(self, numels: np.ndarray, threads: int, ranks: int) -> int:
        """Bytes of scratch memory that a call over rows of these sizes needs."""
        return tiles.workspace_nbytes(self.layout, numels, ranks)

    def run(self, form: str, rows: np.ndarray, call: Call) -> None:
        """The backend's one method; see `kernels.Backend`.

        A payload that no encode makes shows in the call's mark. A call that has none, and reads
        payloads that can be bad, has one of its own, and waits for the device.
        """
        divided = tiles.divide(rows, self.layout, call.ranks, self.statistics)
        if not divided.number:
            return
        failed = call.failed
        own = self.mark() if failed is None and not form.startswith("encode") else None
        if failed is None:
            failed = own.failed if own is not None else self.unread(self.current())
        made = Launches(self, divided, call, failed)
        for step, *arguments in self.steps[form]:
            getattr(made, step)(*arguments)
        if own is not None:
            own.check()

    def mark(self, device: torch.device | None = None) -> Mark | None:
        """A mark of the caller's own on a device; None where no payload can be bad."""
        return Mark(self.codec, device or self.current()) if self.layout.variable else None

    def current(self) -> torch.device:
        """The device that launches go to."""
        if self.device.type == "cpu":
            return self.device
        return torch.device("cuda", torch.cuda.current_device())

    def upload(self, table: np.ndarray) -> torch.Tensor:
        """The table on the device, queued on the current stream."""
        if self.device.type == "cpu":
            return torch.from_numpy(table)
        # the pinned memory's allocator waits for the copy before it gives the memory out again
        staged = torch.empty(table.shape, dtype=torch.int64, pin_memory=True)
        staged.numpy()[:] = table
        return staged.to(self.device, non_blocking=True)


class Mark:
    """Where kernels leave word of payloads that no encode makes, for one caller and no other.

    What such a payload decodes to is not said, but nothing is written out of its bounds.

    Attributes:
        failed: int32[1] on the device: the number of a bad row, counted from 1, or 0.
    """

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self.codec = codec
        # a copy that is waited for: kernels of any stream may write there from now on
        self.failed = torch.zeros(1, dtype=torch.int32).to(device)

    def check(self) -> None:
        """Wait for the current stream, and raise `CodecError` if a payload was bad since the last
        time."""
        self.verdict().check()

    def verdict(self) -> Verdict:
        """What `check` would say at this place of the current stream, for those who do not wait."""
        return Verdict(self.codec, self.failed)


class Verdict:
    """Whether the payloads were good that the current stream has decoded up to here.

    Args:
        codec: of the payloads.
        failed: of a `Mark`. It is kept until the device has come to it.
    """

    def __init__(self, codec: Codec, failed: torch.Tensor) -> None:
        self._codec = codec
        self._failed = failed
        self._found = torch.empty(1, dtype=torch.int32, pin_memory=failed.is_cuda)
        self._found.copy_(failed, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if failed.is_cuda else None

    def known(self) -> bool:
        """Whether the device has come to it; asking does not wait."""
        return self._copied is None or self._copied.query()

    def check(self) -> None:
        """Wait for the device, and raise `CodecError` if a payload was bad."""
        if self._copied is not None:
            self._copied.synchronize()
        number = int(self._found.item())
        if number:
            self._failed.zero_()
            raise CodecError(f"row {number - 1}: a payload that {self._codec!r} never makes")


class Launches:
    """The steps of one call, queued on the current stream; emit/triton.py says what they are."""

    def __init__(self, device: Device, divided: Tiles, call: Call, failed: torch.Tensor) -> None:
        self.device, self.divided, self.call, self.layout = device, divided, call, device.layout
        self.failed = failed
        self.table = device.upload(divided.table)
        self.numbers = device.numbers(self.table.device)
        self.workspace = self.numbers
        if call.workspace is not None:
            self.workspace = call.workspace[: 4 * divided.words].view(torch.float32)
        self.words = self.workspace.view(torch.int32)
        n = len(divided.table)
        self.rows = (self.table, n, n.bit_length())
        self.tile = {"BLOCK": self.layout.block, "GROUP": triton_rows.group(self.layout)}

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Every launch of target triton."""
        kernel[grid](*arguments, **options)

    def common(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """A launch of a kernel that all codecs share."""
        self.launch(kernel, grid, *arguments, **constants, num_warps=WARPS, enable_fp_fusion=False)

    def sweep(self, kernel: Any) -> None:
        """A launch over all tiles."""
        call = self.call
        self.launch(
            kernel, (self.divided.number,), *self.rows, call.ranks, call.rank, call.stride,
            call.factor, self.numbers, self.workspace, self.words, self.failed,
            **self.device.options,
        )  # fmt: skip

    def complete(self, index: int, number: int, kind: str) -> None:
        """Reduce what a sweep left for every block to so many numbers a row, from `index`."""
        from gradwire.lang.emit import triton_reductions

        columns, done = triton_rows.power2(self.divided.blocks), 0
        while done == 0 or columns > 1:
            columns = max(1, columns // REDUCED)
            self.common(
                triton_reductions.complete, (self.rows[1], -(-columns // REDUCED_COLUMNS), number),
                self.table, self.workspace, index, done,
                BLOCK=self.layout.block, PARTIAL=self.layout.partials, KIND=kind,
                R=REDUCED, LOG=REDUCED.bit_length() - 1, C=REDUCED_COLUMNS,
            )  # fmt: skip
            done += 1

    def survey(self, peers: bool) -> None:
        """Count, in received payloads, what comes before every block."""
        from gradwire.lang.emit import triton_selection

        payloads = self.call.ranks - (self.call.rank >= 0) if peers else 1
        flags = any(f.flag is not None for f in self.layout.fields)
        if payloads:
            self.common(
                triton_selection.survey, (self.rows[1], payloads),
                self.table, self.words, self.failed, self.call.stride, int(peers),
                BLOCK=self.layout.block, FLAGS=flags, CHUNK=CHUNK,
            )  # fmt: skip

    def sample(self, index: int, every: int, column: int) -> None:
        """The order statistic of the sample that a sweep left."""
        self.cut(COLUMN[f"size{column}"], every, index)

    def select(self, ranked: bool) -> None:
        """Threshold, ties and entries before every block, of the keys that a sweep left."""
        from gradwire.lang.emit import triton_selection

        if ranked:
            self.cut(COLUMN["capacity"])
        self.common(
            triton_selection.tally, (self.divided.number,), *self.rows, self.words,
            **self.tile, J=triton_rows.power2(self.layout.block),
        )  # fmt: skip
        self.common(
            triton_selection.scan, (self.rows[1],), self.table, self.words,
            BLOCK=self.layout.block, CHUNK=CHUNK,
        )  # fmt: skip

    def cut(self, column: int, every: int = 1, index: int = -1) -> None:
        """The k-th largest key, k in a column of the table; reduction number `index` of a row."""
        from gradwire.lang.emit import triton_selection

        size = triton_rows.group(self.layout) * triton_rows.power2(self.layout.block)
        for shift in BYTES:
            self.common(
                triton_selection.histogram, (self.divided.number,), *self.rows, self.words, shift,
                **self.tile, SIZE=size, EVERY=every,
            )  # fmt: skip
            self.common(
                triton_selection.pick, (self.rows[1],),
                self.table, self.words, self.workspace, shift, column, index,
                BLOCK=self.layout.block, PARTIAL=self.layout.partials, SAMPLE=index >= 0,
            )  # fmt: skip


def options(layout: Layout, warp: int) -> dict[str, Any]:
    """What a sweep is compiled with: no contraction, since targets must agree on every bit."""
    values = triton_rows.group(layout) * triton_rows.power2(layout.block)
    warps = max(4, min(THREADS, values // VALUES_A_THREAD) // warp)
    return {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
