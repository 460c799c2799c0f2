"""Packing of messages whose rows have payloads of a length that depends on data.

In memory, the offsets of payloads follow from their greatest sizes; the bytes in use of a payload
are a prefix (lang/layout.py). Packed, a message is

    head   its header, whose length field counts the bytes of the body; and the table: how many
           bytes of each row's payload are in use, uint32, padded to 16 bytes with zeros
    body   these prefixes, one after the other, each padded to 16 bytes

A message is received into its final memory, which therefore has room for the table. The checksum is
the sum of the table and the body. The payload's own counts give the bytes in use; the table repeats
them, so that a receiver finds the rows, and the receiver compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from gradwire.engine import HEADER_BYTES, Graph
from gradwire.engine.message import ALIGNMENT, word_sum
from gradwire.errors import ConfigError
from gradwire.lang import Layout, layout
from gradwire.lang.layout import COUNT_NBYTES
from gradwire.partition import Partition

N = TypeVar("N", int, np.ndarray)
Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Counted:
    """The rows of a message with one codec and dtype, whose counts are summed together.

    Attributes:
        layout: of their payloads.
        rows: their indices among the message's rows.
        known: per row, bytes of the parts of fixed length.
        counts: per row, the slice of the message with its counts, or flags of kept blocks.
        first: per row, the index of its first count among all counts, concatenated.
        last: per row, the index of its last count.
        short: per row, how many values the last block lacks.
    """

    layout: Layout
    rows: np.ndarray
    known: np.ndarray
    counts: Sequence[slice]
    first: np.ndarray
    last: np.ndarray
    short: np.ndarray

    def used(self, message: np.ndarray) -> np.ndarray:
        """int64[rows]: bytes in use of each payload by its counts, which are not validated."""
        side_by_side = np.concatenate([message[at] for at in self.counts])
        if self._selects:
            entries = np.add.reduceat(side_by_side.view("<u2"), self.first, dtype="i8")
        else:
            kept = side_by_side != 0
            entries = np.add.reduceat(kept, self.first, dtype="i8") * self.layout.block
            entries -= self.short * kept[self.last]
        used: np.ndarray = self.layout.used_nbytes(self.known, entries)
        return used

    @property
    def _selects(self) -> bool:
        return any(f.capacity is not None for f in self.layout.fields)


@dataclass(frozen=True)
class Packing:
    """What is known of a message before it is encoded; columns over its rows.

    Attributes:
        begin: offset of each payload in the message, header included.
        most: greatest size of each payload.
        counted: the rows whose length depends on data; all others have length `most`.
    """

    begin: Sequence[int]
    most: np.ndarray
    counted: Sequence[_Counted]

    @property
    def head_bytes(self) -> int:
        """Bytes of a head."""
        return HEADER_BYTES + table_bytes(len(self.most))

    def told(self, message: np.ndarray) -> np.ndarray:
        """int64[rows]: bytes in use of each payload, by the table of a packed message."""
        told = message[HEADER_BYTES : self.head_bytes].view("<u4")
        return told[: len(self.most)].astype("i8")

    def used(self, message: np.ndarray) -> np.ndarray:
        """int64[rows]: bytes in use of each payload, by the counts of the message (uint8)."""
        found = self.most.copy()
        for alike in self.counted:
            found[alike.rows] = alike.used(message)
        return found

    def possible(self, used: np.ndarray) -> bool:
        """Whether no payload exceeds its greatest size."""
        return bool((used <= self.most).all())

    def gather(self, message: np.ndarray, used: np.ndarray, body: np.ndarray) -> None:
        """Write the body of a message."""
        np.concatenate(self._stretches(message, used), out=body)

    def scatter(self, body: np.ndarray, used: np.ndarray, message: np.ndarray) -> None:
        """Copy a body's payloads to their offsets in the message."""
        at = 0
        for stretch in self._stretches(message, used):
            stretch[:] = body[at : at + len(stretch)]
            at += len(stretch)

    def checksum(self, message: np.ndarray, used: np.ndarray) -> int:
        """The checksum of an unpacked message: the sum of its table and body."""
        side_by_side = np.concatenate(self._stretches(message, used))
        return word_sum(table(used)) + word_sum(side_by_side)

    def _stretches(self, message: np.ndarray, used: np.ndarray) -> list[np.ndarray]:
        """The parts of the message in use, with padding, row by row."""
        places = zip(self.begin, padded(used).tolist(), strict=True)
        return [message[begin : begin + nbytes] for begin, nbytes in places]


