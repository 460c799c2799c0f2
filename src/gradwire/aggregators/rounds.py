"""Rounds: drives the aggregators of a scope and fuses their requests.

Each aggregator has one coroutine over its parameters. All coroutines advance in lockstep. Their
requests of one round become one collective per operation and options, which run concurrently. When
all have ended, each coroutine gets its results, and the next round begins. No thread waits for a
round: its end starts the next, on the compute thread. All rounds share one ticket, taken before the
first, so that scopes are ordered by their start, even if their rounds overtake each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import compress

import torch

from gradwire.aggregators.attached import Attached
from gradwire.aggregators.coroutine import Asking, Coroutine, ask
from gradwire.aggregators.program import check_asked, coroutines, items_of, program_of
from gradwire.aggregators.protocol import Aggregator, Observation
from gradwire.collectives import Options, Request, ScopeProgram
from gradwire.engine import Outcome, Owner

Done = Callable[[BaseException | None, list[Outcome]], None]
Observer = Callable[[Observation], None]


class Rounds:
    """The aggregation of one scope.

    Args:
        owner: the scope's owner.
        members: its parameters.
        reductions: of the gradients, 1-D and contiguous, which averages replace; what is owed has
            been added.
        options: defaults for collectives.
        done: called once, with the error or None, and the outcomes of the collectives; from an
            engine thread, or from `start`.
        observe: called with each parameter's average.
        before: for `observe`, copies of this rank's gradients.
        version: of the newest plan that this rank can use; see `Owner.ticket`.
        plan: the version of the plan in force, for error messages.

    Raises:
        TransportError, ConfigError: the group is broken (see `Owner.ticket`); `done` is not called.
    """

    def __init__(
        self,
        owner: Owner,
        members: Sequence[Attached],
        reductions: Sequence[Request],
        options: Options,
        done: Done,
        observe: Observer | None = None,
        before: Sequence[torch.Tensor] = (),
        version: int = 0,
        plan: int = 0,
    ) -> None:
        self.owner = owner
        self.ticket = owner.ticket(version)
        self.members = members
        self.reductions = reductions
        self.gradients = [reduction.target for reduction in reductions]
        self.options = options
        self.done = done
        self.observe = observe
        self.plan = plan
        self.begun = time.perf_counter()
        self.outcomes: list[Outcome] = []
        self.active: list[Coroutine] = []
        self.program: ScopeProgram | None = None
        self._lock = threading.Lock()
        self._before = before
        self._observed: list[Coroutine] = []
        self._left = 0  # collectives of the round that have not ended
        self._error: BaseException | None = None

    def start(self) -> None:
        """Run every coroutine to its first requests, and begin the first round."""
        rank, world_size = self.owner.comm.rank, self.owner.comm.world_size
        try:
            members, reductions = self.members, self.reductions
            if world_size == 1:  # the gradients are the averages
                serving = [m.aggregator.serves_one_rank for m in members]
                members = list(compress(members, serving))
                reductions = list(compress(reductions, serving))
            if members:
                self.program = program_of(self.owner, self.plan, members, reductions, self.options)
                self.program.begin()
                self.active = coroutines(members, reductions, rank, world_size)
            if self.observe is not None:
                self._observed = list(self.active)
                for context in (c for coroutine in self.active for c in coroutine.contexts):
                    context.observed = True
            for member in self.members:
                member.step += 1
            self._advance(0)
        except BaseException as error:
            self.owner.comm.fail_owner(self.owner, error)  # peers begin this scope
            self._end(error)

    @property
    def least(self) -> int | None:
        """The least plan version of all ranks, once all rounds have ended; None if no collective
        has carried every rank's version to every other rank."""
        told = self.program is not None and self.program.tells_all
        return self.ticket.version if told or self.owner.comm.world_size == 1 else None

    def _advance(self, number: int) -> None:
        """Resume every coroutine; their requests form round `number`."""
        program, comm = self.program, self.owner.comm
        asking: list[Asking] = []
        try:
            while self.active and not asking:  # they may yield empty lists
                asking = self._ask(number)
            if program is not None:
                check_asked(program.rounds, number, asking, self.members)
            if asking:
                assert program is not None
                of = program.rounds[number], asking, number, comm.rank, comm.world_size
                items = items_of(*of)
                program.check(number, items)
        except BaseException as error:
            # Peers are in a round that this rank will not enter.
            comm.fail_owner(self.owner, error)
            raise
        if program is None or not asking:
            self._end(None)
            return
        self._left = len(items)
        why = partial(_describe, [one.aggregator for one in self.active], self.plan)
        for running in program.start_round(self.ticket, number, items, why):
            running.add_done_callback(partial(self._ended, number))

    def _ask(self, number: int) -> list[Asking]:
        self.active, asking = ask(self.active, number)
        return asking

    def _ended(self, number: int, outcome: Future[Outcome]) -> None:
        """A collective of the round has ended; the last one ends the round."""
        error = outcome.exception()
        with self._lock:
            self._left -= 1
            if error is None:
                self.outcomes.append(outcome.result())
            self._error = self._error or error
            if self._left:
                return
        if self.owner.comm.stream(self.gradients[0].device) is not None:
            self._resume(number + 1)  # on the issuing thread, to keep the program's order
        else:
            self.owner.comm.runs.resume(self._resume, number + 1)

    def _resume(self, number: int) -> None:
        try:
            if self._error is not None:
                raise self._error
            self.owner.check()
            self._advance(number)
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.ticket.close()
        for reduction in self.reductions:  # else each would keep its context, which keeps it, and
            reduction.of = None  # both a gradient's memory, until the cyclic collector runs
        if error is None and self.observe is not None:
            self._notify(self.observe)
        self.done(error, self.outcomes)
        del self.done  # it may refer to this object: only the cyclic collector would free both

    def _notify(self, observe: Observer) -> None:
        seconds = time.perf_counter() - self.begun
        sent = {
            context.name: part
            for coroutine in self._observed
            for context, part in zip(coroutine.contexts, coroutine.sent or (), strict=False)
        }
        rank = self.owner.comm.rank
        shards = [reduction.lengths for reduction in self.reductions]
        columns = zip(self.members, self._before, self.gradients, shards, strict=True)
        for member, gradient, average, lengths in columns:
            exact = sum(lengths[:rank]), sum(lengths[: rank + 1])
            what = (member.name, member.step - 1, gradient, average, sent.get(member.name))
            observe(Observation(*what, seconds, exact))


def _describe(aggregators: Sequence[Aggregator], plan: int) -> str:
    return f"requested by {', '.join(map(str, aggregators))}, plan {plan}"
