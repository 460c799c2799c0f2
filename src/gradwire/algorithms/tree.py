"""Tree (CGX 4.1.2): up to a root and down again, in 2 * floor(log2 N) rounds; for small payloads.

N ranks, one chunk: whole payloads travel. The tree is binomial: the parent of rank r > 0 is r
without its lowest bit b, so the subtree of r has the ranks r to r + b - 1. A *partial* is the
encoded sum of a subtree, the *result* is the encoded sum of all ranks.

Steps, for each segment, on rank r:
  1. receive the partial of every child; merge: own values, then the children's in rank order, and
     encode the sum (a leaf encodes its values); send it to the parent. At rank 0 it is the result.
  2. receive the result from the parent; send the payload unchanged to every child, the one with the
     largest subtree first; decode it.

A value is encoded once per level on its way up, at most floor(log2 N) times, then once in the
result. With error feedback each rank keeps the error of its own encoding.

Bytes sent by rank r: (children of r + (1 if r > 0)) * m(s, 0), summed over the segments s.
Rounds: 2 * floor(log2 N). Time, for P payload bytes: 2 * floor(log2 N) * alpha + 2 * ceil(log2 N) *
P * beta, since rank 0 has ceil(log2 N) children, whose payloads share its link.
"""

from __future__ import annotations

from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph

ROLES = ("partial", "result")


def chunks(world_size: int) -> int:
    return 1


def rounds(world_size: int) -> int:
    return 2 * (world_size.bit_length() - 1)


def parent(rank: int) -> int:
    """The parent of a rank other than 0."""
    return rank & (rank - 1)


def children(rank: int, world_size: int) -> list[int]:
    """The children of a rank, in rank order."""
    reach = rank & -rank if rank else world_size
    bits = range((world_size - 1).bit_length())
    return [rank + 2**b for b in bits if 2**b < reach and rank + 2**b < world_size]


def build(rank: int, world_size: int, sizes: Sizes) -> Graph:
    """The graph of `rank`."""
    graph = Graph(ROLES)
    if world_size == 1:
        return graph
    below = children(rank, world_size)
    live = [s for s, segment in enumerate(sizes) if segment[0]]
    for s in live:
        came = [graph.buffer("partial", s, 0, child) for child in below]
        made = graph.buffer("partial" if rank else "result", s, 0, rank)
        for b, child in zip(came, below, strict=True):
            graph.recv(s, b, child)
        if came:
            graph.merge(s, came, [made], own=0, final=not rank)
        else:
            graph.encode(s, [made])
        if rank:
            graph.send(s, made, parent(rank))

    for s in live:
        result = graph.buffer("result", s, 0, 0)
        if rank:
            up = graph.buffer("partial", s, 0, rank)  # the parent has it before it sends a result
            graph.recv(s, result, parent(rank), reuses=up)
        for child in reversed(below):
            graph.send(s, result, child)
        if rank:
            graph.decode(s, [result])
    return graph


def hop(role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
    """On the way up, the levels below the sender; on the way down, all levels and the sender's
    depth."""
    if role == "result":
        return world_size.bit_length() - 1 + sender.bit_count()
    below = min(sender & -sender, world_size - sender)  # ranks at and below the sender
    return below.bit_length() - 1


def wire_bytes(rank: int, world_size: int, sizes: Sizes) -> int:
    """Bytes that `rank` sends, headers included."""
    sent = len(children(rank, world_size)) + (rank > 0)
    return sent * sum(message(segment[0]) for segment in sizes)


def seconds(world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
    """Expected time; see gradwire.algorithms.protocol."""
    payloads = 2 * len(children(0, world_size))
    return rounds(world_size) * alpha + payloads * payload_bytes * beta
