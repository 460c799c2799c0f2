"""Run the graphs of all ranks on one virtual clock, or of one node if ranks are symmetric."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gradwire.engine import Graph
from gradwire_tools.sim.clock import Clock, Cores
from gradwire_tools.sim.fabric import Fabric, Link, Message
from gradwire_tools.sim.rank import Overheads, SimulatedRank, TimedGraph
from gradwire_tools.sim.symmetry import Symmetry


@dataclass(frozen=True)
class Machines:
    """What the ranks run on.

    Attributes:
        world_size: number of ranks.
        ranks: ranks per node; the last node may have fewer.
        link: of each node.
        overheads: of the engine.
        cores: number of cores that all simulated ranks share, as the lab's nodes do; `inf`: one
            per thread.
        in_flight: collectives that may hold memory at the same time.
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
    """The result of a run.

    Attributes:
        ended: per job, seconds until the slowest rank had its result, from that rank's start.
        sent_bytes: per simulated rank, bytes passed to the transport.
        moved_bytes: per simulated node, bytes that left it.
        kernel_seconds: per simulated rank.
    """

    ended: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    moved_bytes: tuple[int, ...]
    kernel_seconds: tuple[float, ...]


class _FabricRouter:
    """Maps a message to the simulated rank that receives it, and to the name it has there.

    A name is (sender, receiver, job, role, segment, chunk), from the receiver's view.
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
        self._fabric.expect(name, self.same_node(rank.number, peer))
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
        same_node = self.same_node(rank.number, peer)
        receiver, name = self._delivery(rank.number, peer, job, graph, graph.message(task)[0])
        self._fabric.send(Message(name, rank, receiver, peer, same_node, nbytes, sent))

    def same_node(self, rank: int, peer: int) -> bool:
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
    jobs: Sequence[Sequence[TimedGraph]],
    ready: Sequence[float],
    rotation: Symmetry | None = None,
    starts: Sequence[float] | None = None,
) -> Result:
    """Run every job on every rank.

    Args:
        machines: the ranks, and what they run on.
        jobs: the jobs of each rank, in order; with `rotation`, of the ranks of node 0 alone.
        ready: per job, the time at which its values are ready, in seconds; non-decreasing.
        rotation: the symmetry of all graphs; None: simulate all ranks.
        starts: per rank, the time at which it starts, in seconds; None: all at 0. A rank's times
            count from its start.
    """
    starts = starts or [0.0] * len(jobs)

    def submit(rank: SimulatedRank, mine: Sequence[TimedGraph]) -> None:
        rank.submit_at([starts[rank.number] + when for when in ready], mine)

    ranks, fabric = simulate(machines, jobs, lambda clock, cores: submit, rotation)
    for rank in ranks:
        assert len(rank.ended) == len(ready), f"rank {rank.number} never finishes"
    own = list(zip(ranks, starts, strict=True))
    return Result(
        ended=tuple(
            max(rank.ended[job] - start for rank, start in own) for job in range(len(ready))
        ),
        sent_bytes=tuple(sum(rank.sent_bytes.values()) for rank in ranks),
        moved_bytes=tuple(fabric.moved),
        kernel_seconds=tuple(rank.kernel_seconds for rank in ranks),
    )


Begin = Callable[[SimulatedRank, Sequence[TimedGraph]], None]  # what a rank does at the start


def simulate(
    machines: Machines,
    jobs: Sequence[Sequence[TimedGraph]],
    on: Callable[[Clock, Cores], Begin],
    rotation: Symmetry | None = None,
) -> tuple[list[SimulatedRank], Fabric]:
    """Run ranks until nothing is left to do; (the simulated ranks, their links).

    Args:
        machines, jobs, rotation: as of `run`.
        on: called with the clock and the cores; what it returns is called for every rank, to submit
            its jobs.
    """
    clock = Clock()
    # Node 0 gets its share of the cores, also where it represents the others.
    represented = 1 if rotation is None else rotation.nodes
    cores = Cores(clock, machines.cores / represented)
    nodes = 1 if rotation is not None else machines.nodes
    largest = max((job.largest for job in jobs[0]), default=1)
    fabric = Fabric(clock, machines.link, largest, nodes)
    router = _FabricRouter(machines, fabric, rotation)
    begin = on(clock, cores)
    for number, mine in enumerate(jobs):
        node = number // machines.ranks
        rank = SimulatedRank(
            number, node, clock, cores, router, machines.overheads, machines.in_flight
        )
        router.ranks.append(rank)
        begin(rank, mine)
    with _gc_disabled():
        clock.run()
    return router.ranks, fabric


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable the cyclic garbage collector: a run creates no cycles, and collections take a third
    of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
