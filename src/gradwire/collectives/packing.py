"""Messages whose rows have payloads of a length that depends on data.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.engine import HEADER_BYTES, Graph
from gradwire.engine.message import (
    Envelope,
    align,
    check_header,
    check_sum,
    word_sum,
    write_header,
)
from gradwire.errors import CodecError, ConfigError
from gradwire.lang import Layout, layout
from gradwire.lang.layout import COUNT_NBYTES
from gradwire.partition import Partition, row_nbytes

Sizes = tuple[tuple[int, ...], ...]
Count = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Packing:
    """What is known of a message before it is encoded; columns over its rows.

    Attributes:
        begin: offset of each payload in the message, header included.
        most: greatest size of each payload.
        counted: the rows of one codec and dtype whose length depends on data, and (message) ->
            their bytes in use. All others have length `most`; without any, there is no table.
    """

    begin: np.ndarray
    most: np.ndarray
    counted: Sequence[tuple[np.ndarray, Count]]

    @property
    def table_bytes(self) -> int:
        return align(4 * len(self.most)) if self.counted else 0

    def used(self, message: np.ndarray) -> np.ndarray:
        """int64[rows]: bytes in use of each payload, by the counts of the message (uint8), which
        are not validated."""
        found = self.most.copy()
        for rows, count in self.counted:
            found[rows] = count(message)
        return found

    def parts(self, message: np.ndarray, used: np.ndarray) -> list[np.ndarray]:
        """The parts of the packed message: header, table, and rows; all but the table are views."""
        table = np.zeros(self.table_bytes // 4, "<u4")
        table[: len(used)] = used[: len(table)]
        places = zip(self.begin.tolist(), align(used).tolist(), strict=True)
        rows = (message[begin : begin + nbytes] for begin, nbytes in places)
        return [message[:HEADER_BYTES], table.view("u1"), *rows]

    def seal(self, message: torch.Tensor, envelope: Envelope, version: int) -> np.ndarray:
        """Write the header of an encoded message; returns its bytes in use."""
        used = self.used(message.numpy())
        assert (used <= self.most).all(), "an encode has written more than there is room for"
        total = self._sum(message.numpy(), used) if envelope.checksum else 0
        write_header(message, envelope, int(align(used).sum()), total, version)
        return used

    def check(
        self, message: torch.Tensor, envelope: Envelope, sender: int, packed: bool
    ) -> np.ndarray:
        """The bytes in use of a received message; of a packed one, by its table.

        Raises:
            CodecError: it is not the expected one.
        """
        array, rows, begin = message.numpy(), len(self.most), HEADER_BYTES + self.table_bytes
        table = array[HEADER_BYTES:begin].view("<u4")
        used = table[:rows].astype("i8") if packed and self.counted else self.used(array)
        body = int(align(used).sum())
        expected = check_header(message, envelope, sender, body)
        if (used > self.most).any():
            raise CodecError(f"{envelope.of(sender)}: a payload is longer than it can be")
        if envelope.checksum:
            came = array[HEADER_BYTES : begin + body]
            found = word_sum(came) if packed else self._sum(array, used)
            check_sum(expected, found, envelope, sender)
        if packed and table[rows:].any():
            raise CodecError(f"{envelope.of(sender)}: the padding of its table is not zero")
        return used

    def _sum(self, message: np.ndarray, used: np.ndarray) -> int:
        """The sum of the words of the table and the body."""
        return word_sum(np.concatenate(self.parts(message, used)[1:]))


def packings(graph: Graph, cut: Partition) -> dict[int, Packing]:
    """The packing of each buffer's message; empty if no row's length depends on data."""
    if not any(layout(*kind).data_dependent for kind in cut.kinds):
        return {}  # the fast path: there may be thousands
    places = list(zip(graph.buffer_segment, graph.buffer_chunk, strict=True))
    made = {place: _packing(cut, *place) for place in set(places)}
    return {buffer: made[place] for buffer, place in enumerate(places)}


def _packing(cut: Partition, segment: int, chunk: int) -> Packing:
    message = chunk * len(cut.sizes) + segment
    rows = slice(cut.first[message], cut.first[message + 1])
    kind, numel, begin = cut.kind[rows], cut.numel[rows], cut.offset[rows] + HEADER_BYTES
    most, counted = np.zeros_like(numel), []
    for number in set(kind.tolist()):
        alike, lay = (kind == number).nonzero()[0], layout(*cut.kinds[number])
        most[alike] = row_nbytes(lay.nbytes, numel[alike])
        if lay.data_dependent:
            counted.append((alike, _count(lay, begin[alike], numel[alike])))
    if counted and most.max() >= 1 << 32:
        raise ConfigError(
            f"a payload of up to {most.max():,} bytes, of a length that depends on data: its "
            "message has 32 bits for the length; use a lower density, or smaller parameters"
        )
    return Packing(begin, most, counted)


def _count(lay: Layout, begin: np.ndarray, numel: np.ndarray) -> Count:
    """(message) -> the bytes in use of payloads of `numel` values that begin at `begin`."""
    offsets = np.array([lay.offsets(n) for n in numel.tolist()])
    blocks = -(-numel // lay.block)
    last = blocks.cumsum() - 1
    first = last + 1 - blocks
    field = next((i for i, f in enumerate(lay.fields) if f.capacity is not None), None)
    selects, size = field is not None, COUNT_NBYTES
    if field is None:  # blocks are kept or not
        flag = next(f.flag for f in lay.fields if f.flag is not None)
        field, size = [f.name for f in lay.fields].index(flag), 1
    at = begin + offsets[:, field]
    counts = [slice(*span) for span in np.stack([at, at + size * blocks], axis=1).tolist()]

    def used(message: np.ndarray) -> np.ndarray:
        side_by_side = np.concatenate([message[span] for span in counts])
        if selects:
            entries = np.add.reduceat(side_by_side.view("<u2"), first, dtype="i8")
        else:
            kept = side_by_side != 0
            entries = np.add.reduceat(kept, first, dtype="i8") * lay.block
            entries -= (blocks * lay.block - numel) * kept[last]  # what the last block lacks
        found: np.ndarray = lay.used_nbytes(offsets[:, -1], entries)
        return found

    return used


def expected(cut: Partition) -> tuple[Sizes, Sizes]:
    """(as `Partition.sizes`, but of the bytes that are expected to travel: the table, and what is
    in use; the table's part of them). Where no row's length depends on data, there is no table."""
    varies, nbytes = np.zeros((2, len(cut.kind)), dtype="i8")
    for number, kind in enumerate(cut.kinds):
        rows, lay = cut.kind == number, layout(*kind)
        varies[rows] = lay.data_dependent
        nbytes[rows] = align(row_nbytes(lay.expected_nbytes, cut.numel[rows]))
    count, varying, bodies = np.zeros((3, len(cut.sizes), len(cut.sizes[0])), dtype="i8")
    for of_messages, of_rows in ((count, 1), (varying, varies), (bodies, nbytes)):
        np.add.at(of_messages, (cut.segment, cut.chunk), of_rows)
    tables = align(4 * count) * (varying > 0)
    sizes, parts = (tuple(map(tuple, of.tolist())) for of in (bodies + tables, tables))
    return sizes, parts
