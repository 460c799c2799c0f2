"""Scatter-reduce-allgather, SRA (CGX 4.1.2): the default, with the fewest roundings.

N ranks, N chunks; rank c owns chunk c.

Steps, for each segment, on rank r:
  1. encode every chunk but r's own (one batched kernel); send chunk c to rank c.
  2. receive chunk r from every peer; merge: add them to r's own values in the order of ranks,
     encode the sum, and keep what the payload decodes to, so that r ends with the same values as
     its peers.
  3. send the encoded sum to every peer; receive the encoded sum of chunk p from each peer p;
     decode it.

Each value is encoded twice, whatever N.

Bytes sent by rank r: sum over segments s of [sum over c != r of m(s, c)] + (N-1) * m(s, r), where m
is the payload with its header (0 for an empty one). Rounds: 2. Time, for P payload bytes in total:
2 * alpha + 2 * (N-1)/N * P * beta.
"""

from __future__ import annotations

from gradwire.algorithms.halves import contribute, receive, reduce
from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph

ROLES = ("contribution", "result")


def chunks(world_size: int) -> int:
    return world_size


def rounds(world_size: int) -> int:
    return 2 if world_size > 1 else 0


def build(rank: int, world_size: int, sizes: Sizes) -> Graph:
    """The graph of `rank`."""
    graph = Graph(ROLES)
    if world_size > 1:
        ranks = owners = range(world_size)
        contribute(graph, rank, owners, sizes)
        reduce(graph, rank, ranks, owners, sizes)
        receive(graph, rank, owners, sizes)
    return graph


def hop(role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
    """Contributions first, then results."""
    return ROLES.index(role)


def wire_bytes(rank: int, world_size: int, sizes: Sizes) -> int:
    """Bytes that `rank` sends, headers included."""
    return sum(
        sum(message(n) for c, n in enumerate(segment) if c != rank)
        + (world_size - 1) * message(segment[rank])
        for segment in sizes
    )


def seconds(world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
    """Expected time; see gradwire.algorithms.protocol."""
    share = (world_size - 1) / world_size
    return rounds(world_size) * alpha + 2 * share * payload_bytes * beta
