"""Rounds: drives the aggregators of a scope and fuses what they yield.

Each aggregator has one coroutine over the parameters that it serves. All coroutines advance in
step. What they yield in one round becomes one collective for each operation and way of running it,
side by side; when all have ended, each coroutine gets its results, and the next round begins. No
thread waits for a round: its end starts the next, on the lane of kernels. All rounds have one
ticket, which is taken before the first: so the order of scopes is the order in which they were
started, however their rounds overtake each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch

from gradwire.aggregators.asked import Way
from gradwire.aggregators.attached import Attached
from gradwire.aggregators.contract import wrong
from gradwire.aggregators.coroutine import Coroutine
from gradwire.aggregators.protocol import Aggregator, Observation
from gradwire.collectives import Collective, Item, Operation, Options, prepare, start_round
from gradwire.engine import Outcome, Owner
from gradwire.errors import ConfigError
from gradwire.partition import Spec

Done = Callable[[BaseException | None, list[Outcome]], None]
Observer = Callable[[Observation], None]


class Rounds:
    """One scope's way from gradients to averages.

    Args:
        owner: whose scope it is.
        members: its parameters.
        gradients: theirs, 1-D and contiguous, replaced by the averages.
        options: of collectives that do not say otherwise.
        done: called once, with the error or None, and with what the collectives took; from the
            engine's thread, or from `start`.
        observe: is told each parameter's average.
        version: of the plan that this rank can use; see `Owner.ticket`.
        plan: the version of that in force, for errors.

    Raises:
        TransportError, ConfigError: the group is broken (see `Owner.ticket`); `done` is not called.
    """

    def __init__(
        self,
        owner: Owner,
        members: Sequence[Attached],
        gradients: Sequence[torch.Tensor],
        options: Options,
        done: Done,
        observe: Observer | None = None,
        version: int = 0,
        plan: int = 0,
    ) -> None:
        self.owner = owner
        self.ticket = owner.ticket(version)
        self.members = members
        self.gradients = gradients
        self.options = options
        self.done = done
        self.observe = observe
        self.plan = plan
        self.begun = time.perf_counter()
        self.outcomes: list[Outcome] = []
        self.active: list[Coroutine] = []
        self._lock = threading.Lock()
        self._before: list[torch.Tensor] = []  # what gradients were, for an observer
        self._observed: list[Coroutine] = []
        self._told = False
        self._left = 0  # collectives of the round that have not ended
        self._error: BaseException | None = None

    def start(self) -> None:
        """Run every coroutine to its first collectives, and begin the first round."""
        rank, world_size = self.owner.comm.rank, self.owner.comm.world_size
        try:
            if self.observe is not None:
                self._before = [gradient.clone() for gradient in self.gradients]
            for member, gradient in zip(self.members, self.gradients, strict=True):
                member.pay(gradient)
            if world_size > 1:  # one rank alone has its averages
                self.active = coroutines(self.members, self.gradients, rank, world_size)
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
        """The least version that any rank has given, once all has ended; None if that is unknown:
        no collective has carried every rank's word to every other."""
        return self.ticket.version if self._told or self.owner.comm.world_size == 1 else None

    def _advance(self, number: int) -> None:
        """Resume every coroutine; what they ask for is round `number`."""
        try:
            self.active, parts = advanced(self.owner, self.active, self.options, number)
            for collective, items in parts:
                collective.check(items)
        except BaseException as error:
            # Peers are in a round that this rank will not begin.
            self.owner.comm.fail_owner(self.owner, error)
            raise
        if parts:
            self._left = len(parts)
            self._told |= any(collective.tells_all for collective, _ in parts)
            why = partial(_in_words, [one.aggregator for one in self.active], self.plan)
            for running in start_round(self.ticket, parts, why):
                running.add_done_callback(partial(self._ended, number))
        elif self.active:
            self._advance(number)  # empty lists
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
            self._resume(number + 1)  # on the issuing thread: rounds keep the program's order
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
            self._tell(self.observe)
        self.done(error, self.outcomes)

    def _tell(self, observe: Observer) -> None:
        seconds = time.perf_counter() - self.begun
        sent = {
            context.name: part
            for coroutine in self._observed
            for context, part in zip(coroutine.contexts, coroutine.sent or (), strict=False)
        }
        columns = zip(self.members, self._before, self.gradients, strict=True)
        for member, gradient, average in columns:
            what = (member.name, member.step - 1, gradient, average, sent.get(member.name))
            observe(Observation(*what, seconds))


