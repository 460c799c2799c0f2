"""From a graph to kernel calls: which rows each task covers, in one table that is made once.

Every encode, merge or decode of a graph becomes one kernel call per codec, dtype and form among its
rows; on target c, Python runs these with one call (see lang/series.py). One table has the rows of
all calls; a call covers a range of rows. A step only fills in addresses and RNG keys, column by
column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from gradwire.engine import HEADER_BYTES, Graph, Kind
from gradwire.lang import ROW, layout, rng
from gradwire.partition import Partition, Spec

# Phases of the RNG key: encoding own values, the sum of all ranks, a partial sum; and the random
# numbers that all ranks share. Where codecs redraw, origins take the place of phases.
_PHASES = np.array([[0], [1], [2], [0]], dtype="u8")
_SHARED = 3


class Step(NamedTuple):
    """One step's memory and random numbers; one entry per item.

    Attributes:
        values, residuals: addresses; 0 for no residual.
        homes: base addresses, like `values`, for the chunk that this rank owns.
        keys, shared, steps: the parts of RNG keys.
    """

    values: np.ndarray
    residuals: np.ndarray
    homes: np.ndarray
    keys: np.ndarray
    shared: np.ndarray
    steps: np.ndarray


_ADDRESSES = 3  # the first columns of a Step


@dataclass(frozen=True)
class Calls:
    """The kernel calls of a graph, and the rows of their table, as columns.

    Attributes:
        of: per task, its calls.
        kernel: per call, the index of its codec and dtype among the partition's kinds.
        form: per call, its form, as in `gradwire.lang.forms.FORMS`.
        first, last: per call, its rows of the table, [first, last).
        rows: the table, of dtype `lang.ROW`, without the numbers that a step adds.
        terms: per row and column, the index of the step's number (see `table`) that is added.
        redraw: the rows whose codec redraws (see `Layout`); the key of such a row is that of its
            payload's origin, on the rank that encodes it and on those that decode it.
        origin: of the payloads of these rows.
        summed: per task, the origins of the payloads that it sums; empty if no codec redraws.
    """

    of: Sequence[range]
    kernel: Sequence[int]
    form: Sequence[str]
    first: Sequence[int]
    last: Sequence[int]
    rows: np.ndarray
    terms: np.ndarray
    redraw: np.ndarray
    origin: np.ndarray
    summed: Sequence[Sequence[int]]

    def forms(self, kernels: int) -> list[list[str]]:
        """The forms that each of `kernels` kernels runs, by kernel index."""
        found: list[list[str]] = [[] for _ in range(kernels)]
        for kernel, form in dict.fromkeys(zip(self.kernel, self.form, strict=True)):
            found[kernel].append(form)
        return found

    def table(self, step: Step, arena: int) -> np.ndarray:
        """The table of one step, of dtype `lang.ROW`; `arena` is the address of the messages.

        A rank that encodes values more than once, in sums of more and more ranks, draws different
        random numbers each time; but the numbers that all ranks share stay the same, so that the
        same values are picked from every contribution and from sums.
        """
        keys = rng.step_keys(np.stack([step.keys] * _SHARED + [step.shared]), step.steps, _PHASES)
        end = np.array([arena, 0], dtype="u8")
        numbers = np.concatenate([*step[:_ADDRESSES], keys.reshape(-1), end])
        table: np.ndarray = self.rows.view("u8") + numbers[self.terms.view("i8")]
        rows = table.view(ROW)
        if len(self.redraw):
            rows["key"][self.redraw] = rng.origin_keys(rows["shared"][self.redraw], self.origin)
        return rows


def kernel_calls(
    graph: Graph,
    cut: Partition,
    specs: Sequence[Spec],
    offsets: Sequence[int],
    rank: int,
    batched: bool = True,
) -> Calls:
    """The calls of a graph's kernels.

    Args:
        specs: of the partitioned tensors.
        offsets: offset of each buffer's message in the arena, in bytes.
        rank: of the graph.
        batched: one call for all rows of a task, codec, dtype and form; else one call per row.
    """
    kernels = [task for task, peer in enumerate(graph.peer) if peer < 0]
    # For each message that a kernel covers: index of the kernel, message, what its rows share.
    covered: list[tuple[int, int, int, int, int, bool, int]] = []
    for place, task in enumerate(kernels):
        merges = graph.kind[task] is Kind.MERGE
        sources = graph.reads[task] if merges else ()
        phase = 0 if not merges else 1 if graph.final[task] else 2
        for place_in, buffer in enumerate(covered_messages(graph, task)):
            source = offsets[sources[place_in]] if sources else 0
            message = graph.buffer_chunk[buffer] * len(cut.sizes) + graph.buffer_segment[buffer]
            encodes = bool(graph.writes[task])
            assert not encodes or graph.buffer_source[buffer] == rank, (
                f"{graph.describe(task)}: fills a buffer whose source is another rank"
            )
            of_message = offsets[buffer], source, phase, encodes, graph.origin(buffer)
            covered.append((place, message, *of_message))
    columns = np.array(covered, dtype="i8").reshape(-1, 7)
    messages = columns[:, 1]
    rows = cut.first[messages + 1] - cut.first[messages]
    ends = rows.cumsum()
    row = np.arange(ends[-1] if len(ends) else 0) + np.repeat(
        cut.first[messages] - ends + rows, rows
    )
    place, _, payload, source, phase, encodes, origin = np.repeat(columns, rows, axis=0).T

    # Sort by kernel and form; within a call, rows keep the order of their messages.
    feedback = np.array([spec.feedback for spec in specs], dtype="i8")
    kind = cut.kind[row] * 2 + encodes * feedback[cut.item[row]]
    order = (place * 2 * len(cut.kinds) + kind).argsort(kind="stable")
    row, place, kind = row[order], place[order], kind[order]
    payload, source, phase, origin = (x[order] for x in (payload, source, phase, origin))
    begins = np.ones(len(row), dtype=bool)
    if batched:
        begins[1:] = (np.diff(place) != 0) | (np.diff(kind) != 0)
    first = begins.nonzero()[0]

    of = [range(0)] * len(graph)
    counts = np.bincount(place[first], minlength=len(kernels)).tolist()
    for task, (begin, end) in zip(kernels, pairwise(accumulate(counts, initial=0)), strict=True):
        of[task] = range(begin, end)
    item, start, inside = cut.item[row], cut.start[row], cut.offset[row] + HEADER_BYTES
    at = cut.at[row]
    itemsize = np.array([spec.dtype.itemsize for spec in specs], dtype="i8")
    count, home, feeds = len(specs), cut.chunk[row] % cut.chunks == rank, feedback[item]
    arena = (_ADDRESSES + len(_PHASES)) * count  # index of the arena; a zero follows it
    table = np.zeros(len(row), dtype=ROW)
    table["numel"], table["start"] = cut.numel[row], start
    table["values"], table["residual"] = at * itemsize[item], start * 4 * feeds
    table["payload"], table["source"] = payload + inside, source + inside
    terms = np.full((len(row), len(ROW.names or ())), arena + 1, dtype="i8").view(ROW)[:, 0]
    terms["values"] = item + 2 * count * home
    terms["residual"] = np.where(feeds, count + item, arena + 1)
    terms["payload"] = terms["source"] = arena
    terms["key"] = (_ADDRESSES + phase) * count + item
    terms["shared"] = (_ADDRESSES + _SHARED) * count + item
    redraws = np.array([layout(*kind).redraws for kind in cut.kinds], dtype=bool)
    redraw = redraws[cut.kind[row]].nonzero()[0]
    return Calls(
        of=of,
        kernel=(kind[first] // 2).tolist(),
        form=[
            form(graph, kernels[place], bool(kind % 2))
            for place, kind in zip(place[first].tolist(), kind[first].tolist(), strict=True)
        ],
        first=first.tolist(),
        last=[*first[1:].tolist(), len(row)][: len(first)],
        rows=table,
        terms=terms,
        redraw=redraw,
        origin=origin[redraw],
        summed=[summed(graph, task) for task in range(len(graph))] if len(redraw) else (),
    )


def covered_messages(graph: Graph, task: int) -> tuple[int, ...]:
    """The messages whose rows a kernel's table has; messages of one chunk differ in offset only."""
    reads = graph.reads[task]
    if graph.writes[task] or graph.kind[task] is not Kind.MERGE:
        return graph.writes[task] or reads
    return reads[: graph.width(task)]


def summed(graph: Graph, task: int) -> list[int]:
    """The origins of the payloads that a task sums, one per peer."""
    if graph.kind[task] is not Kind.MERGE:
        return []
    return [graph.origin(buffer) for buffer in graph.reads[task][:: max(graph.width(task), 1)]]


def form(graph: Graph, task: int, feedback: bool) -> str:
    """The form that a task runs on rows, with or without a residual."""
    kind = graph.kind[task]
    if kind is Kind.DECODE:
        return "decode"
    if not graph.writes[task]:
        return "decode_sum"
    return ("encode" if kind is Kind.ENCODE else "reduce_encode") + ("_ef" if feedback else "")
