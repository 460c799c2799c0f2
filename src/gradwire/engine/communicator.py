"""What the scopes of one process group share: transport, owners, memory, and what peers tell.

A communicator is opened by its first use: the ranks then make their ends of the transport,
together, on a thread that nobody else waits for. Several groups may be opened in another order on
each rank.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradwire import control
from gradwire.control import Member
from gradwire.engine.flights import Flights
from gradwire.engine.owner import Owner
from gradwire.engine.pool import Pools
from gradwire.engine.process import Engine
from gradwire.engine.ranges import Ranges
from gradwire.engine.stream import StreamDriver
from gradwire.engine.topology import Facts, Topology
from gradwire.engine.watch import Watch
from gradwire.errors import GradwireError, TransportError
from gradwire.transport import Transport
from gradwire.transport.link import OrderedLink
from gradwire.transport.torch_p2p import destroyed

log = logging.getLogger("gradwire")

T = TypeVar("T")

_LINGER_S = 2.0  # for sends of results that are in place, on closing


@dataclass(frozen=True)
class Seat:
    """This rank's place in a process group.

    Attributes:
        rank, world_size: as in torch, within the group.
        timeout: seconds that a wait may last.
        store: shared by the group's ranks, and by nobody else.
    """

    rank: int
    world_size: int
    timeout: float
    store: dist.Store


class Communicator:
    """One process group's part of the engine, on one rank.

    Args:
        transport: moves the bytes; or makes what does, where `seat` says for whom.
        window: scopes that a stream of single collectives may have under way at a time (two overlap
            encoding with sending).
        links: what carries messages between tensors of a device in stream order; None: nothing
            does, so that they go by way of `transport`. All ranks ask, and are told alike.
        seat: where `transport` is made later.

    Attributes:
        calls: the owner of single collectives that users call.
        counted: how many of them named no step. Each draws random numbers of its own.
        pools: the memory of scopes under way.
        flights: the rounds under way.
        alive: asked from time to time; False: the process group has gone.
    """

    alive: Callable[[], bool] = staticmethod(lambda: True)

    def __init__(
        self,
        transport: Transport | Callable[[], Transport],
        window: int = 2,
        links: Callable[[torch.device], OrderedLink | None] = lambda device: None,
        seat: Seat | None = None,
    ) -> None:
        if seat is None:
            made: Any = transport
            seat = Seat(made.rank, made.world_size, made.timeout, made.board)
        self.rank, self.world_size, self.timeout = seat.rank, seat.world_size, seat.timeout
        self._failing = False
        engine = Engine.current()
        self.workers = engine.workers
        self._transport: Transport | None = None if callable(transport) else transport
        self._make = transport if callable(transport) else None
        self.links = links
        self._streams: dict[torch.device, StreamDriver | None] = {}
        self._lock = threading.Lock()
        self._opening = threading.RLock()
        self._agreements = itertools.count()
        self._topology: Topology | None = None
        self.flights = Flights(engine.workers, lambda: self.transport, self.fail)
        self.pools = Pools(lambda: self.transport.store)
        self.watch = Watch(self)
        self.owners: list[Owner] = []
        self._serial = 0
        self._ranges = Ranges(self._first)
        self._frontier: dict[str, int] = {}
        self.streams = [Owner(self, n, name, window, True) for n, name in enumerate(_STREAMS)]
        self.calls, self.blobs = self.streams
        self.counted = 0
        engine.communicators.add(self)
        self.member: Member | None = None
        if self.world_size > 1:
            self.member = engine.channel.join(
                seat.store, self.rank, self.world_size, self.timeout, self.watch
            )

    def count(self) -> int:
        """The number of a call that names no step; it is the same on all ranks, which make the same
        calls."""
        with self._lock:
            self.counted += 1
            return self.counted - 1

    # ---- opening -------------------------------------------------------------------------------

    @property
    def transport(self) -> Transport:
        """What moves the bytes; the first call waits for the other ranks' first calls.

        Raises:
            TransportError: a peer did not answer, or the group is broken.
        """
        if self._transport is None:
            with self._opening:
                if self._transport is None:
                    self.check()
                    assert self._make is not None
                    made = self._make()
                    self._transport, self._make = made, None
                    if self.error is not None:
                        made.close()
                        raise self.error
        return self._transport

    @property
    def topology(self) -> Topology:
        """Which ranks share a machine, and whether all messages stay in memory: alike on all ranks.

        The first call waits for the other ranks' first calls.

        Raises:
            TransportError: a peer did not answer.
        """
        with self._opening:
            if self._topology is None:
                mine = Facts.here(self.transport.in_memory)
                self._topology = Topology.of(self.rank, self.exchange("topology", mine))
            return self._topology

    @property
    def opened_topology(self) -> Topology | None:
        """The topology, if it is known by now."""
        return self._topology

    @property
    def keeps_order(self) -> bool:
        """Whether some device's rounds keep a stream's order, as far as it is known by now."""
        return any(stream is not None for stream in list(self._streams.values()))

    def died(self) -> int | None:
        """A peer on this machine whose process has ended, as far as that is known; or None."""
        return None if self._topology is None else self._topology.over()

    def exchange(self, key: str, facts: Facts) -> list[Facts]:
        """Every rank's facts, in rank order; `key` is used once."""
        if self.member is None:
            return [facts]
        return [Facts.unpack(b) for b in self.member.exchange(key, facts.pack()).result()]

    def agree(self, what: str, description: list[str]) -> int:
        """Make sure that every rank holds the same `description`; all ranks call in one order.

        Returns:
            A digest: what message headers carry.

        Raises:
            ConfigError: on every rank, naming the first line that differs and who holds what.
            TransportError: a peer did not answer.
        """
        return self.agreement(f"group {next(self._agreements)}", what, description).result()

    def agreement(self, key: str, what: str, description: list[str]) -> Future[int]:
        """As `agree`, at its own pace; `key` names it on all ranks and is used once."""
        self.check()
        if self.member is None:
            alone: Future[int] = Future()
            alone.set_result(control.digest(1, what, description))
            return alone
        return self.member.agree(key, what, description)

    @property
    def opened(self) -> Transport | None:
        """The transport, if there is one by now."""
        return self._transport

    def all_owners(self) -> list[Owner]:
        """The streams of single collectives, and the handles."""
        return [*self.streams, *self.owners]

    def claim(self, owner: Owner, layout: str) -> int:
        """The range of tags of a layout of `owner`; see gradwire.engine.ranges.

        Raises:
            ConfigError: too many are in use.
            TransportError: the group's store is gone.
        """
        return self._ranges.claim(owner, layout)

    def _first(self, key: str, value: bytes) -> bytes:
        return value if self.member is None else self.member.first(key, value)

    # ---- owners and their rounds ---------------------------------------------------------------

    def owner(self, name: str, window: int = 2) -> Owner:
        """Open the next owner; all ranks do in one order."""
        with self._lock:
            serial, self._serial = self._serial, self._serial + 1
            owner = Owner(self, serial, name, window, False)
            self._drop_closed()
            self.owners.append(owner)
        self.watch.opened(owner)
        return owner

    def close_owner(self, owner: Owner) -> None:
        """`owner` issues no further ticket; what it has issued still ends."""
        with self._lock:
            owner.closed = True
            self._drop_closed()
        self.watch.closed(owner)

    def _drop_closed(self) -> None:
        """Forget the owners that are over, but for how far they came; the lock is held."""
        over = [owner for owner in self.owners if owner.over]
        self._frontier.update({owner.key: owner.returned for owner in over})
        self.owners = [owner for owner in self.owners if owner not in over]

    def stream(self, device: torch.device) -> StreamDriver | None:
        """What runs rounds of tensors on `device` where their messages keep a stream's order, else
        None. All ranks ask at once the first time.

        Raises:
            TransportError: the ranks do not find together.
        """
        if device not in self._streams:
            with self._opening:
                if device not in self._streams:
                    link = self.links(device)
                    stream = None
                    if link is not None:
                        stream = StreamDriver(link, self.pools.stream(device), self.fail)
                    self._streams[device] = stream
        return self._streams[device]

    @property
    def error(self) -> BaseException | None:
        """What broke this group, or None."""
        return self.flights.error

    def check(self) -> None:
        """Raises what broke this group, if anything did."""
        if self.error is not None:
            raise self.error

    # ---- failure and the end -------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """What happened here breaks the group, and peers are told."""
        if not self.first_to_fail():
            return  # another thread has met the same, a moment ago
        peer = error.peer if isinstance(error, TransportError) else None
        blamed = self.rank if peer is None else peer
        if self._transport is not None:
            self._transport.fail(blamed)
        self.watch.tell_failure(error, blamed, None)
        error = self.watch.explained(error, blamed)
        if not self.end(error):
            return
        if isinstance(error, GradwireError):
            log.error("%s", error)
        else:
            log.exception("gradwire: a task failed", exc_info=error)

    def first_to_fail(self) -> bool:
        """Whether the caller is the first to meet a failure, which it then has to end with."""
        with self._lock:
            first = not self._failing and self.error is None
            self._failing = True
        return first

    def end(self, error: BaseException) -> bool:
        """End every round, now and later, with `error`; False if an earlier error did."""
        return self.flights.end_all(error)

    def fail_owner(self, owner: Owner, error: BaseException) -> None:
        """What happened here breaks one owner: peers end their rounds of it, and only those."""
        if self.end_owner(owner, error):
            log.error("%s", error)
            self.watch.tell_failure(error, self.rank, owner)

    def end_owner(self, owner: Owner, error: BaseException) -> bool:
        """End every round of `owner`, now and later, with `error`; False: an earlier one did."""
        return self.flights.end_all(error, owner)

    def close(self) -> None:
        """The process group goes: rounds under way end in a TransportError."""
        if self.error is None:
            self._linger()
        # Peers first: once our callers go on, the store may end with this process.
        self.watch.leave(self._frontier | {o.key: o.returned for o in self.all_owners()})
        self.end(destroyed(self.rank))
        self.pools.close()
        for owner in self.all_owners():
            owner.kept.clear()
        if self._transport is not None:
            with suppress(TransportError):
                self._transport.close()

    def _linger(self) -> None:
        """Results may be in place here whose last sends are still on their way to a peer."""
        end = time.monotonic() + _LINGER_S
        owners = self.all_owners()
        while time.monotonic() < end and not self.flights:
            if all(owner.returned == owner.core.issued for owner in owners):
                return
            time.sleep(0.01)


_STREAMS = ("single collectives", "collectives of the backend")
