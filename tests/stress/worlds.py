"""Where programs run: ranks as threads over loopback, as processes over gloo or shared memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from fifo import FifoHub
from gradwire.transport import Hub
from ranks import as_processes
from stress.programs import Program
from stress.running import Found, RankContext, Runner
from stress.scopes import Scopes, of_processes, of_threads
from stress.slow import Delays, Slow, slow_groups
from transport.shm_ends import at_once

TIMEOUT_S = 60.0  # of the transports


class Threads:
    """The groups of a program, whose ranks are threads of this process.

    Args:
        fifo: over links with in-order delivery and no tags.
        timeout: seconds that a transport waits.
        delayed: whether sends and calls are late at random.

    Attributes:
        hubs: by group.
    """

    def __init__(
        self,
        program: Program,
        fifo: bool = False,
        timeout: float = TIMEOUT_S,
        delayed: bool = True,
    ) -> None:
        self.program = program
        self.fifo = fifo
        self.hubs = [Hub(len(ranks), timeout) for ranks in program.groups]
        links = [FifoHub(len(ranks), timeout=timeout) for ranks in program.groups]
        self.delays: list[Delays | None] = [
            Delays(f"{program.seed} {rank}") if delayed else None for rank in range(program.ranks)
        ]
        self.contexts = []
        for rank, delays in enumerate(self.delays):
            scopes: list[Scopes | None] = []
            for group, ranks in enumerate(program.groups):
                if rank not in ranks:
                    scopes.append(None)
                    continue
                at = ranks.index(rank)
                transport: Any = self.hubs[group].transport(at)
                if delays is not None:
                    transport = Slow(transport, delays)
                scopes.append(of_threads(transport, links[group].link(at) if fifo else None))
            self.contexts.append(RankContext(rank, scopes, [s and s.comm for s in scopes]))

    def run(self, body: Callable[[RankContext], Any], deadline: float) -> list[Any]:
        """Run `body` on all ranks concurrently; returns their results, or raises the first error;
        ranks that have not ended within `deadline` seconds are one."""
        try:
            return at_once(*(partial(body, ctx) for ctx in self.contexts), seconds=deadline)
        finally:
            for ctx in self.contexts:
                for scopes in ctx.scopes:
                    if scopes is not None:
                        scopes.close()

    def runner(self, ctx: RankContext, **how: Any) -> Runner:
        delays = self.delays[ctx.rank]
        return Runner(self.program, ctx, in_order=self.fifo, delays=delays, **how)


def deadline(steps: int) -> float:
    return 100.0 + 2 * steps


def serially(program: Program, steps: int) -> list[Found]:
    """Each rank's results of a serial execution."""
    world = Threads(program, delayed=False)
    return world.run(lambda ctx: Runner(program, ctx, serial=True).run(steps), deadline(steps))


def by_threads(program: Program, steps: int, fifo: bool = False) -> list[Found]:
    """Each rank's results of a concurrent execution, with delays."""
    world = Threads(program, fifo)
    return world.run(lambda ctx: world.runner(ctx).run(steps), deadline(steps))


# ---- processes


def process_context(program: Program, timeout: float = TIMEOUT_S) -> RankContext:
    """This process's groups, made for the program."""
    limit = timedelta(seconds=timeout)  # new groups do not inherit it
    made = [dist.new_group(list(ranks), timeout=limit) for ranks in program.groups]
    member = [dist.get_rank() in ranks for ranks in program.groups]
    chosen = [group if inside else None for group, inside in zip(made, member, strict=True)]
    return RankContext(dist.get_rank(), [g and of_processes(g) for g in chosen], chosen)


def _run(rank: int, seed: int, steps: int) -> Found:
    program = Program.of(seed, dist.get_world_size())
    delays = slow_groups(f"{seed} {rank}")
    return Runner(program, process_context(program), delays=delays).run(steps)


def by_processes(program: Program, steps: int, shm: bool) -> list[Found]:
    """Each rank's results of a concurrent execution, with delays, over gloo or shared memory."""
    found: list[Found] = as_processes(
        program.ranks, _run, program.seed, steps,
        timeout=TIMEOUT_S, deadline=deadline(steps), environment=of_transport(shm),
    )  # fmt: skip
    return found


def of_transport(shm: bool) -> dict[str, str]:
    """The environment in which ranks of one machine use shared memory, or gloo's connections."""
    return {"GRADWIRE_SHM": "1" if shm else "0"}
