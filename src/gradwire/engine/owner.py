"""Owners and their tickets: the issue order of scopes on a process group.

Owners are numbered in the order in which they are opened, which is the same on all ranks; tickets
in the order in which they are issued. No number depends on when a message arrives.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from gradwire.control import Ranks
from gradwire.engine.core import Actions, Core, Place
from gradwire.engine.cuda_streams import StreamFuture
from gradwire.engine.identity import LAYOUTS, MOST_WINDOW, call_tag, scope_tag
from gradwire.engine.runs import Flight, Outcome, Work
from gradwire.engine.workers import TicketLanes
from gradwire.errors import ConfigError, again

if TYPE_CHECKING:
    from gradwire.engine.communicator import Communicator
    from gradwire.engine.stream_driver import StreamDriver, StreamWork

T = TypeVar("T")

_REMEMBERED = 64  # ended rounds that a peer's late report may still name


@dataclass(frozen=True)
class Issue:
    """The description of a round that ranks compare.

    Attributes:
        digest: of everything that must be equal on all ranks.
        what: a description for errors.
        why: computes a detail to append to `what`, when the text is needed.
    """

    digest: int
    what: str
    why: Callable[[], str] | None = None

    def __str__(self) -> str:
        return self.what if self.why is None else f"{self.what} {self.why()}"


class Owner:
    """An issuer of scopes on one process group: a handle, or a stream of single collectives.

    Args:
        comm: the group's communicator.
        serial: how many of its kind the group had before.
        name: for errors.
        window: how many tickets may be admitted at a time, 1 to 16.
        single: whether every ticket is one collective that the user called.
        advice: for the error where ranks issue different rounds.

    Attributes:
        serial: how many of its kind the group had before.
        key: its name, the same on all ranks.
        error: what broke it, or None.
        closed: whether it issues no further ticket.
        kept: LRU cache of prepared single collectives, least recently used first.
        programs: of its scopes, by what they run, while anyone holds them.
        scopes: plan version -> the programs of its scopes.
        held: name of a tag range -> how many programs use it; of another name, it stays in use.
        agreed: place -> (digest that ranks agree on or are comparing, the agreement).
        made: how many agreements were begun.
        preparing: lock of `kept`, `programs`, `agreed` and `made`.
        lanes: lanes of returned tickets, for reuse.
        issued_by: the thread that issued the latest ticket, or opened it; None: several threads
            issue single collectives, and none of them is known to issue the next.
        interrupted: why this rank may never issue what its peers wait for, which ends the owner if
            one does; None: it goes on.
        awaited_by: the thread that waits for its tickets, and issues nothing meanwhile; or None.
        calling: held by the thread that is in a user's call.
    """

    def __init__(
        self,
        comm: Communicator,
        serial: int,
        name: str,
        window: int,
        single: bool,
        advice: str = "all ranks must make the same calls in the same order",
    ) -> None:
        if not 1 <= window <= MOST_WINDOW:
            raise ConfigError(f"window={window}: give 1 to {MOST_WINDOW} scopes in flight")
        self.comm = comm
        self.serial = serial
        self.name = name
        self.single = single
        self.advice = advice
        self.error: BaseException | None = None
        self.interrupted: BaseException | None = None
        self.closed = False
        self.kept: OrderedDict[Hashable, object] = OrderedDict()
        self.programs: WeakValueDictionary[Hashable, object] = WeakValueDictionary()
        self.scopes: dict[int, dict[Hashable, Any]] = {}
        self.held: Counter[str] = Counter()
        self.agreed: dict[int, tuple[int, Future[int]]] = {}
        self.made = 0
        self.preparing = threading.Lock()
        self.lock = threading.Lock()
        # The caller of a single collective may destroy the group when it has ended. A send that is
        # still awaited would keep gloo's work alive, and with it connections and the store.
        self.core = Core(window, until_sent=single)
        self.lanes: list[TicketLanes] = []
        self.issued_by: int | None = threading.get_ident()
        self.awaited_by: int | None = None
        self.calling = threading.RLock()
        self._tickets: list[Ticket] = []  # that have not been returned, oldest first
        self._recent: deque[tuple[tuple[int, int], Issue]] = deque(maxlen=_REMEMBERED)
        self._ended: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # (ticket, its rounds)
        self._pid = os.getpid()
        self.key = f"{'stream' if single else 'owner'} {serial}"

    def ticket(self, version: int = 0) -> Ticket:
        """Issue the next ticket; `version`: the newest plan that this rank can use by now.

        Raises:
            TransportError: the group, or this owner, is broken.
            ConfigError: in a forked child.
        """
        self.check_process()
        self.check()
        caller = threading.get_ident()
        with self.lock:
            several = self.single and self.core.issued and self.issued_by != caller
            self.issued_by = None if several else caller
            ticket = self.core.issue(Ticket(self, version))
            self._tickets.append(ticket)
        return ticket

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the owner's."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ConfigError in a forked child."""
        if self.is_forked:
            raise ConfigError(
                "this process was forked after gradwire had begun to use its process group; a "
                "forked child has none of its threads and connections: start workers with "
                "'spawn', or make the process group in the child"
            )

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Within it the calling thread waits for tickets of this owner alone."""
        caller = threading.get_ident()
        self.awaited_by = None if self.single and self.issued_by != caller else caller
        try:
            yield
        finally:
            self.awaited_by = None

    def check(self) -> None:
        """Raise the error that broke the group or this owner, if any."""
        self.comm.check()
        if self.error is not None:
            raise again(self.error)

    @property
    def ranks(self) -> Ranks:
        """The ranks of its group; what they tell is named after this owner. A TransportError ends
        their wait alone, until the group is found broken."""
        return Ranks([self.comm.member], self.key, self.check)

    def agreement(self, digest: int) -> tuple[Future[int], str | None]:
        """(the agreement of all ranks on what has this digest, its name if it has yet to begin);
        `preparing` is held.

        Agreements are cached by digest, not by what ranks prepare, since they may differ in options
        that are local. Single collectives have one order: their agreements are numbered, so that
        calls that differ are compared, and one replaces another with the same tags. What handles
        prepare comes in any order: there, the digest names the agreement.
        """
        place, name = digest % LAYOUTS if self.single else digest, None
        if not self.agrees(digest):
            name = f"{self.key}/{self.made if self.single else f'{digest:x}'}"
            self.made += 1
            self.agreed[place] = digest, Future()
        return self.agreed[place][1], name

    def agrees(self, digest: int) -> bool:
        """Whether the ranks have agreed on what has this digest, or are comparing it."""
        held, agreement = self.agreed.get(digest % LAYOUTS if self.single else digest, (0, None))
        if held != digest or agreement is None:
            return False
        failed = agreement.done() and agreement.exception() is not None
        # What a handle prepares comes from its plan: if rejected, it would be rejected again.
        return not (failed and self.single)

    def new_lanes(self) -> TicketLanes:
        """New lanes for a ticket."""
        return TicketLanes(*(self.comm.runs.lane(name, self) for name in TicketLanes._fields))

    def oldest(self) -> Ticket | None:
        """The oldest ticket that has a round in flight, or None."""
        with self.lock:
            return next((ticket for ticket in self._tickets if ticket.issue is not None), None)

    def issued(self, number: int, round_number: int) -> Issue | None:
        """What this rank issued as that round of that ticket; None: not issued, or forgotten."""
        with self.lock:
            for ticket in self._tickets:
                if ticket.number == number and ticket.rounds == round_number:
                    return ticket.issue
            return next((i for key, i in self._recent if key == (number, round_number)), None)

    def rounds_of(self, number: int) -> int | None:
        """How many rounds a ticket had; None: it has not ended, or is forgotten."""
        with self.lock:
            return next((rounds for ended, rounds in self._ended if ended == number), None)

    @property
    def returned(self) -> int:
        """How many tickets have been returned."""
        with self.lock:
            return self.core.returned

    @property
    def over(self) -> bool:
        """Whether it is closed, and all its tickets have been returned, or it is broken."""
        with self.lock:
            ended = self.error is not None or self.core.returned == self.core.issued
            return self.closed and ended

    def note(self, ticket: Ticket) -> None:
        """Remember a ticket's round that has ended."""
        if ticket.issue is not None:
            self._recent.append(((ticket.number, ticket.rounds), ticket.issue))

    def end(self, ticket: Ticket) -> None:
        """Remember a ticket that has no further round; the lock is held."""
        self.note(ticket)
        self._ended.append((ticket.number, ticket.rounds + 1))

    def forget(self) -> None:
        """Drop returned tickets; the lock is held."""
        self.lanes += [ticket.lanes for ticket in self._tickets if ticket.returned]
        self._tickets = [ticket for ticket in self._tickets if not ticket.returned]


