"""Run the graphs of all ranks on one virtual clock, or of one node if ranks are symmetric."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gradwire_tools.sim.clock import Clock, Cores
from gradwire_tools.sim.fabric import Fabric, Link
from gradwire_tools.sim.rank import Overheads, SimulatedRank, TimedGraph


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


def simulate(
    machines: Machines,
    jobs: Sequence[Sequence[TimedGraph]],
    begin: Callable[[SimulatedRank, Sequence[TimedGraph]], None],
    represented: int = 1,
) -> tuple[list[SimulatedRank], Fabric]:
    """Run ranks until nothing is left to do; (the simulated ranks, their links).

    Args:
        machines: the ranks, and what they run on.
        jobs: the graphs of each simulated rank, in order.
        begin: called for every rank before the clock runs, to submit its scopes.
        represented: nodes that each simulated one represents: all by node 0, or itself.
    """
    clock = Clock()
    # Node 0 gets its share of the cores, also where it represents the others.
    cores = Cores(clock, machines.cores / represented)
    nodes = -(-machines.nodes // represented)
    largest = max((job.largest for job in jobs[0]), default=1)
    fabric = Fabric(clock, machines.link, largest, nodes, machines.ranks)
    costs = machines.overheads, machines.in_flight
    ranks = [
        SimulatedRank(number, number // machines.ranks, clock, cores, fabric, *costs)
        for number in range(len(jobs))
    ]
    fabric.ranks += ranks
    for rank, mine in zip(ranks, jobs, strict=True):
        begin(rank, mine)
    with _gc_disabled():
        clock.run()
    return ranks, fabric


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
