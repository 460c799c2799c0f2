"""Series: kernel calls of several codecs and forms; those on target c become one call from Python.

A series is prepared once for tables that differ only in addresses and keys, and bound to a table
for each use. A range of its calls then costs one call from Python for all kernel calls on target c,
whatever their codecs, and one per kernel call on other targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.errors import ConfigError
from gradwire.lang.call import (
    ROW,
    Kernels,
    Mark,
    check_distances,
    check_form,
    check_table,
    check_workspace,
)
from gradwire.lang.emit import c
from gradwire.lang.kernels import Library, compiler_needed
from gradwire.lang.native import prebuilt

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
    mark: Mark | None = None


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
        native, others: numbers of the calls on target c, and of those on other targets.
        before: before[i] is the number of `native` calls among the first i calls.
        entries: ENTRY per `native` call, without the parts that depend on the table.
        distances: per call, how many numbers it reads of `Call.distances`.
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
            inside = 0 <= call.first < call.last <= len(numels) and -1 <= call.rank < call.ranks
            if not inside or threads < 1:
                raise ConfigError(f"{call}, of {len(numels)} rows, threads={threads}: no such call")
        self.distances = [call.kernels.distances(call.ranks, call.rank) for call in calls]
        needed = (
            call.kernels.workspace_nbytes(numels[call.first : call.last], threads, call.ranks)
            for call in calls
        )
        self.workspace_nbytes = max(needed, default=0)
        self.native = [n for n, call in enumerate(calls) if isinstance(call.kernels, Library)]
        self.others = sorted({*range(len(calls))} - {*self.native})
        self.before = np.searchsorted(self.native, range(len(calls) + 1)).tolist()
        own = [calls[number] for number in self.native]
        self.entries = np.array([_entry(call, threads) for call in own], ENTRY)
        self.run_entries = _runner() if own else None

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
        check_table(rows)
        if rows.size != self.rows:
            raise ConfigError(f"rows: a table of {rows.size}; the series is of {self.rows}")
        check_workspace(workspace, self.workspace_nbytes)
        entries = self.entries.copy()
        entries["rows"] += np.uint64(rows.ctypes.data)
        entries["workspace"] = workspace.data_ptr()
        entries["factor"][entries["factor"] == 0] = factor
        return BoundSeries(self, rows, workspace, factor, entries, entries.ctypes.data)


def _entry(call: KernelCall, threads: int) -> tuple[float, ...]:
    """The entry of a call on target c; its factor is 0 if it will be that of the series."""
    library, factor = call.kernels, 0.0 if call.scaled else 1.0
    assert isinstance(library, Library)
    rows = call.first * ROW.itemsize, call.last - call.first
    arguments = call.ranks, call.rank, threads, factor
    return library.address(call.form), *rows, 0, 0, library.table, *arguments


def _runner() -> Callable[[int, int], int]:
    """The function run_series(entries, count); emit/series.c describes its return value.

    Libraries of prebuilt kernels contain it; otherwise it is compiled. Raises `ConfigError`.
    """
    with compiler_needed():
        (run,) = prebuilt.functions(c.series(), c.SERIES).values()
    return run  # type: ignore[no-any-return]


@dataclass
class BoundSeries:
    """A series on one table. Its calls share the workspace, so they must not run concurrently.

    Attributes:
        entries: of the series, with what depends on the table; at: their address.
    """

    series: Series
    rows: np.ndarray
    workspace: torch.Tensor
    factor: float
    entries: np.ndarray
    at: int

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
        series = self.series
        read = max(series.distances[first:last], default=0)
        check_distances(distances, read)
        begin, end = series.before[first], series.before[last]
        if begin < end and distances is not None:
            self.entries["distances"][begin:end] = distances.ctypes.data
        step = max(1, end - begin) if series.together else 1
        made = 0
        for entry in range(begin, end, step):
            self._run_entries(entry, step)
            made += 1
        for number in series.others[first - begin : last - end]:
            call = series.calls[number]
            factor = self.factor if call.scaled else 1.0
            call.kernels.run(
                call.form, self.rows[call.first : call.last], call.ranks, call.rank, distances,
                factor, series.threads, self.workspace, call.mark,
            )  # fmt: skip
            made += 1
        return made

    def _run_entries(self, first: int, count: int) -> None:
        series = self.series
        assert series.run_entries is not None
        failed = series.run_entries(self.at + first * ENTRY.itemsize, count)
        if failed:
            call = series.calls[series.native[first + (failed >> 32)]]
            assert isinstance(call.kernels, Library)
            raise call.kernels.malformed((failed & 0xFFFFFFFF) - 1, call.form)
