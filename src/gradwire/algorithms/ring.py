"""Ring (CGX 4.1.2): each rank exchanges with two neighbours; the bytes of SRA, more roundings.

N ranks, N chunks; rank c owns chunk c. A *partial* is the encoded sum of some ranks' values, a
*result* is the encoded sum of all.

Steps, for each segment, on rank r, with neighbours r - 1 and r + 1 modulo N:
  1. encode chunk r - 1; send it to r + 1.
  2. for h = 1 .. N-1: receive chunk r - 1 - h from r - 1; merge: add r's own values to it and
     encode the sum; send it to r + 1. The last is chunk r, whose sum is the result.
  3. N-1 times: receive a result from r - 1, decode it, and forward the payload unchanged, unless
     r + 1 owns it.

A value is encoded N times, each time in a larger sum, by another rank. With error feedback each
rank keeps the error of its own encoding.

Bytes sent by rank r: sum over segments s of 2 * [sum over c of m(s, c)] - m(s, r) - m(s, r + 1).
Rounds: 2 (N-1). Time, for P payload bytes in total: 2 (N-1) * (alpha + P/N * beta).
"""

from __future__ import annotations

from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph

ROLES = ("partial", "result")


def chunks(world_size: int) -> int:
    return world_size


def rounds(world_size: int) -> int:
    return 2 * (world_size - 1)


def build(rank: int, world_size: int, sizes: Sizes) -> Graph:
    """The graph of `rank`."""
    graph = Graph(ROLES)
    if world_size == 1:
        return graph
    previous, following = (rank - 1) % world_size, (rank + 1) % world_size

    def each(chunk: int) -> list[int]:
        return [s for s, segment in enumerate(sizes) if segment[chunk]]

    for s in each(previous):
        first = graph.buffer("partial", s, previous, rank)
        graph.encode(s, [first])
        graph.send(s, first, following)

    for hop in range(1, world_size):
        c = (rank - 1 - hop) % world_size
        last = c == rank
        for s in each(c):
            came = graph.buffer("partial", s, c, previous)
            made = graph.buffer("result" if last else "partial", s, c, rank)
            graph.recv(s, came, previous)
            graph.merge(s, [came], [made], own=1, final=last)
            graph.send(s, made, following)

    for hop in range(1, world_size):
        c = (rank - hop) % world_size
        for s in each(c):
            result = graph.buffer("result", s, c, c)
            # The partial that this rank has sent has reached its receiver by then.
            graph.recv(s, result, previous, reuses=graph.buffer("partial", s, c, rank))
            if c != following:
                graph.send(s, result, following)
            graph.decode(s, [result])
    return graph


def hop(role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
    """How far a chunk has travelled round the ring: a partial starts at the rank after its owner,
    and its result continues from the owner."""
    first = chunk if role == "result" else chunk + 1
    before = world_size - 1 if role == "result" else 0
    return before + (sender - first) % world_size


def wire_bytes(rank: int, world_size: int, sizes: Sizes) -> int:
    """Bytes that `rank` sends, headers included."""
    if world_size == 1:
        return 0
    following = (rank + 1) % world_size
    return sum(
        2 * sum(map(message, segment)) - message(segment[rank]) - message(segment[following])
        for segment in sizes
    )


def seconds(world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
    """Expected time; see gradwire.algorithms.protocol."""
    return rounds(world_size) * (alpha + payload_bytes / world_size * beta)
