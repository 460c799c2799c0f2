"""Parameter server, co-located (HIPRESS 3.1): K partitions, each served by one of the ranks.

N ranks, K chunks, called partitions; `sizes` determines K. Rank floor(k * N / K) serves partition
k, so servers spread evenly, whether K is below or above N.

Steps, for each segment, on rank r:
  1. encode every partition that another rank serves (one batched kernel); send each to its server.
  2. for each partition that r serves: receive it from every peer; merge: add them to r's own values
     in the order of ranks, encode the sum, keep what the payload decodes to, and send it back to
     every peer.
  3. receive the encoded sum of every other partition from its server; decode it.

Each value is encoded twice, whatever N and K. With K = N it is scatter-reduce-allgather.

Bytes sent by rank r: sum over segments s of [sum over other ranks' partitions k of m(s, k)] + (N-1)
* [sum over own partitions k of m(s, k)]. Rounds: 2. Time, for P payload bytes in total, at a rank
that serves c = ceil(K/N) partitions: 2 * alpha + ((K-c)/K + (N-1) * c/K) * P * beta.
"""

from __future__ import annotations

from gradwire.algorithms.halves import contribute, receive, reduce
from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph

ROLES = ("contribution", "result")


def chunks(world_size: int) -> int:
    """The default; `Options.partitions` overrides it."""
    return world_size


def rounds(world_size: int) -> int:
    return 2 if world_size > 1 else 0


def servers(world_size: int, partitions: int) -> list[int]:
    """The rank that serves each partition."""
    return [k * world_size // partitions for k in range(partitions)]


def build(rank: int, world_size: int, sizes: Sizes) -> Graph:
    """The graph of `rank`."""
    graph = Graph(ROLES)
    if world_size > 1:
        owners = servers(world_size, len(sizes[0]))
        contribute(graph, rank, owners, sizes)
        reduce(graph, rank, range(world_size), owners, sizes)
        receive(graph, rank, owners, sizes)
    return graph


def hop(role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
    """Contributions first, then results."""
    return ROLES.index(role)


def wire_bytes(rank: int, world_size: int, sizes: Sizes) -> int:
    """Bytes that `rank` sends, headers included."""
    if world_size == 1:
        return 0
    owners = servers(world_size, len(sizes[0]))
    return sum(
        message(n) * (world_size - 1 if owner == rank else 1)
        for segment in sizes
        for n, owner in zip(segment, owners, strict=True)
    )


def seconds(
    world_size: int,
    payload_bytes: float,
    alpha: float,
    beta: float,
    partitions: int | None = None,
) -> float:
    """Expected time; see gradwire.algorithms.protocol. K is `partitions`, by default N."""
    n, k = world_size, partitions or world_size
    served = -(-k // n)
    sent = ((k - served) / k + (n - 1) * served / k) * payload_bytes
    return rounds(n) * alpha + (sent * beta if n > 1 else 0.0)
