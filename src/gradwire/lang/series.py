"""Series: kernel calls of several codecs and forms; those on target c become one call from Python.

A series is prepared once for tables that differ only in addresses and keys, and bound to a table
for each use. A range of its calls then costs one call from Python for all kernel calls on target c,
whatever their codecs, and one per kernel call on other targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradwire.errors import ConfigError
from gradwire.lang import native
from gradwire.lang.kernels import Kernels, check_form, compiler_needed
from gradwire.lang.rows import ROW, check_distances, check_table, check_workspace

if TYPE_CHECKING:
    from gradwire.lang import gpu

# One kernel call; emit/series.c declares the same 64 bytes.
ENTRY = np.dtype(
    [
        ("form", "<u8"),  # address of the function
        ("rows", "<u8"),
        ("n", "<i8"),
        ("distances", "<u8"),
        ("workspace", "<u8"),
        ("table", "<u8"),
        ("ranks", "<i4"),
        ("rank", "<i4"),
        ("threads", "<i4"),
        ("factor", "<f4"),
    ]
)
assert ENTRY.itemsize == 64


@dataclass(frozen=True)
class KernelCall:
    """One kernel call of a series.

    Attributes:
        kernels, form: the kernel.
        first, last: its rows of the table, [first, last).
        ranks, rank, mark: as in `Kernels.run`.
        scaled: whether its factor is that of the series; else it is 1.
    """

    kernels: Kernels
    form: str
    first: int
    last: int
    ranks: int = 1
    rank: int = 0
    scaled: bool = False
    mark: gpu.Mark | None = None


class Series:
    """Kernel calls, prepared.

    Args:
        calls: in the order of their numbers.
        numels: int64, of each row of the table.
        threads: as in `Call`.
        together: False makes one call from Python per kernel call, on target c too.

    Raises:
        ConfigError: a form is unknown, or could not be compiled; a call's rows, rank or threads
            do not exist.

    Attributes:
        rows: number of rows of the table.
        workspace_nbytes: the most that a call needs; the calls share the workspace.
        native, others: indices of the calls on target c, and of those on other targets.
        before: before[i] is the number of `native` calls among the first i calls.
        entries: ENTRY per `native` call, without the parts that depend on the table.
        scaled: per `native` call, `KernelCall.scaled`.
        distances: per call, how many numbers it reads of `distances`, see `Call`.
        runner: runs entries; None if there are none.
    """

    def __init__(
        self,
        calls: Sequence[KernelCall],
        numels: np.ndarray,
        threads: int = 1,
        together: bool = True,
    ) -> None:
        self.calls = tuple(calls)
        self.threads = threads
        self.together = together
        self.rows = len(numels)
        for call in calls:
            check_form(call.form)
            inside = 0 <= call.first < call.last <= self.rows and -1 <= call.rank < call.ranks
            if not inside or threads < 1:
                raise ConfigError(f"{call}, of {self.rows} rows, threads={threads}: no such call")
        self.distances = [
            (call.ranks - (call.rank >= 0)) * (1 + call.kernels.layout.redraws) for call in calls
        ]
        self.workspace_nbytes = max(
            (
                call.kernels.workspace_nbytes(numels[call.first : call.last], threads, call.ranks)
                for call in calls
            ),
            default=0,
        )
        self.native = [n for n, call in enumerate(calls) if call.kernels.library is not None]
        self.others = [n for n, call in enumerate(calls) if call.kernels.library is None]
        self.before = np.searchsorted(self.native, range(len(calls) + 1)).tolist()
        own = [self.calls[number] for number in self.native]
        self.entries = entries = np.zeros(len(own), ENTRY)
        with compiler_needed():
            self.runner = native.runner() if own else None
            for entry, call in zip(entries, own, strict=True):
                library = call.kernels.library
                assert library is not None
                entry["form"], entry["table"] = library.address(call.form), library.table
        entries["rows"] = [call.first * ROW.itemsize for call in own]
        entries["n"] = [call.last - call.first for call in own]
        entries["ranks"] = [call.ranks for call in own]
        entries["rank"] = [call.rank for call in own]
        entries["threads"] = threads
        self.scaled = np.array([call.scaled for call in own], dtype=bool)

    def bind(self, rows: np.ndarray, workspace: torch.Tensor, factor: float = 1.0) -> BoundSeries:
        """The series on a table, which may still change in place.

        Args:
            rows: C-contiguous, of dtype `ROW`, with the numels that the series was prepared for.
                It must outlive all calls, and so must the memory that it points to.
            workspace: uint8[workspace_nbytes] or more.
            factor: of the scaled calls.

        Raises:
            ConfigError: the table or the workspace is not so.
        """
        return BoundSeries(self, rows, workspace, factor)


class BoundSeries:
    """A series on one table. Its calls share the workspace, so they must not run concurrently."""

    def __init__(
        self, series: Series, rows: np.ndarray, workspace: torch.Tensor, factor: float
    ) -> None:
        check_table(rows)
        if rows.size != series.rows:
            raise ConfigError(f"rows: a table of {rows.size}; the series is of {series.rows}")
        check_workspace(workspace, series.workspace_nbytes)
        self._series = series
        self._rows = rows
        self._workspace = workspace
        self._factor = factor
        self._entries = entries = series.entries.copy()
        entries["rows"] += np.uint64(rows.ctypes.data)
        entries["workspace"] = workspace.data_ptr()
        entries["factor"] = np.where(series.scaled, factor, 1.0)
        self._at: int = entries.ctypes.data

    def run(self, first: int, last: int, distances: np.ndarray | None = None) -> int:
        """Run the calls [first, last), those on target c before the others.

        Args:
            distances: as in `Call`; the same for all these calls.

        Returns:
            The number of calls made from Python.

        Raises:
            CodecError: a malformed payload; the message names the form and the row, counted from
                the call's first. Later calls are not made. With a mark, the mark raises it.
            ConfigError: there are too few distances.
        """
        series = self._series
        read = max(series.distances[first:last], default=0)
        check_distances(distances, read)
        begin, end = series.before[first], series.before[last]
        if begin < end and distances is not None:
            self._entries["distances"][begin:end] = distances.ctypes.data
        step = max(1, end - begin) if series.together else 1
        made = 0
        for entry in range(begin, end, step):
            self._run_entries(entry, step)
            made += 1
        for number in series.others[first - begin : last - end]:
            self._run_alone(series.calls[number], distances)
            made += 1
        return made

    def _run_entries(self, first: int, count: int) -> None:
        series = self._series
        assert series.runner is not None
        failed = series.runner(self._at + first * ENTRY.itemsize, count)
        if failed:
            call = series.calls[series.native[first + (failed >> 32)]]
            raise native.malformed((failed & 0xFFFFFFFF) - 1, call.form, call.kernels.codec)

    def _run_alone(self, call: KernelCall, distances: np.ndarray | None) -> None:
        call.kernels.run(
            call.form,
            self._rows[call.first : call.last],
            ranks=call.ranks,
            rank=call.rank,
            distances=distances,
            factor=self._factor if call.scaled else 1.0,
            threads=self._series.threads,
            workspace=self._workspace,
            mark=call.mark,
        )
