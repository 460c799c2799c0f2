"""Hierarchical all-gather of shards: every payload crosses to another machine once.

N ranks on L machines; `nodes[r]` is the machine of rank r, any number. N chunks; chunk c is the
shard of rank c, and has a holder on every machine (gradwire/algorithms/holders.py).

Steps, for each segment, on rank r, on a machine of g ranks:
  1. encode chunk r; send it to its holder on every other machine, and to the other ranks of this
     machine; decode it here too, so that r ends with the same values as its peers.
  2. receive the chunks of this machine's other ranks; decode them. Receive each chunk of another
     machine that r holds from its owner; forward the payload, unchanged, to the other ranks of this
     machine; decode it.
  3. receive the chunks that this machine's other ranks hold from them; decode them.

Each value is encoded once, and all ranks decode the payloads of scatter-reduce-allgather's second
half (sra_all_gather.py): results are the same, bit for bit.

Bytes sent by rank r: sum over segments s of (L-1) * m(s, r) between machines, and (g-1) * [m(s, r)
+ sum over chunks c that r holds of m(s, c)] inside. A machine's link carries (L-1) times the
payloads of its ranks out, and the payloads of all other ranks in, once. With equal machines of S
ranks and P payload bytes in total, a rank sends (L-1)/N P between machines, where SRA sends
S (L-1)/N P, and (N-1)/N P in all, as in SRA. Rounds: 1 inside, 1 between. Time counts only links
between machines, which the ranks of a machine share: alpha + (L-1)/L * P * beta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.algorithms.holders import OnMachines
from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph


@dataclass(frozen=True)
class HierarchicalAllGather(OnMachines):
    """The algorithm on given machines.

    Attributes:
        nodes: machine of each rank; empty: every rank has its own machine.
    """

    ROLES: ClassVar[tuple[str, ...]] = ("result",)

    def build(self, rank: int, world_size: int, sizes: Sizes) -> Graph:
        """The graph of `rank`."""
        graph = Graph(self.ROLES)
        if world_size == 1:
            return graph
        holders = self.holders(world_size)
        beside, held = holders.beside(rank), holders.held(rank)
        receivers = holders.abroad(rank) + beside
        # (the rank that sends it here, chunk)
        direct = [(p, p) for p in beside] + [(c, c) for c in held]
        forwarded = [(p, c) for p in beside for c in holders.held(p)]
        # Early steps of a segment precede late steps of the segment before it.
        for wave in range(len(sizes) + 1):
            if wave < len(sizes):
                if sizes[wave][rank]:
                    own = graph.buffer("result", wave, rank, rank)
                    graph.encode(wave, [own])
                    for p in receivers:
                        graph.send(wave, own, p)
                    graph.decode(wave, [own])
                _receive(graph, wave, direct, sizes, dict.fromkeys(held, beside))
            if wave:
                _receive(graph, wave - 1, forwarded, sizes, {})
        return graph

    def hop(self, role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
        """The owner's messages first, then the forwarded ones."""
        return int(sender != chunk)

    def wire_bytes(self, rank: int, world_size: int, sizes: Sizes) -> int:
        """Bytes that `rank` sends, headers included."""
        holders = self.holders(world_size)
        between, inside = len(holders.machines) - 1, len(holders.beside(rank))
        held = holders.held(rank)
        return sum(
            (between + inside) * message(segment[rank])
            + inside * sum(message(segment[c]) for c in held)
            for segment in sizes
        )

    def seconds(self, world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
        """Expected time between machines; see gradwire.algorithms.protocol."""
        machines = len(self.holders(world_size).machines)
        share = (machines - 1) / machines
        return self.rounds_between(world_size) * alpha + share * payload_bytes * beta


def _receive(
    graph: Graph,
    s: int,
    coming: list[tuple[int, int]],
    sizes: Sizes,
    onward: dict[int, list[int]],
) -> None:
    """Receive chunks of segment `s`, each from a rank; forward those in `onward`; decode them."""
    for sender, chunk in coming:
        if sizes[s][chunk]:
            result = graph.buffer("result", s, chunk, chunk)
            graph.recv(s, result, sender)
            for p in onward.get(chunk, ()):
                graph.send(s, result, p)
            graph.decode(s, [result])
