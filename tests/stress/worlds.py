"""Where programs run: ranks as threads over loopback, as processes over gloo or shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ends import ends
from fifo import FifoHub
from gradwire.transport import Hub
from stress.programs import Program
from stress.running import Found, RankContext, Runner
from stress.scopes import Scopes, of_processes, of_threads
from stress.slow import Delays, Slow, slow_groups

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
        """Run `body` on all ranks concurrently; returns results or errors.

        Raises:
            TimeoutError: ranks that have not ended within `deadline` seconds.
        """
        ended: list[Any] = [None] * self.program.ranks

        def run(ctx: RankContext) -> None:
            try:
                ended[ctx.rank] = body(ctx)
            except BaseException as error:
                ended[ctx.rank] = error

        threads = [threading.Thread(target=run, args=(s,), daemon=True) for s in self.contexts]
        end = time.monotonic() + deadline
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0))
        hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        for ctx in self.contexts:
            for scopes in ctx.scopes:
                if scopes is not None:
                    scopes.close()
        if hung:
            raise TimeoutError(f"ranks {hung} hang; the others: {ended}")
        return ended

    def runner(self, ctx: RankContext, **how: Any) -> Runner:
        delays = self.delays[ctx.rank]
        return Runner(self.program, ctx, in_order=self.fifo, delays=delays, **how)


def deadline(steps: int) -> float:
    return 100.0 + 2 * steps


def serially(program: Program, steps: int) -> list[Found]:
    """Each rank's results of a serial execution."""
    world = Threads(program, delayed=False)
    ended = world.run(lambda ctx: Runner(program, ctx, serial=True).run(steps), deadline(steps))
    return _without_errors(ended)


def by_threads(program: Program, steps: int, fifo: bool = False) -> list[Found]:
    """Each rank's results of a concurrent execution, with delays.

    Raises:
        RuntimeError: a rank ended with an error.
        TimeoutError: ranks hang.
    """
    world = Threads(program, fifo)
    ended = world.run(lambda ctx: world.runner(ctx).run(steps), deadline(steps))
    return _without_errors(ended)


def _without_errors(ended: Sequence[Any]) -> list[Found]:
    errors = {rank: end for rank, end in enumerate(ended) if isinstance(end, BaseException)}
    if errors:
        text = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, e in errors.items())
        raise RuntimeError(text)
    return list(ended)


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
    """Each rank's results of a concurrent execution, with delays, over gloo or shared memory.

    Raises:
        RuntimeError: a rank ended with an error, died or hangs.
    """
    found = ends(
        program.ranks, _run, program.seed, steps,
        timeout=TIMEOUT_S, deadline=deadline(steps), environment=of_transport(shm),
    )  # fmt: skip
    wrong = [f"rank {rank}: {end}" for rank, end in enumerate(found) if end.error]
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return [end.value for end in found]


def of_transport(shm: bool) -> dict[str, str]:
    """The environment in which ranks of one machine use shared memory, or gloo's connections."""
    return {"GRADWIRE_SHM": "1" if shm else "0"}
