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
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

import torch

from gradwire.aggregators.attached import Attached
from gradwire.aggregators.contract import aggregator_error
from gradwire.aggregators.coroutine import Coroutine
from gradwire.aggregators.protocol import Aggregator, Observation
from gradwire.aggregators.resolve import Route
from gradwire.collectives import Collective, Item, Options, Request, prepare, start_round
from gradwire.engine import Outcome, Owner
from gradwire.errors import ConfigError
from gradwire.partition import Spec

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
        self._lock = threading.Lock()
        self._before = before
        self._observed: list[Coroutine] = []
        self._versions_known = False  # whether a collective has carried all ranks' plan versions
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
                self.active = coroutines(members, reductions, rank, world_size)
            if self.observe is not None:
                self._observed = list(self.active)
                for context in (c for coroutine in self.active for c in coroutine.contexts):
                    context.observed = True
            for member in self.members:
                member.step += 1
            self._advance(0)
        except BaseException as error:
            self._end(error)

    @property
    def least(self) -> int | None:
        """The least plan version of all ranks, once all rounds have ended; None if no collective
        has carried every rank's version to every other rank."""
        known = self._versions_known or self.owner.comm.world_size == 1
        return self.ticket.version if known else None

    def _advance(self, number: int) -> None:
        """Resume every coroutine; their requests form round `number`."""
        try:
            self.active, parts = advance(self.owner, self.active, self.options, number)
            for collective, items in parts:
                collective.check(items)
        except BaseException as error:
            # Peers are in a round that this rank will not enter.
            self.owner.comm.fail_owner(self.owner, error)
            raise
        if parts:
            self._left = len(parts)
            self._versions_known |= any(collective.tells_all for collective, _ in parts)
            why = partial(_describe, [one.aggregator for one in self.active], self.plan)
            for running in start_round(self.ticket, parts, why):
                running.add_done_callback(partial(self._ended, number))
        elif self.active:
            self._advance(number)  # the coroutines yielded empty lists
        else:
            self._end(None)

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
            self.owner.comm.in_flight.resume(self._resume, number + 1)

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


def coroutines(
    members: Sequence[Attached], reductions: Sequence[Request], rank: int, world_size: int
) -> list[Coroutine]:
    """One coroutine per aggregator, in the order of the aggregators' first parameters."""
    served: dict[int, list[int]] = {}  # id of an aggregator -> indices of its parameters
    for index, member in enumerate(members):
        served.setdefault(id(member.aggregator), []).append(index)
    made, of = [], (reductions[0].values.device, rank, world_size)
    for indices in served.values():
        contexts = [members[i].context(reductions[i], *of) for i in indices]
        made.append(Coroutine(members[indices[0]].aggregator, contexts))
    return made


Part = tuple[Collective, list[Item]]


def advance(
    owner: Owner, active: Sequence[Coroutine], options: Options, number: int
) -> tuple[list[Coroutine], list[Part]]:
    """Resume coroutines: (those that have not ended, the collectives of round `number`).

    Raises:
        ConfigError: an aggregator breaks the contract, or a request is not legal.
        Exception: an aggregator's own.
    """
    rank, world_size = owner.comm.rank, owner.comm.world_size
    asking = []
    parts: dict[Route, _Part] = {}  # equal routes are one object
    counts: dict[str, int] = {}  # requests of each parameter so far
    # Each round draws different random numbers.
    round_bits = number << 48
    for coroutine in active:
        if coroutine.resume(number):
            asking.append(coroutine)
        for request in coroutine.requests:
            c = coroutine.context_of(request, number)
            count = counts.get(c.name, 0)
            counts[c.name] = count + 1
            try:
                resolved = c.member.resolve(request, count, options, world_size)
                item = request.item(
                    resolved.spec, resolved.keys, c.step | round_bits, rank, world_size
                )
            except ConfigError as error:
                raise aggregator_error(coroutine.aggregator, c.name, number, str(error)) from None
            coroutine.results.append(request.result(resolved.spec, item, rank, world_size))
            part = parts.get(resolved.route)
            if part is None:
                part = parts[resolved.route] = _Part(resolved.route)
            part.specs.append(resolved.spec)
            part.items.append(item)
    return asking, [part.prepared(owner) for part in parts.values()]


@dataclass
class _Part:
    """The contents of one collective of a round."""

    route: Route
    specs: list[Spec] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def prepared(self, owner: Owner) -> Part:
        route, device = self.route, self.items[0].values.device
        return prepare(owner, self.specs, route.options, route.operation, device), self.items


def rehearsed(
    owner: Owner, members: Sequence[Attached], reductions: Sequence[Request], options: Options
) -> list[Collective]:
    """Prepare the collectives that a scope's rounds will run: coroutines go through their rounds,
    and nothing is sent.

    Raises:
        ConfigError, Exception: as `advance`.
    """
    found: list[Collective] = []
    if owner.comm.world_size > 1:
        active = coroutines(members, reductions, owner.comm.rank, owner.comm.world_size)
        number = 0
        while active:
            active, parts = advance(owner, active, options, number)
            found += [collective for collective, _ in parts]
            number += 1
    return found
