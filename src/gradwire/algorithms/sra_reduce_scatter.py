"""The first half of SRA as a separate collective: rank c ends with the sum of chunk c.

Steps, for each segment, on rank r:
  1. encode every chunk but r's own (one batched kernel); send chunk c to rank c.
  2. receive chunk r from every peer; merge: add them to r's own values in the order of ranks. The
     sum stays in full precision: no other rank needs it.

Each value is encoded once; the owner's own values are never encoded.

Bytes sent by rank r: the sum of m(s, c) over all segments s and chunks c != r. Rounds: 1. Time, for
P payload bytes in total: alpha + (N-1)/N * P * beta.
"""

from __future__ import annotations

from gradwire.algorithms.halves import contribute, reduce
from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph

ROLES = ("contribution",)


def chunks(world_size: int) -> int:
    return world_size


def rounds(world_size: int) -> int:
    return 1 if world_size > 1 else 0


def build(rank: int, world_size: int, sizes: Sizes) -> Graph:
    """The graph of `rank`."""
    graph = Graph(ROLES)
    if world_size > 1:
        ranks = owners = range(world_size)
        contribute(graph, rank, owners, sizes)
        reduce(graph, rank, ranks, owners, sizes, encode=False)
    return graph


def hop(role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
    """No message depends on another."""
    return 0


def wire_bytes(rank: int, world_size: int, sizes: Sizes) -> int:
    """Bytes that `rank` sends, headers included."""
    return sum(message(n) for segment in sizes for c, n in enumerate(segment) if c != rank)


def seconds(world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
    """Expected time; see gradwire.algorithms.protocol."""
    share = (world_size - 1) / world_size
    return rounds(world_size) * alpha + share * payload_bytes * beta
