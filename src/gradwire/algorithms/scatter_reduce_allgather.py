"""Scatter-reduce-allgather, SRA (CGX 4.1.2): the default, and the one that rounds least.

Vocabulary. N ranks; chunk c of the values is rank c's share; a segment is a pipeline unit, and
`sizes[s][c]` is the payload of chunk c within segment s, in bytes (0 where it holds nothing).

Steps, for each segment s, on rank r:
  1. encode every chunk but r's own (one batched kernel); send chunk c to rank c.
  2. receive chunk r from every peer; merge: add them to the own values in the order of ranks,
     encode the sum, and keep what the payload decodes to, so that the owner ends with what the
     others get.
  3. send the encoded sum to every peer; receive the encoded sum of chunk p from each peer p;
     decode it.

Each value is encoded twice, whatever N. Peers are visited in the order r+1, r+2, ..., so that no
rank is everyone's first target.

Bytes sent by rank r: sum over s of [sum over c != r of m(s, c)] + (N-1) * m(s, r), where m is
the payload with its header (0 for an empty one). Rounds: 2. Time, for P payload bytes in all,
latency a and b seconds a byte: 2 * a + 2 * (N-1)/N * P * b.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.engine import HEADER_BYTES, Buffer, Graph, Kind, Task

ROUNDS = 2
ROLES = ("contribution", "result")


def build(rank: int, world_size: int, sizes: Sequence[Sequence[int]]) -> Graph:
    """The graph of `rank`; `sizes[segment][chunk]` in bytes, the same on every rank."""
    peers = [(rank + i) % world_size for i in range(1, world_size)]
    tasks: list[Task] = []
    if not peers:
        return Graph(tasks)
    live = [s for s in range(len(sizes)) if any(sizes[s])]

    for s in live:
        away = {p: Buffer("contribution", s, p, rank) for p in peers if sizes[s][p]}
        if away:
            tasks.append(Task(Kind.ENCODE, s, writes=tuple(away.values())))
            tasks += [Task(Kind.SEND, s, reads=(b,), peer=p) for p, b in away.items()]

    for s in live:
        if not sizes[s][rank]:
            continue
        gathered = {p: Buffer("contribution", s, rank, p) for p in peers}
        tasks += [Task(Kind.RECV, s, writes=(b,), peer=p) for p, b in gathered.items()]
        result = Buffer("result", s, rank, rank)
        in_rank_order = tuple(gathered[p] for p in sorted(gathered))
        tasks.append(Task(Kind.MERGE, s, reads=in_rank_order, writes=(result,)))
        tasks += [Task(Kind.SEND, s, reads=(result,), peer=p) for p in peers]

    for s in live:
        for p in peers:
            if sizes[s][p]:
                result = Buffer("result", s, p, p)
                tasks.append(Task(Kind.RECV, s, writes=(result,), peer=p))
                tasks.append(Task(Kind.DECODE, s, reads=(result,)))
    return Graph(tasks)


def wire_bytes(rank: int, world_size: int, sizes: Sequence[Sequence[int]]) -> int:
    """Bytes that `rank` sends, headers included."""

    def message(nbytes: int) -> int:
        return nbytes + HEADER_BYTES if nbytes else 0

    return sum(
        sum(message(n) for c, n in enumerate(segment) if c != rank)
        + (world_size - 1) * message(segment[rank])
        for segment in sizes
    )


def seconds(world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
    """Expected time: latency `alpha` (s) a round, `beta` seconds a byte of a rank's link."""
    return ROUNDS * alpha + 2 * (world_size - 1) / world_size * payload_bytes * beta
