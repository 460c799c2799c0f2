"""The second half of SRA as a separate collective: every rank ends with every rank's chunk.

Steps, for each segment, on rank r:
  1. encode chunk r; send it to every peer; decode it here too, so that r ends with the same values
     as its peers.
  2. receive chunk p from each peer p; decode it.

Each value is encoded once.

Bytes sent by rank r: the sum of (N-1) * m(s, r) over all segments s. Rounds: 1. Time, for P payload
bytes in total: alpha + (N-1)/N * P * beta.
"""

from __future__ import annotations

from gradwire.algorithms.halves import peers_after, receive
from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph

ROLES = ("result",)


def chunks(world_size: int) -> int:
    return world_size


def rounds(world_size: int) -> int:
    return 1 if world_size > 1 else 0


def build(rank: int, world_size: int, sizes: Sizes) -> Graph:
    """The graph of `rank`."""
    owners = range(world_size)
    peers = peers_after(rank, owners)
    graph = Graph(ROLES)
    for s, segment in enumerate(sizes):
        if peers and segment[rank]:
            own = graph.buffer("result", s, rank, rank)
            graph.encode(s, [own])
            for p in peers:
                graph.send(s, own, p)
            graph.decode(s, [own])
    receive(graph, rank, owners, sizes, contributed=False)
    return graph


def hop(role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
    """No message depends on another."""
    return 0


def wire_bytes(rank: int, world_size: int, sizes: Sizes) -> int:
    """Bytes that `rank` sends, headers included."""
    return sum((world_size - 1) * message(segment[rank]) for segment in sizes)


def seconds(world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
    """Expected time; see gradwire.algorithms.protocol."""
    share = (world_size - 1) / world_size
    return rounds(world_size) * alpha + share * payload_bytes * beta
