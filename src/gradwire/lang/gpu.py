"""Target triton: a codec's forms, compiled by Triton and launched on the current stream.

A launch covers all rows of a call, whatever their sizes: the table on the device contains, per
row, the number of tiles before it, and every program searches it for its own row. Full tiles and
other ones have kernels of their own, so a sweep is one launch or two. Nothing waits for
the device: the copy of the table is queued before the kernels, and both allocators keep the memory
until the stream has used it.

With TRITON_INTERPRET=1, Triton interprets the kernels slowly, and addresses are host addresses.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

from gradwire.errors import ConfigError
from gradwire.lang import forms, ir, semantics, tiles
from gradwire.lang.call import Call, Kernels, Mark
from gradwire.lang.codec import Codec
from gradwire.lang.emit import triton, triton_rows, triton_views
from gradwire.lang.layout import Layout, native_name
from gradwire.lang.native import cache, jit
from gradwire.lang.tiles import CHUNK, COLUMN, Tiles

THREADS = 1024  # per program, at most
VALUES_PER_THREAD = 32
REDUCED = 1024  # partial results that one pass reduces to one
REDUCED_COLUMNS = 8  # results per program of a pass
WARPS = 8  # per program of the kernels between sweeps
COMMON = {"num_warps": WARPS, "enable_fp_fusion": False}  # compile options of these
DIGITS = 3  # of a key
UNSAMPLED = 2**16  # values of a row up to which all keys are candidates
TALLIED = 4096  # candidates that a program counts at once


def missing() -> str | None:
    """Why target triton is not available here, or None if it is."""
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
    """Where target triton's kernels run. Raises `ConfigError` if it is not available."""
    reason = missing()
    if reason is not None:
        raise ConfigError(f"target 'triton': {reason}; use target 'c' or 'eager' on the CPU")
    return torch.device("cpu" if interpreting() else "cuda")


@functools.cache
def load(text: str) -> ModuleType:
    """The module of a generated source, saved in the private cache, where Triton reads it."""
    name = f"gradwire_{jit.digest(text)}"
    path = cache.folder() / f"{name}.py"
    if not path.is_file() or path.read_bytes() != text.encode():  # none, or cut short by a crash
        cache.tell_of_compiling(path.parent)  # by Triton, when they are launched
        path = cache.put(path, text.encode())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Device(Kernels):
    """A codec's compiled forms. Raises `ConfigError` if target triton is not available."""

    def __init__(self, codec: Codec, dtype: torch.dtype, target: str) -> None:
        self.device = device()
        from gradwire.lang.emit import triton_counts, triton_reductions, triton_selection

        self.complete = triton_reductions.complete
        self.counts, self.selection = triton_counts, triton_selection
        super().__init__(codec, dtype, target)
        self.steps = load(triton.source(codec, dtype)).STEPS
        self.options = options(self.layout, warp=64 if torch.version.hip else 32)
        derived = forms.derive(codec, native_name(dtype))
        self.statistics = triton_rows.statistics(derived.programs.values())
        self.streams = {form: triton_rows.streams(p) for form, p in derived.programs.items()}
        self.numbers = functools.cache(
            lambda form, device: numbers(derived.programs[form], derived.table).to(device)
        )
        # passed to kernels that read no payload; they never write to it
        self.unread = functools.cache(
            lambda device: torch.zeros(1, dtype=torch.int32, device=device)
        )

    def workspace_nbytes(self, numels: np.ndarray, threads: int = 1, ranks: int = 1) -> int:
        return tiles.workspace_nbytes(self.layout, numels, ranks)

    def _run(self, form: str, rows: np.ndarray, call: Call) -> None:
        """A call without a mark makes its own if its payloads can be malformed, and waits for the
        device."""
        ranks = call.ranks
        if ranks == 1 and self.layout.staged and "sum" in form.replace("reduce", "sum"):
            needed = self.workspace_nbytes(rows["numel"], ranks=2)  # with room for a sum
            room = torch.empty(needed, dtype=torch.uint8, device=self.device)
            call, ranks = replace(call, workspace=room), 2
        divided = tiles.divide(
            rows, self.layout, ranks, call.stride, self.statistics, self.streams[form]
        )
        if not divided.number:
            return
        own = self.mark() if call.mark is None and not form.startswith("encode") else None
        mark = call.mark or own
        failed = self.unread(self.current()) if mark is None else mark.failed
        made = Launches(self, form, divided, call, failed)
        for step, *arguments in self.steps[form]:
            getattr(made, step)(*arguments)
        if own is not None:
            own.check()

    def mark(self, device: torch.device | None = None) -> Mark | None:
        return Mark(self.codec, device or self.current()) if self.layout.variable else None

    def current(self) -> torch.device:
        """The device that launches go to."""
        if self.device.type == "cpu":
            return self.device
        return torch.device("cuda", torch.cuda.current_device())

    def upload(self, table: np.ndarray) -> torch.Tensor:
        """Copy the table to the device, queued on the current stream."""
        if self.device.type == "cpu":
            return torch.from_numpy(table)
        # the allocator of pinned memory reuses it only after the copy
        staged = torch.empty(table.shape, dtype=torch.int64, pin_memory=True)
        staged.numpy()[:] = table
        return staged.to(self.device, non_blocking=True)


