"""From a graph to kernel calls: which rows each task covers, in tables that are filled once.

Every encode, merge or decode of a graph becomes one kernel call for each codec and dtype among its
rows. All rows of all calls stand in one table, a call is a stretch of it, and a step only fills in
addresses and RNG keys, column by column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gradwire.engine import HEADER_BYTES, Graph, Kind
from gradwire.lang import ROW, Codec, rng
from gradwire.partition import Row, Spec

_PHASES = 3  # own values alone; the sum of all ranks; a sum of some


@dataclass(frozen=True)
class Call:
    """One kernel call of a task: rows [first, last) of the table.

    Attributes:
        kernel: index among the collective's kernels.
        form: as in `gradwire.lang.forms.FORMS`.
    """

    kernel: int
    form: str
    first: int
    last: int


class Step(NamedTuple):
    """One step's memory and random numbers; one entry an item.

    Attributes:
        values, residuals: addresses; 0 for no residual.
        homes: addresses like `values`, from which the chunk that this rank owns is counted.
        keys, shared, steps: what RNG keys are made of.
    """

    values: np.ndarray
    residuals: np.ndarray
    homes: np.ndarray
    keys: np.ndarray
    shared: np.ndarray
    steps: np.ndarray


class Calls:
    """The kernel calls of a graph.

    Args:
        graph: whose tasks.
        rows: of the partition.
        specs: of the tensors.
        kernel_of: (codec, dtype) -> index of the kernels.
        offsets: where each message starts in the arena, in bytes; borrowed ones lie elsewhere, so
            a step counts them from the arena's start.
        rank: whose calls these are.
        batched: one call for all rows of a task, codec and dtype; else one for each row.

    Attributes:
        of: task -> its calls.
        numel: number of values of each row of the table.
    """

    def __init__(
        self,
        graph: Graph,
        rows: Sequence[Row],
        specs: Sequence[Spec],
        kernel_of: Mapping[tuple[Codec, torch.dtype], int],
        offsets: Mapping[int, int],
        rank: int,
        batched: bool = True,
    ) -> None:
        by_message: dict[tuple[int, int], list[Row]] = {}
        for row in rows:
            by_message.setdefault((row.segment, row.chunk), []).append(row)
        self.of: dict[int, list[Call]] = {}
        placed: list[tuple[Row, int, int, int]] = []  # row, payload, source, phase
        for task in range(len(graph)):
            if graph.peer[task] >= 0:
                continue
            kind, reads = graph.kind[task], graph.reads[task]
            merges = kind is Kind.MERGE
            messages = covered_messages(graph, task)
            source = offsets.get(reads[0], 0) if merges and reads else 0
            phase = 0 if not merges else 1 if graph.final[task] else 2
            covered = [
                (row, m)
                for m in messages
                for row in by_message[graph.buffer_segment[m], graph.buffer_chunk[m]]
            ]
            kinds = [
                (
                    kernel_of[row.codec, specs[row.item].dtype],
                    form(graph, task, specs[row.item].feedback),
                )
                for row, _ in covered
            ]
            calls = self.of[task] = []
            # Stable: within a call, rows keep the order of their messages.
            for i in sorted(range(len(covered)), key=kinds.__getitem__):
                row, message = covered[i]
                inside, at = HEADER_BYTES + row.offset, len(placed)
                if batched and calls and (calls[-1].kernel, calls[-1].form) == kinds[i]:
                    calls[-1] = Call(*kinds[i], calls[-1].first, at + 1)
                else:
                    calls.append(Call(*kinds[i], at, at + 1))
                placed.append((row, offsets.get(message, 0) + inside, source + inside, phase))

        def column(values: list[int], dtype: str = "u8") -> np.ndarray:
            return np.array(values, dtype=dtype)

        self._item = column([row.item for row, *_ in placed], "i8")
        # In bytes, from the start of the item's values, of its residual, and of the arena.
        self._values = column([r.start * specs[r.item].dtype.itemsize for r, *_ in placed])
        self._residual = column([row.start * 4 for row, *_ in placed])
        self._payload = column([payload for _, payload, _, _ in placed])
        self._source = column([source for _, _, source, _ in placed])
        self._phase = column([phase for *_, phase in placed], "i8")
        self._home = np.array([row.chunk == rank for row, *_ in placed], dtype=bool)
        self._table = np.zeros(len(placed), dtype=ROW)
        self._table["numel"] = self.numel = column([row.numel for row, *_ in placed], "i8")
        self._table["start"] = [row.start for row, *_ in placed]

    def forms(self, kernels: int) -> list[list[str]]:
        """What each of so many kernels is to run, in the order of their indices."""
        found: list[dict[str, None]] = [{} for _ in range(kernels)]
        for calls in self.of.values():
            for call in calls:
                found[call.kernel][call.form] = None
        return [list(names) for names in found]

    def table(self, step: Step, arena: int) -> np.ndarray:
        """The table of one step, of dtype `lang.ROW`; messages lie at address `arena`.

        A rank that encodes values more than once, in sums of more and more ranks, draws other
        random numbers each time, but the same of those that all ranks share: what was picked from
        every contribution is picked again.
        """
        item = self._item
        phases = np.array([*range(_PHASES), 0])[:, None]
        keys = rng.step_keys(np.stack([step.keys] * _PHASES + [step.shared]), step.steps, phases)
        rows = self._table.copy()
        values = np.where(self._home, step.homes[item], step.values[item])
        rows["values"] = values + self._values
        residuals = step.residuals[item]
        rows["residual"] = np.where(residuals > 0, residuals + self._residual, 0)
        rows["payload"] = self._payload + np.uint64(arena)
        rows["source"] = self._source + np.uint64(arena)
        rows["shared"] = keys[_PHASES, item]
        rows["key"] = keys[self._phase, item]
        return rows


def covered_messages(graph: Graph, task: int) -> tuple[int, ...]:
    """The messages whose rows a kernel's table has: those of one chunk differ in place alone."""
    reads = graph.reads[task]
    return graph.writes[task] or (reads[:1] if graph.kind[task] is Kind.MERGE else reads)


def form(graph: Graph, task: int, feedback: bool) -> str:
    """The form that a task runs on rows with, or without, a residual."""
    kind = graph.kind[task]
    if kind is Kind.DECODE:
        return "decode"
    if not graph.writes[task]:
        return "decode_sum"
    return ("encode" if kind is Kind.ENCODE else "reduce_encode") + ("_ef" if feedback else "")
