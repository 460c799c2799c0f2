"""Where programs run: ranks as threads over loopback, as processes over gloo or shared memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from fifo import FifoHub
from gradwire import groups
from gradwire.engine import Communicator
from gradwire.transport import Hub
from ranks import as_processes, at_once
from stress.programs import Program
from stress.running import Found, RankContext, Runner
from stress.slow import Delays, Slow, slow_groups

TIMEOUT_S = 60.0  # of the transports


def in_threads(
    program: Program,
    body: Callable[[RankContext, list[Hub]], Any],
    seconds: float,
    delayed: bool = True,
    fifo: bool = False,
    timeout: float = TIMEOUT_S,
) -> list[Any]:
    """Run `body` on all ranks, threads of this process, with the hubs of the program's groups.

    Args:
        seconds: after which a rank hangs, which is an error.
        delayed: whether sends and calls are late at random.
        fifo: over links with in-order delivery and no tags.
        timeout: seconds that a transport waits.
    """
    hubs = [Hub(len(ranks), timeout) for ranks in program.groups]
    links = [FifoHub(len(ranks), timeout=timeout) for ranks in program.groups]
    contexts = []
    for rank in range(program.ranks):
        delays = Delays(f"{program.seed} {rank}") if delayed else None
        comms: list[Communicator | None] = []
        for hub, link, ranks in zip(hubs, links, program.groups, strict=True):
            if rank not in ranks:
                comms.append(None)
                continue
            at = ranks.index(rank)
            end: Any = hub.transport(at) if delays is None else Slow(hub.transport(at), delays)
            own = link.link(at) if fifo else None
            comms.append(Communicator(end, links=lambda device, own=own: own))  # type: ignore[misc]
        contexts.append(RankContext(rank, comms, comms, delays, fifo))
    try:
        return at_once(*(partial(body, ctx, hubs) for ctx in contexts), seconds=seconds)
    finally:
        for comm in (comm for ctx in contexts for comm in ctx.comms if comm is not None):
            comm.close()


def deadline(steps: int) -> float:
    return 100.0 + 2 * steps


def by_threads(program: Program, steps: int, serial: bool = False, **how: Any) -> list[Found]:
    """Each rank's results: of a serial execution, or of a concurrent one, with delays."""

    def body(ctx: RankContext, _: list[Hub]) -> Found:
        return Runner(program, ctx, serial).run(steps)

    return in_threads(program, body, deadline(steps), not serial, **how)


# ---- processes


def process_context(program: Program, timeout: float = TIMEOUT_S) -> RankContext:
    """This process's groups, made for the program, and slow."""
    rank, limit = dist.get_rank(), timedelta(seconds=timeout)  # new groups do not inherit it
    delays = slow_groups(f"{program.seed} {rank}")
    made = [dist.new_group(list(ranks), timeout=limit) for ranks in program.groups]
    pairs = zip(made, program.groups, strict=True)
    chosen = [group if rank in ranks else None for group, ranks in pairs]
    return RankContext(rank, [g and groups.communicator(g) for g in chosen], chosen, delays)


def _run(rank: int, seed: int, steps: int) -> Found:
    program = Program.of(seed, dist.get_world_size())
    return Runner(program, process_context(program)).run(steps)


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
