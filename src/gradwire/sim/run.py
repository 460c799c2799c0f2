"""All ranks' graphs on one virtual clock, or, where they are alike, those of one node for all."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gradwire.engine import Graph
from gradwire.sim.clock import Clock, Cores
from gradwire.sim.fabric import Fabric, Link, Message
from gradwire.sim.rank import Overheads, SimulatedRank, Timed
from gradwire.sim.symmetry import Symmetry


@dataclass(frozen=True)
class Machines:
    """What the ranks run on.

    Attributes:
        world_size: number of ranks.
        ranks: of a node; the last node may have fewer.
        link: of each node.
        overheads: of the engine.
        cores: that all simulated ranks share, as the lab's nodes do; `inf`: each thread has its
            own.
        in_flight: collectives that may own memory at a time.
    """

    world_size: int
    ranks: int
    link: Link
    overheads: Overheads
    cores: float = math.inf
    in_flight: int = 2

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.ranks)


@dataclass(frozen=True)
class Result:
    """What came of it.

    Attributes:
        ended: of each job: seconds until the slowest rank had its result, by its own start.
        sent_bytes: of each simulated rank, handed to its transport.
        moved_bytes: that left each simulated node.
        kernel_seconds: of each simulated rank.
    """

    ended: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    moved_bytes: tuple[int, ...]
    kernel_seconds: tuple[float, ...]


class _Office:
    """Finds the rank on the clock that a message goes to, and the name it knows it by.

    A name is (sender, receiver, job, role, segment, chunk), as the receiver has it.
    """

    def __init__(self, machines: Machines, fabric: Fabric, rotation: Symmetry | None) -> None:
        self.ranks: list[SimulatedRank] = []
        self._per_node = machines.ranks
        self._fabric = fabric
        self._rotation = rotation

    def expect(self, rank: SimulatedRank, job: int, graph: Graph, task: int) -> Hashable:
        b, peer = graph.message(task)[0], graph.peer[task]
        role, segment, chunk = graph.buffer_role, graph.buffer_segment, graph.buffer_chunk
        name = (peer, rank.number, job, role[b], segment[b], chunk[b])
        self._fabric.expect(name, self.beside(rank.number, peer))
        return name

    def send(
        self,
        rank: SimulatedRank,
        job: int,
        graph: Graph,
        task: int,
        nbytes: int,
        sent: Callable[[], None],
    ) -> None:
        peer = graph.peer[task]
        beside = self.beside(rank.number, peer)
        receiver, name = self._delivery(rank.number, peer, job, graph, graph.message(task)[0])
        self._fabric.send(Message(name, rank, receiver, peer, beside, nbytes, sent))

    def beside(self, rank: int, peer: int) -> bool:
        return rank // self._per_node == peer // self._per_node

    def _delivery(
        self, rank: int, peer: int, job: int, graph: Graph, b: int
    ) -> tuple[SimulatedRank, Hashable]:
        role, segment, chunk = graph.buffer_role[b], graph.buffer_segment[b], graph.buffer_chunk[b]
        if self._rotation is None:
            return self.ranks[peer], (rank, peer, job, role, segment, chunk)
        back = -(peer // self._per_node)
        sender, chunk = self._rotation.rank(rank, back), self._rotation.chunk(chunk, back)
        receiver = self.ranks[peer % self._per_node]
        return receiver, (sender, receiver.number, job, role, segment, chunk)


def run(
    machines: Machines,
    jobs: Sequence[Sequence[Timed]],
    ready: Sequence[float],
    rotation: Symmetry | None = None,
    starts: Sequence[float] | None = None,
) -> Result:
    """Run every job on every rank.

    Args:
        machines: the ranks, and what they run on.
        jobs: of each rank, its jobs in order; with `rotation` of the ranks of node 0 alone.
        ready: when each job's values are there, in seconds; they do not fall.
        rotation: under which all graphs are alike; None: simulate all ranks.
        starts: when each rank begins, in seconds; None: all at once. Each counts from there.
    """
    starts = starts or [0.0] * len(jobs)
    clock = Clock()
    # With a rotation, cores that all ranks share are shared by all that node 0 stands for.
    alike = 1 if rotation is None else rotation.nodes
    cores = Cores(clock, machines.cores / alike)
    nodes = 1 if rotation is not None else machines.nodes
    largest = max((job.largest for job in jobs[0]), default=1)
    fabric = Fabric(clock, machines.link, largest, nodes)
    office = _Office(machines, fabric, rotation)
    for number, mine in enumerate(jobs):
        node = number // machines.ranks
        rank = SimulatedRank(
            number, node, clock, cores, office, machines.overheads, machines.in_flight
        )
        office.ranks.append(rank)
        rank.submit_at([starts[number] + when for when in ready], mine)
    with _uncollected():
        clock.run()
    for rank in office.ranks:
        assert len(rank.ended) == len(ready), f"rank {rank.number} waits for ever"
    own = list(zip(office.ranks, starts, strict=True))
    return Result(
        ended=tuple(
            max(rank.ended[job] - start for rank, start in own) for job in range(len(ready))
        ),
        sent_bytes=tuple(rank.sent_bytes for rank in office.ranks),
        moved_bytes=tuple(fabric.moved),
        kernel_seconds=tuple(rank.kernel_seconds for rank in office.ranks),
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Within it Python looks for no cycles: none are made, and its passes over all that waits on a
    clock take a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
