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

from gradwire.engine.core import Actions, Core, Place
from gradwire.engine.identity import MOST_WINDOW, call_tag, scope_tag
from gradwire.engine.streams import StreamFuture
from gradwire.engine.threads import Flight, Outcome, Work
from gradwire.engine.workers import TicketLanes
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
        why: goes behind them, where words are needed.
    """

    digest: int
    what: str
    why: Callable[[], str] | None = None

    def __str__(self) -> str:
        return self.what if self.why is None else f"{self.what} {self.why()}"


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
        retired: layouts, by the names of their ranges of tags, that it will not use for long.
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
        self.retired: set[str] = set()
        self.agreed: dict[int, tuple[int, Future[int]]] = {}
        self.made = 0
        self.preparing = threading.Lock()
        self.lock = threading.Lock()
        # Whoever called a collective may destroy the group when it has ended; gloo's work, and with
        # it connections and the store, would live on as long as somebody waits for it.
        self.core = Core(window, until_sent=single)
        self.lanes: list[TicketLanes] = []
        self._tickets: dict[Place, Ticket] = {}
        self._recent: deque[tuple[tuple[int, int], Issue]] = deque(maxlen=_REMEMBERED)
        self._ended: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # tickets, their rounds
        self._pid = os.getpid()
        self.key = f"{'stream' if single else 'owner'} {serial}"

    def ticket(self, version: int = 0) -> Ticket:
        """The next one, in order; of a scope before which this rank can use that plan version.

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
        self.check()
        with self.lock:
            place = self.core.issue()
            ticket = self._tickets[place] = Ticket(self, place, version)
        return ticket

    def check(self) -> None:
        """Raises what broke the group, or this owner, if anything did."""
        self.comm.check()
        if self.error is not None:
            raise self.error

    def new_lanes(self) -> TicketLanes:
        """Those of a ticket."""
        return TicketLanes(*(self.comm.flights.lane(name, self) for name in TicketLanes._fields))

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

    def rounds_of(self, number: int) -> int | None:
        """How many rounds a ticket had, if it has ended and this rank still knows."""
        with self.lock:
            return next((rounds for ended, rounds in self._ended if ended == number), None)

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

    def end(self, ticket: Ticket) -> None:
        """Remember what a ticket was, now that it has no further round; the lock is held."""
        self.note(ticket)
        self._ended.append((ticket.place.number, ticket.rounds + 1))

    def forget(self) -> None:
        """Let go of returned tickets; the lock is held."""
        for place in [p for p in self._tickets if p.returned]:
            self.lanes.append(self._tickets.pop(place).lanes)


class Ticket:
    """One scope: its rounds run one after the other, the collectives of a round side by side.

    Attributes:
        place: in the owner's order.
        issue: the latest round, or None before the first.
        rounds: the number of that round, from 0; -1 before the first.
        since: when it began (time.monotonic).
        is_prepared: whether ranks have agreed on it, and its kernels are there.
        lanes: of its waits, before which no other ticket's stand.
        version: the least plan version of those that its messages have brought, and its own: after
            an all-reduce, the least of all ranks'.
    """

    def __init__(self, owner: Owner, place: Place, version: int) -> None:
        self.owner = owner
        self.place = place
        self.version = version
        self.issue: Issue | None = None
        self.rounds = -1
        self.since = 0.0
        self.is_prepared = False
        self.lanes = owner.lanes.pop() if owner.lanes else owner.new_lanes()

    def tag(self, tags: int, slot: int) -> int:
        """Of a message of the round under way, whose layout has range `tags`, or that digest."""
        number = self.place.number
        if self.owner.single:
            return call_tag(self.owner.serial, tags, number, slot)
        return scope_tag(tags, number, self.rounds, slot)

    def under_way(self) -> tuple[tuple[int, int], Issue | None, float]:
        """Of the round under way: (numbers of ticket and round), what it is, and since when; on any
        thread, while another may begin the next."""
        with self.owner.lock:
            return (self.place.number, self.rounds), self.issue, self.since

    def next_round(self, issue: Issue) -> None:
        """What begins from now on is the next round; all that began before has its result."""
        with self.owner.lock:
            self.owner.note(self)
            self.rounds += 1
            self.issue, self.since, self.is_prepared = issue, time.monotonic(), False
        self.owner.comm.watch.compare(self, issue)

    def begin(self, ready: Future[T], make: Callable[[T], Work]) -> Future[Outcome]:
        """Start a collective of this round as soon as `ready` has ended well.

        Args:
            ready: what is prepared; `make` gets it, on this thread if it is there.

        Returns:
            A future that ends with the collective, or with the error that prevented it.
        """
        comm = self.owner.comm
        flight = self._expect(Future())
        ready.add_done_callback(lambda ended: comm.flights.launch(flight, ended, make))
        return flight.future

    def begin_in_order(
        self, stream: StreamDriver, make: Callable[[], StreamWork]
    ) -> Future[Outcome]:
        """Queue a collective of this round on a stream, now; the future has ended, or the group
        breaks."""
        flight = self._expect(StreamFuture(stream.stream))
        self.owner.comm.flights.queue(flight, stream, make)
        return flight.future

    def _expect(self, future: Future[Outcome]) -> Flight:
        with self.owner.lock:
            self.owner.core.expect(self.place)
        flight = Flight(self, future)
        self.owner.comm.flights.expect(flight)
        return flight

    def close(self) -> None:
        """No further round; called once."""
        owner = self.owner

        def close() -> Actions:
            actions = owner.core.close(self.place)
            owner.end(self)
            owner.forget()
            return actions

        owner.comm.flights.tell(owner, close)
        owner.comm.watch.ended(self)
