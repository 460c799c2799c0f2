"""Owners and their tickets: who issues scopes on a process group, and in which order.

Owners are numbered as they are opened, which all ranks do in one order; their tickets as they are
issued. No number depends on when a message arrives.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gradwire.engine.core import Core, Place
from gradwire.engine.identity import MOST_WINDOW, call_tag, scope_tag
from gradwire.engine.streams import StreamFuture
from gradwire.engine.threads import Flight, Outcome, Work
from gradwire.engine.workers import Lane
from gradwire.errors import ConfigError

if TYPE_CHECKING:
    from gradwire.engine.communicator import Communicator
    from gradwire.engine.stream import StreamDriver, StreamWork

T = TypeVar("T")

_REMEMBERED = 64  # rounds that ended, which a peer's late report may still name


@dataclass(frozen=True)
class Issue:
    """One round, as ranks compare it.

    Attributes:
        digest: of everything that must be alike on all ranks.
        what: in words.
    """

    digest: int
    what: str


class Owner:
    """What issues scopes on one process group: a handle, or a stream of single collectives.

    Args:
        comm: of the group.
        serial: how many of its kind the group had before.
        name: in errors.
        window: how many tickets may be admitted at a time, 1 to 16.
        single: whether every ticket is one collective that the user called.

    Attributes:
        serial: how many of its kind the group had before.
        key: its name among ranks.
        error: what broke it, or None.
        closed: whether it issues no further ticket.
        kept: what is prepared once and used again, the least used first.
        agreed: digests on which ranks agree, or are about to, by their place, with the agreement.
        made: how many agreements were begun.
        preparing: held while these are looked up.
        lanes: those of tickets that have been returned, for later ones.
    """

    def __init__(
        self, comm: Communicator, serial: int, name: str, window: int, single: bool
    ) -> None:
        if not 1 <= window <= MOST_WINDOW:
            raise ConfigError(f"window={window}: 1 to {MOST_WINDOW} scopes may be under way")
        self.comm = comm
        self.serial = serial
        self.name = name
        self.single = single
        self.error: BaseException | None = None
        self.closed = False
        self.kept: OrderedDict[Hashable, object] = OrderedDict()
        self.agreed: dict[int, tuple[int, Future[int]]] = {}
        self.made = 0
        self.preparing = threading.Lock()
        self.lock = threading.Lock()
        # Whoever called a collective may destroy the group when it has ended; gloo's work, and with
        # it connections and the store, would live on as long as somebody waits for it.
        self.core = Core(window, until_sent=single)
        self.lanes: list[tuple[Lane, Lane]] = []
        self._tickets: dict[Place, Ticket] = {}
        self._recent: deque[tuple[tuple[int, int], Issue]] = deque(maxlen=_REMEMBERED)
        self._pid = os.getpid()
        self.key = f"{'stream' if single else 'owner'} {serial}"

    def ticket(self) -> Ticket:
        """The next one, in order.

        Raises:
            TransportError: the group, or this owner, is broken.
            ConfigError: in a forked child.
        """
        if os.getpid() != self._pid:
            raise ConfigError(
                "this process was forked after gradwire had begun to use its process group, whose "
                "threads and connections a child does not have: start workers with 'spawn', or "
                "make the process group in the child"
            )
        self.comm.check()
        if self.error is not None:
            raise self.error
        with self.lock:
            place = self.core.issue()
            ticket = self._tickets[place] = Ticket(self, place)
        return ticket

    def new_lanes(self) -> tuple[Lane, Lane]:
        """One for receives, one for sends."""
        return self.comm.flights.lane("inbound", self), self.comm.flights.lane("outbound", self)

    def oldest(self) -> Ticket | None:
        """The oldest ticket that has a round under way, or None."""
        with self.lock:
            places = self.core.outstanding
            return next((t for p in places if (t := self._tickets[p]).issue is not None), None)

    def issued(self, number: int, round_number: int) -> Issue | None:
        """What this rank issued as that round of that ticket, if it has and still knows."""
        with self.lock:
            for ticket in self._tickets.values():
                if ticket.place.number == number and ticket.rounds == round_number:
                    return ticket.issue
            return next((i for key, i in self._recent if key == (number, round_number)), None)

    @property
    def returned(self) -> int:
        """How many tickets have been returned."""
        with self.lock:
            return self.core.returned

    @property
    def over(self) -> bool:
        """Whether it issues nothing more, and all that it issued has ended."""
        with self.lock:
            return self.closed and self.core.returned == self.core.issued

    def note(self, ticket: Ticket) -> None:
        """Remember what a ticket's round was, now that it is over."""
        if ticket.issue is not None:
            self._recent.append(((ticket.place.number, ticket.rounds), ticket.issue))

    def forget(self) -> None:
        """Let go of returned tickets; the lock is held."""
        for place in [p for p in self._tickets if p.returned]:
            self.lanes.append(self._tickets.pop(place).lanes)


class Ticket:
    """One scope: its rounds run one after the other.

    Attributes:
        place: in the owner's order.
        issue: the latest round, or None before the first.
        rounds: the number of that round, from 0.
        since: when it began (time.monotonic).
        is_prepared: whether ranks have agreed on it, and its kernels are there.
        lanes: inbound and outbound, of its waits, before which no other ticket's stand.
    """

    def __init__(self, owner: Owner, place: Place) -> None:
        self.owner = owner
        self.place = place
        self.issue: Issue | None = None
        self.rounds = 0
        self.since = 0.0
        self.is_prepared = False
        self.lanes = owner.lanes.pop() if owner.lanes else owner.new_lanes()

    def tag(self, tags: int, slot: int) -> int:
        """Of a message of the round under way, whose layout has range `tags`, or that digest."""
        number = self.place.number
        if self.owner.single:
            return call_tag(self.owner.serial, tags, number, slot)
        return scope_tag(tags, number, self.rounds, slot)

    def begin(self, issue: Issue, ready: Future[T], make: Callable[[T], Work]) -> Future[Outcome]:
        """Start the next round as soon as `ready` has ended well.

        Args:
            issue: what it is.
            ready: what is prepared; `make` gets it, on this thread if it is there.

        Returns:
            A future that ends with the round, or with the error that prevented it.
        """
        comm = self.owner.comm
        flight = self._issue(issue, Future())
        ready.add_done_callback(lambda ended: comm.flights.launch(flight, ended, make))
        return flight.future

    def begin_in_order(
        self, issue: Issue, stream: StreamDriver, make: Callable[[], StreamWork]
    ) -> Future[Outcome]:
        """Queue the next round on a stream, now; the future has ended, or the group breaks."""
        flight = self._issue(issue, StreamFuture(stream.stream))
        self.owner.comm.flights.queue(flight, stream, make)
        return flight.future

    def _issue(self, issue: Issue, future: Future[Outcome]) -> Flight:
        owner = self.owner
        with owner.lock:
            owner.note(self)
            owner.core.expect(self.place)
            self.rounds = self.place.rounds
            self.issue, self.since, self.is_prepared = issue, time.monotonic(), False
        flight = Flight(self, future)
        owner.comm.flights.expect(flight)
        owner.comm.watch.compare(self, issue)
        return flight

    def close(self) -> None:
        """No further round; called once."""
        with self.owner.lock:
            actions = self.owner.core.close(self.place)
            self.owner.note(self)
            self.owner.forget()
        self.owner.comm.flights.perform(actions)
