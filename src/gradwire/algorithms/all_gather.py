"""All-gather of payloads: every rank sends its payload to all others; for sparse payloads.

N ranks, one chunk: whole payloads travel, and no rank encodes a sum.

Steps, for each segment, on rank r:
  1. encode the values; send the payload to every peer.
  2. receive every peer's payload; merge: sum what all N payloads decode to, r's own included, in
     the order of ranks. So replicas agree, although no rank owns the sum.

Each value is encoded once. Sums are never encoded, so a codec may scale the values that it picks,
and a codec that selects values keeps every rank's selection.

Bytes sent by rank r: (N-1) * m(s, 0), summed over the segments s. Rounds: 1. Time, for P payload
bytes per rank: alpha + (N-1) * P * beta, so P must be small: less than 2/N of SRA's payload.
"""

from __future__ import annotations

from gradwire.algorithms.halves import peers_after
from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph

ROLES = ("payload",)


def chunks(world_size: int) -> int:
    return 1


def rounds(world_size: int) -> int:
    return 1 if world_size > 1 else 0


def build(rank: int, world_size: int, sizes: Sizes) -> Graph:
    """The graph of `rank`."""
    peers = peers_after(rank, range(world_size))
    live = [s for s, segment in enumerate(sizes) if peers and segment[0]]
    graph = Graph(ROLES)
    for s in live:
        own = graph.buffer("payload", s, 0, rank)
        graph.encode(s, [own])
        for p in peers:
            graph.send(s, own, p)
    for s in live:
        payloads = [graph.buffer("payload", s, 0, r) for r in range(world_size)]
        for p in peers:
            graph.recv(s, payloads[p], p)
        graph.merge(s, payloads, final=True)
    return graph


def hop(role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
    """No message depends on another."""
    return 0


def wire_bytes(rank: int, world_size: int, sizes: Sizes) -> int:
    """Bytes that `rank` sends, headers included."""
    return (world_size - 1) * sum(message(segment[0]) for segment in sizes)


def seconds(world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
    """Expected time; see gradwire.algorithms.protocol."""
    return rounds(world_size) * alpha + (world_size - 1) * payload_bytes * beta
