"""Placement: the offset of every message of a graph in its arena."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gradwire.engine import Graph, Kind
from gradwire.engine.message import align

# Messages of at least this size are read in the sender's memory. For smaller ones, a copy through a
# ring, which stays in cache, costs less than giving back a loan.
BORROWED_BYTES = 1 << 18


def borrowed(graph: Graph, nbytes: Sequence[int], lenders: frozenset[int]) -> list[bool]:
    """Per buffer, whether its message can be read in the sender's memory: it is large, only kernels
    read it, and a decode reads no other message with it.

    The send of such a message ends with its last reader. So a graph whose tasks wait for sends has
    none: a merge would wait for a message whose sender waits for that merge.
    """
    found = [False] * len(nbytes)
    if any(graph.kind[earlier] is Kind.SEND for after in graph.after for earlier in after):
        return found
    received = [task for task, kind in enumerate(graph.kind) if kind is Kind.RECV]
    mixed = {
        buffer
        for task, kind in enumerate(graph.kind)
        if kind is Kind.DECODE and len({graph.writer[b] for b in graph.reads[task]}) > 1
        for buffer in graph.reads[task]
    }
    kept = mixed.union(graph.sent())
    for task in received:
        message = graph.message(task)
        large = sum(nbytes[buffer] for buffer in message) >= BORROWED_BYTES
        if graph.peer[task] in lenders and large and kept.isdisjoint(message):
            for buffer in message:
                found[buffer] = True
    return found


def place(graph: Graph, nbytes: Sequence[int], elsewhere: Sequence[bool]) -> tuple[list[int], int]:
    """(the offset of each buffer, the size of the arena), in bytes, aligned.

    Buffers of one message are adjacent, in its order, and so are the payloads that a merge sums: a
    GPU's kernels need equal distances. A message that may reuse another's memory does so if it
    fits: some codecs make few values longer. A message that lies `elsewhere` has offset 0.
    """
    offsets = [-1] * len(nbytes)
    end = 0
    reused: list[tuple[tuple[int, ...], int]] = []
    room = {reads[0]: sum(nbytes[b] for b in reads) for reads in graph.reads if reads}
    for task, kind in enumerate(graph.kind):
        message, earlier = graph.message(task), graph.reuses[task]
        if kind is not Kind.RECV:
            continue
        if elsewhere[message[0]]:
            _side_by_side(offsets, message, nbytes, 0)
        elif earlier >= 0 and sum(nbytes[b] for b in message) <= room[earlier]:
            reused.append((message, earlier))
    later = {buffer for message, _ in reused for buffer in message}
    merged = [
        graph.writes[writer]
        for task, kind in enumerate(graph.kind)
        if kind is Kind.MERGE
        for writer in dict.fromkeys(graph.writer[buffer] for buffer in graph.reads[task])
    ]
    moved = [graph.message(task) for task, peer in enumerate(graph.peer) if peer >= 0]
    # The longest first: a message that is forwarded within a longer one has its place there.
    moved = sorted((message for message in moved if len(message) > 1), key=len, reverse=True)
    for buffers in (*merged, *moved, *graph.writes):
        free = [b for b in buffers if offsets[b] < 0 and b not in later]
        end = _side_by_side(offsets, free, nbytes, end)
    for message, earlier in reused:
        assert all(offsets[buffer] < 0 for buffer in message), "a message has one place"
        _side_by_side(offsets, message, nbytes, offsets[earlier])
    for message in moved:
        for buffer, following in pairwise(message):
            assert offsets[following] == offsets[buffer] + align(nbytes[buffer]), "not adjacent"
    return offsets, end


def _side_by_side(
    offsets: list[int], buffers: Sequence[int], nbytes: Sequence[int], at: int
) -> int:
    """Place buffers from `at` on; returns where they end."""
    for buffer in buffers:
        offsets[buffer] = at
        at += align(nbytes[buffer])
    return at