class Ticket(Place):
    """One scope: its rounds run one after the other, the collectives of a round side by side.

    Attributes:
        issue: the latest round, or None before the first.
        rounds: the number of that round, from 0; -1 before the first.
        since: when the round began (time.monotonic).
        is_prepared: whether ranks have agreed on the round, and its kernels are loaded.
        lanes: for its waits only, so that no other ticket's waits delay them.
        version: the least plan version among its own and those that its messages have brought:
            after an all-reduce, the least of all ranks.
    """

    def __init__(self, owner: Owner, version: int) -> None:
        super().__init__()
        self.owner = owner
        self.version = version
        self.issue: Issue | None = None
        self.rounds = -1
        self.since = 0.0
        self.is_prepared = False
        self.lanes = owner.lanes.pop() if owner.lanes else owner.new_lanes()

    def tag(self, tags: int, slot: int) -> int:
        """The tag of a message of the current round; `tags`: its layout's tag range or digest."""
        if self.owner.single:
            return call_tag(self.owner.serial, tags, self.number, slot)
        return scope_tag(tags, self.number, self.rounds, slot)

    def under_way(self) -> tuple[tuple[int, int], Issue | None, float]:
        """The current round: (ticket number, round number), its issue, its start time. Thread-safe
        against `next_round`."""
        with self.owner.lock:
            return (self.number, self.rounds), self.issue, self.since

    def next_round(self, issue: Issue) -> None:
        """Start the next round; all collectives of the one before have their results."""
        with self.owner.lock:
            self.owner.note(self)
            self.rounds += 1
            self.issue, self.since, self.is_prepared = issue, time.monotonic(), False
        self.owner.comm.watchdog.compare(self, issue)

    def begin(
        self, ready: Future[T], makes: Sequence[Callable[[T], Work]]
    ) -> list[Future[Outcome]]:
        """Start the collectives of this round, in order, as soon as `ready` succeeds.

        Args:
            ready: the preparation; `makes` get its result, on this thread if it is there already.

        Returns:
            Futures that end with each collective, or with the error that prevented it.
        """
        runs = self.owner.comm.runs
        flights = [self._expect(Future()) for _ in makes]
        futures = [flight.future for flight in flights]
        # A future keeps its callbacks after it has called them, and `ready` is kept from round to
        # round: it must not keep what this round moves.
        held = [*zip(flights, makes, strict=True)]

        def launch(ended: Future[T]) -> None:
            while held:
                flight, make = held.pop(0)
                runs.launch(flight, ended, make)

        ready.add_done_callback(launch)
        return futures

    def begin_in_order(
        self, stream: StreamDriver, make: Callable[[], StreamWork]
    ) -> Future[Outcome]:
        """Queue a collective of this round on a stream; on return the future has ended, or the
        group is about to break."""
        flight = self._expect(StreamFuture(stream.stream))
        self.owner.comm.runs.queue(flight, stream, make)
        return flight.future

    def _expect(self, future: Future[Outcome]) -> Flight:
        with self.owner.lock:
            self.owner.core.expect(self)
        flight = Flight(self, future)
        self.owner.comm.runs.expect(flight)
        return flight

    def close(self) -> None:
        """No further round follows; called once."""
        owner = self.owner

        def close() -> Actions:
            actions = owner.core.close(self)
            owner.end(self)
            owner.forget()
            return actions

        owner.comm.runs.tell(owner, close)
        owner.comm.watchdog.ended(self)
