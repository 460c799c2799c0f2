"""Coordinated sending (HIPRESS 3.2): link-disjoint rounds, in which each rank sends to one rank and
receives from one rank.

By default, a rank sends each message as soon as it is ready, and messages of several ranks compete
for one receiver's link. Coordinated messages have *rounds*, which every rank computes alike from
(step, segment, sender, receiver): in the round of shift t, rank r sends to r + t and receives from
r - t, modulo N. The rounds of step p of segment s coincide with those of step 0 of segment s + p,
so that a segment is summed while contributions to the next one travel.

There are no synchronisation messages. A rank sends in a round once its sends and receives of the
round `WINDOW` rounds earlier have ended, so no rank is further ahead than that; with a window of 1,
rounds are disjoint, and each costs one latency.

Bytes, and the order of summation, are those of the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.algorithms.protocol import Algorithm, Sizes
from gradwire.engine import Graph, Kind

WINDOW = 2

Round = tuple[int, int, int]  # segment and step together, step, shift


@dataclass(frozen=True)
class Coordinated:
    """An all-to-all algorithm, sent in rounds.

    Attributes:
        algorithm: its graph is reordered. Its `ROLES` are its steps.
        window: rounds that a rank may be ahead; 1 keeps rounds disjoint.
    """

    algorithm: Algorithm
    window: int = WINDOW

    @property
    def ROLES(self) -> tuple[str, ...]:
        return self.algorithm.ROLES

    def chunks(self, world_size: int) -> int:
        return self.algorithm.chunks(world_size)

    def rounds(self, world_size: int) -> int:
        return self.algorithm.rounds(world_size)

    def build(self, rank: int, world_size: int, sizes: Sizes) -> Graph:
        """The graph of `rank`."""
        graph = self.algorithm.build(rank, world_size, sizes)
        rounds = [self._round(graph, task, rank, world_size) for task in range(len(graph))]
        order = sorted(range(len(graph)), key=rounds.__getitem__)
        gates: list[Sequence[int]] = [()] * len(graph)
        begun: list[tuple[Round, list[int]]] = []  # (round, its messages)
        for task in order:
            if graph.peer[task] >= 0:
                if not begun or begun[-1][0] != rounds[task]:
                    begun.append((rounds[task], []))
                if graph.kind[task] is Kind.SEND and len(begun) > self.window:
                    gates[task] = begun[-1 - self.window][1]
                begun[-1][1].append(task)
        return graph.reordered(order, gates)

    def _round(self, graph: Graph, task: int, rank: int, world_size: int) -> Round:
        """A task's sort key: a message's round; for a kernel, after the messages that it reads."""
        kind, peer = graph.kind[task], graph.peer[task]
        messages = graph.reads[task] or graph.writes[task]
        step = max(self.ROLES.index(graph.buffer_role[buffer]) for buffer in messages)
        at = graph.segment[task] + step
        if kind is Kind.SEND:
            return at, step, (peer - rank) % world_size
        if kind is Kind.RECV:
            return at, step, (rank - peer) % world_size
        if kind is Kind.ENCODE:
            return at, step, 0
        return at, step, world_size  # after the step's last round

    def hop(self, role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
        """One hop per `window` rounds of a step."""
        shift = (receiver - sender) % world_size
        step = self.algorithm.hop(role, chunk, sender, receiver, world_size)
        of_a_step = -(-(world_size - 1) // self.window)
        return step * of_a_step + (shift - 1) // self.window

    def wire_bytes(self, rank: int, world_size: int, sizes: Sizes) -> int:
        """Bytes that `rank` sends, headers included."""
        return self.algorithm.wire_bytes(rank, world_size, sizes)

    def seconds(self, world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
        """Expected time; see gradwire.algorithms.protocol."""
        return self.algorithm.seconds(world_size, payload_bytes, alpha, beta)