def table(used: np.ndarray) -> np.ndarray:
    """The table of a head, as uint8."""
    found: np.ndarray = np.zeros(table_bytes(len(used)) // 4, dtype="<u4")
    found[: len(used)] = used
    return found.view("u1")


def table_bytes(rows: N) -> N:
    """Bytes of the table of `rows` rows."""
    return padded(4 * rows)


def padded(used: N) -> N:
    """Bytes of a row in a body: `used`, padded to the alignment."""
    whole: N = -(-used // ALIGNMENT) * ALIGNMENT
    return whole


def packings(graph: Graph, cut: Partition) -> list[Packing | None]:
    """The packing of each buffer's message; None where no row's length depends on data."""
    if not any(layout(*kind).data_dependent for kind in cut.kinds):
        return [None] * len(graph.buffer_role)  # the fast path: there may be thousands
    made: dict[tuple[int, int], Packing | None] = {}
    for place in zip(graph.buffer_segment, graph.buffer_chunk, strict=True):
        if place not in made:
            made[place] = _packing(cut, *place)
    return [made[place] for place in zip(graph.buffer_segment, graph.buffer_chunk, strict=True)]


def _packing(cut: Partition, segment: int, chunk: int) -> Packing | None:
    message = chunk * len(cut.sizes) + segment
    rows = slice(cut.first[message], cut.first[message + 1])
    kind, numel = cut.kind[rows], cut.numel[rows]
    begin = cut.offset[rows] + HEADER_BYTES
    alike = [(layout(*cut.kinds[number]), (kind == number).nonzero()[0]) for number in set(kind)]
    if not any(lay.data_dependent for lay, _ in alike):
        return None
    most = np.zeros(len(kind), dtype="i8")
    for lay, of_kind in alike:
        most[of_kind] = [lay.nbytes(n) for n in numel[of_kind].tolist()]
    if most.max() >= 1 << 32:
        raise ConfigError(
            f"a payload of up to {most.max():,} bytes, of a length that depends on data: its "
            "message has 32 bits for the length; use a lower density, or smaller parameters"
        )
    counted = [
        _counted(lay, of_kind, begin[of_kind], numel[of_kind])
        for lay, of_kind in alike
        if lay.data_dependent
    ]
    return Packing(begin.tolist(), most, counted)


def _counted(lay: Layout, rows: np.ndarray, begin: np.ndarray, numel: np.ndarray) -> _Counted:
    names = [f.name for f in lay.fields]
    counting = next((i for i, f in enumerate(lay.fields) if f.capacity is not None), None)
    size = COUNT_NBYTES
    if counting is None:
        flag = next(f.flag for f in lay.fields if f.flag is not None)
        counting, size = names.index(flag), 1
    offsets = [lay.offsets(n) for n in numel.tolist()]
    blocks = -(-numel // lay.block)
    at = begin + np.array([of_row[counting] for of_row in offsets])
    ends = blocks.cumsum()
    return _Counted(
        layout=lay,
        rows=rows,
        known=np.array([of_row[-1] for of_row in offsets], dtype="i8"),
        counts=[slice(*span) for span in np.stack([at, at + size * blocks], axis=1).tolist()],
        first=ends - blocks,
        last=ends - 1,
        short=blocks * lay.block - numel,
    )


def expected_sizes(cut: Partition) -> Sizes:
    """As `Partition.sizes`, but of the bytes that are expected to travel: the table, and what is in
    use. Equal to `Partition.sizes` where no row's length depends on data.
    """
    return expected(cut)[0]


def expected(cut: Partition) -> tuple[Sizes, Sizes]:
    """(`expected_sizes`, the table's part of them)."""
    used = np.zeros_like(cut.numel)
    varies = np.zeros(len(cut.numel), dtype=bool)
    for number, (codec, dtype) in enumerate(cut.kinds):
        of_kind = (cut.kind == number).nonzero()[0]
        lay = layout(codec, dtype)
        varies[of_kind] = lay.data_dependent
        values, place = np.unique(cut.numel[of_kind], return_inverse=True)
        sizes = [lay.expected_nbytes(n) for n in values.tolist()]
        used[of_kind] = np.array(sizes, dtype="i8")[place]
    rows = np.diff(cut.first)
    tables = table_bytes(rows) * (_sums(varies, cut.first) > 0)
    return _sizes(cut, _sums(padded(used), cut.first) + tables), _sizes(cut, tables)


def _sizes(cut: Partition, messages: np.ndarray) -> Sizes:
    """In the form of `Partition.sizes`."""
    found = messages.reshape(-1, len(cut.sizes)).T.tolist()
    return tuple(map(tuple, found))


def _sums(column: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The sum of `column` over each message's rows."""
    ends = np.concatenate([[0], column.cumsum(dtype="i8")])
    return np.diff(ends[first])