class Launches:
    """The steps of one call, queued on the current stream; emit/triton.py lists them."""

    def __init__(
        self, device: Device, form: str, divided: Tiles, call: Call, failed: torch.Tensor
    ) -> None:
        self.device, self.divided, self.call, self.layout = device, divided, call, device.layout
        self.counts, self.selection = device.counts, device.selection
        self.failed = failed
        n = len(divided.table)
        self.table, self.origins = self.uploaded()
        self.numbers = device.numbers(form, self.table.device)
        self.workspace = self.numbers
        if call.workspace is not None:
            self.workspace = call.workspace[: 4 * divided.words].view(torch.float32)
        self.words = self.workspace.view(torch.int32)
        self.rows = (self.table, n, n.bit_length())
        self.tile = {"BLOCK": self.layout.block, "GROUP": triton_rows.group(self.layout)}
        self.chunks = divided.blocks // CHUNK + 1  # of the longest row

    def uploaded(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The table on the device, and what is behind it; and, where kernels take it, what
        follows: the payloads' origins."""
        known = [self.divided.table.ravel(), self.divided.behind.ravel()]
        redraws = self.layout.redraws
        origins = self.call.origins if redraws and self.call.payloads else ()
        whole = np.concatenate([*known, np.asarray(origins, np.int64)])
        moved = self.device.upload(whole)
        return moved, (moved[sum(part.size for part in known) :],) if redraws else ()

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch a kernel; every launch of target triton goes through here."""
        kernel[grid](*arguments, **options)

    def common(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch a kernel that all codecs share."""
        self.launch(kernel, grid, *arguments, **constants, **COMMON)

    def sweep(self, full: Any, others: Any) -> None:
        """Launch a sweep: its kernel for full tiles, and the one for the others."""
        self.over(self.divided.full, full)
        self.over(self.divided.number - self.divided.full, others)

    def pack(self, kernel: Any) -> None:
        """Launch the packing of staged codes, shared among as many programs as there are tiles."""
        self.over(self.divided.number, kernel)

    def over(self, tiles: int, kernel: Any) -> None:
        """Launch a generated kernel, if there are tiles for it."""
        if not tiles:
            return
        call = self.call
        self.launch(
            kernel, (tiles,), *self.rows, call.ranks, call.rank, call.stride,
            call.factor, self.numbers, self.workspace, self.words, self.failed,
            *self.origins, **self.device.options,
        )  # fmt: skip

    def complete(self, index: int, number: int) -> None:
        """Sum up a sweep's partial results to `number` results per row, from `index` on."""
        columns, done = triton_rows.power2(self.divided.blocks), 0
        while done == 0 or columns > 1:
            columns = max(1, columns // REDUCED)
            self.common(
                self.device.complete, (self.rows[1], -(-columns // REDUCED_COLUMNS), number),
                self.table, self.workspace, index, done,
                R=REDUCED, LOG=REDUCED.bit_length() - 1, C=REDUCED_COLUMNS,
            )  # fmt: skip
            done += 1

    def survey(self, peers: bool) -> None:
        """Count the entries or kept blocks before every block of received payloads."""
        payloads = self.call.payloads if peers else 1
        flags = any(f.flag is not None for f in self.layout.fields)
        grid = (self.rows[1] * self.chunks, payloads)
        given = (self.call.stride, int(peers), self.chunks)
        if payloads and self.chunks > 1:
            self.common(self.counts.sum_counts, grid, self.table, self.words, *given, FLAGS=flags)
        if payloads:
            self.common(
                self.counts.survey, grid, self.table, self.words, self.failed, *given,
                FLAGS=flags, SINGLE=self.chunks == 1,
            )  # fmt: skip

    def sample(self, index: int, every: int, column: int) -> None:
        """Compute the order statistic of the sample that a sweep stored."""
        k = COLUMN[f"size{column}"]
        self.cut(k, every)
        self.common(self.selection.statistic, (self.rows[1],), self.table, self.words, k, index)

    def select(self, keys: Any, keys_others: Any, *picks: Any) -> None:
        """Find the candidates, the threshold, and the entries before every block.

        Candidates are all keys of short rows, and keys that are not ranked; else a sample of keys
        tells which. Where it has misled, the second sweep sifts a row again.
        """
        ranked = bool(picks)
        sample = ranked and self.divided.blocks * self.layout.block > UNSAMPLED
        if sample:
            self.sweep(*picks)
            per_row = (self.rows[1],), self.table, self.words
            self.common(self.selection.choose, *per_row, BLOCK=self.layout.block)
            self.sweep(keys, keys_others)
        self.sweep(keys, keys_others)
        if ranked:
            self.cut(COLUMN["capacity"])
        piece = triton_views.piece(self.layout)
        part = min(CHUNK, max(1, TALLIED // piece))
        parts = -(-self.divided.blocks // part)
        self.common(
            self.counts.tally, (self.rows[1] * parts,), self.table, self.words, parts,
            PART=part, PIECE=piece, RANKED=ranked,
        )  # fmt: skip
        self.scan()

    def scan(self) -> None:
        """Compute the entries before every block from the counts of a selection."""
        self.common(
            self.counts.scan, (self.rows[1] * self.chunks,), self.table, self.words, self.chunks,
            SINGLE=self.chunks == 1,
        )  # fmt: skip

    def cut(self, column: int, every: int = 0) -> None:
        """Find all but the last digit of the k-th largest key, and count that; k is in a column of
        the table. `every`: of a sample of one per so many values, not of the candidates."""
        size = triton_rows.group(self.layout) * triton_rows.power2(self.layout.block)
        for number in range(DIGITS):
            self.common(
                self.selection.histogram, (self.divided.number,),
                *self.rows, self.words, number, column, **self.tile, SIZE=size, EVERY=every,
            )  # fmt: skip


def numbers(program: ir.Function, table: tuple[float, ...]) -> torch.Tensor:
    """The codec's table, and what a form computes of it alone; at least one number."""
    fixed, known = triton_rows.fixed(program), dict[ir.Node, torch.Tensor]()
    for n in ir.walk(fixed):
        if n.op == "alu":
            known[n] = semantics.ALU[str(n.attr)](*[known[a] for a in n.args])
        else:
            number = table[int(str(n.attr))] if n.op == "param" else n.attr
            known[n] = torch.tensor(number, dtype=semantics.TORCH[n.dtype])
    first = min(fixed.values(), default=len(table))
    held = [*table[:first], *(float(known[n]) for n in fixed)]
    return torch.tensor(held or [0.0], dtype=torch.float32)


def options(layout: Layout, warp: int) -> dict[str, Any]:
    """Compile options of a sweep. No contraction, since targets must agree on every bit."""
    values = triton_rows.group(layout) * triton_rows.power2(layout.block)
    warps = min(THREADS, values // VALUES_PER_THREAD) // warp
    return {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
