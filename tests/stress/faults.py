"""Random programs with a fault on one rank: every rank must end with a named error.

    raise      the thread that issues scopes and calls raises between two of them
    coroutine  an aggregator raises after its first round
    call       another call of the user's than on the other ranks
    scope      another bucket than on the other ranks
    destroy    the process group is destroyed, with whatever is under way
    drop       the rank's links break; it does not know
    die        the process dies

What raises on a rank ends what it issues on all of its groups, as it would in backward.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch.distributed as dist

from ends import End, ends, raised
from gradwire.aggregators import Aggregator, Context, StateSpec, Steps
from gradwire.transport import Hub
from stress.programs import Action, Call, Program, Scope
from stress.running import RankContext, Runner
from stress.worlds import in_threads, of_transport, process_context

BY_THREADS = ("raise", "coroutine", "call", "scope", "destroy", "drop")
BY_PROCESSES = (*BY_THREADS, "die")
NAMED = ("TransportError", "ConfigError", "CodecError")

TIMEOUT_S = 100.0  # of the transports: a fault that ends by it was not noticed
BOUND_S = TIMEOUT_S / 2  # from the fault to the last rank's error: a second, and a busy machine
SOON_S = 4.0  # the same, on idle cores
STEPS = 6
FAULTY = 4  # the fault occurs in one of so many first steps


class OnPurpose(Exception):
    """What a fault raises."""


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, its rank, and the action of the rank's order that it precedes."""

    kind: str
    rank: int
    step: int
    place: int

    @staticmethod
    def of(kind: str, program: Program) -> Fault:
        """An action in which all ranks take part, of a program's first steps."""
        draw = random.Random(f"fault {kind} {program.seed} {program.ranks}")
        while True:
            fault = Fault(kind, draw.randrange(program.ranks), draw.randrange(FAULTY), 0)
            step = program.step(fault.step)
            places = [
                place
                for place, index in enumerate(program.order(fault.rank, fault.step))
                if program.takes_part(fault.rank, step.actions[index])
                and fault.fits(step.actions[index])
            ]
            if places:
                return replace(fault, place=draw.choice(places))

    def fits(self, action: Action) -> bool:
        """Whether it can happen before, or in, `action`."""
        if self.kind in ("coroutine", "scope"):
            return isinstance(action, Scope)
        return self.kind != "call" or isinstance(action, Call)


@dataclass(frozen=True)
class Raises(Aggregator):
    """An aggregator that raises after its first round."""

    inner: Aggregator

    def states(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        return self.inner.states(shape)

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        yield next(self.inner.aggregate(contexts))
        raise OnPurpose("an aggregator raises on purpose")


@dataclass(frozen=True)
class Report:
    """How one rank ended, and when the fault occurred (time.monotonic), if on this rank."""

    end: End
    fault_at: float | None


def report(
    program: Program,
    fault: Fault,
    ctx: RankContext,
    breaks: Callable[[str, Action], None],
) -> Report:
    """Run a program on one rank until its end; `breaks` causes the fault."""
    at: list[float] = []

    def before(step: int, place: int, action: Action) -> Action:
        if (fault.rank, fault.step, fault.place) != (ctx.rank, step, place):
            return action
        at.append(time.monotonic())
        if fault.kind == "raise":
            raise OnPurpose("the issuing thread raises on purpose")
        if isinstance(action, Call) and fault.kind == "call":
            return another_call(action)
        if isinstance(action, Scope) and fault.kind == "scope":
            return replace(action, bucket=(action.bucket + 4) % 8)
        if isinstance(action, Scope) and fault.kind == "coroutine":
            runner.wrap(action, step, Raises)
        breaks(fault.kind, action)
        return action

    runner = Runner(program, ctx, before=before)
    try:
        runner.run(STEPS)
        end = End("all steps", at=time.monotonic())
    except BaseException as error:
        end = raised(error)
        for comm in filter(None, ctx.comms):
            comm.fail(error)
    return Report(end, at[0] if at else None)


def another_call(call: Call) -> Call:
    kind = "all_gather" if call.kind == "all_reduce" else "all_reduce"
    return replace(call, kind=kind, numel=call.numel + 1000)


def by_threads(fault: Fault, program: Program) -> list[Report]:
    """How every rank ends; an error where one hangs."""

    def body(ctx: RankContext, hubs: list[Hub]) -> Report:
        def breaks(kind: str, action: Action) -> None:
            comm = ctx.comms[action.group]
            if kind == "destroy" and comm is not None:
                comm.close()
            if kind == "drop":
                for hub, ranks in zip(hubs, program.groups, strict=True):
                    if ctx.rank in ranks:
                        hub.kill(ranks.index(ctx.rank))

        return report(program, fault, ctx, breaks)

    return in_threads(program, body, 2 * TIMEOUT_S, timeout=TIMEOUT_S)


def _body(rank: int, fault: Fault, seed: int) -> Report:
    program = Program.of(seed, dist.get_world_size())
    ctx = process_context(program, TIMEOUT_S)

    def breaks(kind: str, action: Action) -> None:
        if kind == "die":
            os._exit(1)
        if kind == "destroy":
            dist.destroy_process_group(ctx.groups[action.group])
        if kind == "drop":
            drop_links()

    return report(program, fault, ctx, breaks)


def drop_links() -> None:
    """Break every connection of this process with another over TCP."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as link:
                    if link.family in (socket.AF_INET, socket.AF_INET6):
                        link.getpeername()  # raises for a listening socket
                        link.shutdown(socket.SHUT_RDWR)


def by_processes(fault: Fault, program: Program, shm: bool) -> list[Report]:
    """How every rank ends, also ranks that died or hang."""
    found = ends(
        program.ranks, _body, fault, program.seed,
        timeout=TIMEOUT_S, deadline=2 * TIMEOUT_S, environment=of_transport(shm),
    )  # fmt: skip
    return [
        end.value if isinstance(end.value, Report)
        else Report(end, end.at if fault == replace(fault, kind="die", rank=rank) else None)
        for rank, end in enumerate(found)
    ]  # fmt: skip


def wrong(fault: Fault, reports: list[Report], bound: float = BOUND_S) -> str | None:
    """What is wrong with a run, or None."""
    fault_at = reports[fault.rank].fault_at
    if fault_at is None:
        return (
            f"the fault did not come: rank {fault.rank} ended before it, {reports[fault.rank].end}"
        )
    found = []
    for rank, each in enumerate(reports):
        expected = NAMED
        if rank == fault.rank and fault.kind in ("raise", "coroutine"):
            expected = (*NAMED, "OnPurpose")
        if rank == fault.rank and fault.kind == "die":
            expected = ("died",)
        seconds = each.end.at - fault_at
        if each.end.error not in expected:
            found.append(f"rank {rank} ended in no named error: {each.end}")
        elif seconds > bound:
            found.append(f"rank {rank} ended after {seconds:.1f} s: {each.end}")
    return "; ".join(found) or None


def kinds(way: str) -> list[str]:
    """The faults that there are over a transport; shared memory needs no connection."""
    if way == "threads":
        return list(BY_THREADS)
    return [kind for kind in BY_PROCESSES if (kind, way) != ("drop", "shm")]


def run(kind: str, program: Program, way: str, bound: float) -> str | None:
    """Run a program with a fault of this kind; what is wrong, or None."""
    fault = Fault.of(kind, program)
    if way == "threads":
        reports = by_threads(fault, program)
    else:
        reports = by_processes(fault, program, shm=way == "shm")
    found = wrong(fault, reports, bound)
    return found and f"{fault}, {way}: {found}"