def _in_words(aggregators: Sequence[Aggregator], plan: int) -> str:
    return f"asked for by {', '.join(map(str, aggregators))}, plan {plan}"


def coroutines(
    members: Sequence[Attached], gradients: Sequence[torch.Tensor], rank: int, world_size: int
) -> list[Coroutine]:
    """One for each aggregator, in the order in which parameters first have them."""
    served: dict[int, list[int]] = {}  # an aggregator, by its identity -> its parameters
    for index, member in enumerate(members):
        served.setdefault(id(member.aggregator), []).append(index)
    made, of = [], (gradients[0].device, rank, world_size)
    for indices in served.values():
        mine = [gradients[i] for i in indices]
        contexts = [members[i].context(gradients[i], *of) for i in indices]
        made.append(Coroutine(members[indices[0]].aggregator, contexts, mine))
    return made


Part = tuple[Collective, list[Item]]


def advanced(
    owner: Owner, active: Sequence[Coroutine], options: Options, number: int
) -> tuple[list[Coroutine], list[Part]]:
    """Resume coroutines: (those that ask for more, the collectives of round `number`).

    Raises:
        ConfigError: what an aggregator may not do, or what is not legal.
        Exception: what an aggregator raises.
    """
    rank, world_size = owner.comm.rank, owner.comm.world_size
    asking = []
    parts: dict[Way, _Part] = {}
    counts: dict[str, int] = {}  # requests of each parameter so far
    # A round of its own draws random numbers of its own.
    round_bits = number << 48
    for coroutine in active:
        if coroutine.resume(number):
            asking.append(coroutine)
        for request in coroutine.asked:
            c = coroutine.context_of(request, number)
            count = counts.get(c.name, 0)
            counts[c.name] = count + 1
            try:
                how = c.member.asked(request, count, options, world_size)
                item = request.item(how.spec, how.keys, c.step | round_bits, rank, world_size)
            except ConfigError as error:
                raise wrong(coroutine.aggregator, c.name, number, str(error)) from error
            coroutine.results.append(request.result(how.spec, item, rank, world_size))
            part = parts.get(how.way)
            if part is None:
                part = parts[how.way] = _Part(how.way)
            part.specs.append(how.spec)
            part.items.append(item)
    return asking, [part.prepared(owner) for part in _joined(parts.values())]


@dataclass
class _Part:
    """What one collective of a round has."""

    way: Way
    specs: list[Spec] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def prepared(self, owner: Owner) -> Part:
        way, device = self.way, self.items[0].values.device
        return prepare(owner, self.specs, way.options, way.operation, device), self.items


def _joined(parts: Iterable[_Part]) -> list[_Part]:
    """Those that were asked for in unlike words and run alike, together."""
    joined: dict[tuple[Operation, Options], _Part] = {}
    for part in parts:
        known = joined.setdefault((part.way.operation, part.way.options), part)
        if known is not part:
            known.specs += part.specs
            known.items += part.items
    return list(joined.values())


def rehearsed(
    owner: Owner, members: Sequence[Attached], gradients: Sequence[torch.Tensor], options: Options
) -> list[Collective]:
    """The collectives that a scope's rounds will run, being prepared: coroutines go through their
    rounds, and nothing is sent.

    Raises:
        ConfigError, Exception: as `advanced`.
    """
    found: list[Collective] = []
    if owner.comm.world_size > 1:
        active = coroutines(members, gradients, owner.comm.rank, owner.comm.world_size)
        number = 0
        while active:
            active, parts = advanced(owner, active, options, number)
            found += [collective for collective, _ in parts]
            number += 1
    return found
