"""What the scopes of one process group share: transport, owners, memory, control messages.

The first use opens a communicator: the ranks then make their ends of the transport together, on a
worker thread. Ranks may open several groups in different orders.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradwire import control
from gradwire.control import Member, Ranks
from gradwire.engine.owner import Owner
from gradwire.engine.pool import Pools
from gradwire.engine.process import Engine
from gradwire.engine.runs import Runs
from gradwire.engine.stream_driver import StreamDriver
from gradwire.engine.tag_ranges import TagRanges
from gradwire.engine.topology import Topology, facts
from gradwire.engine.watchdog import Watchdog
from gradwire.engine.workers import ending
from gradwire.errors import GradwireError, TransportError, again, in_global_ranks
from gradwire.transport import Transport
from gradwire.transport.link import OrderedLink
from gradwire.transport.torch_p2p import destroyed

log = logging.getLogger("gradwire")

_LINGER_S = 2.0  # how long `close` waits for the sends of finished rounds


@dataclass(frozen=True)
class GroupInfo:
    """What a communicator needs to know of its process group.

    Attributes:
        rank, world_size: as in torch, within the group.
        timeout: seconds that a wait may last.
        store: shared by the group's ranks only.
        ranks: of its members in the whole job, in its order; None: they are equal.
    """

    rank: int
    world_size: int
    timeout: float
    store: dist.Store
    ranks: Sequence[int] | None = None


class Communicator:
    """One process group's part of the engine, on one rank.

    Args:
        transport: moves the bytes; or a function that makes the transport on first use.
        window: how many scopes a stream of single collectives may have in flight (two overlap
            encoding with sending).
        links: device -> the link that carries messages between its tensors in stream order, or
            None: messages then pass through `transport`. The result is the same on all ranks.
        info: required where `transport` is a function.

    Attributes:
        ranks: the members' numbers in the whole job.
        calls: the owner of single collectives that users call.
        backend_calls: the owner of single collectives that the backend calls.
        counted: the number of user calls without a given step; each draws its own random numbers.
        handles: how many were attached so far; equal on all ranks.
        pools: the memory of scopes in flight.
        runs: the collectives in flight.
        ranges: the tag ranges of its owners' programs.
        alive: polled; False once the process group is destroyed.
        stop_opening: called as this closes while the transport is being made; ends waits for that.
    """

    alive: Callable[[], bool] = staticmethod(lambda: True)
    stop_opening: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        transport: Transport | Callable[[], Transport],
        window: int = 2,
        links: Callable[[torch.device], OrderedLink | None] = lambda device: None,
        info: GroupInfo | None = None,
    ) -> None:
        if info is None:
            made: Any = transport
            info = GroupInfo(made.rank, made.world_size, made.timeout, made.board)
        self.rank, self.world_size, self.timeout = info.rank, info.world_size, info.timeout
        self.ranks: Sequence[int] = info.ranks or range(info.world_size)
        self._failing = False
        engine = Engine.current()
        self.workers = engine.workers
        self._transport: Transport | None = None if callable(transport) else transport
        self._make = transport if callable(transport) else None
        self.links = links
        self._streams: dict[torch.device, StreamDriver | None] = {}
        self._lock = threading.Lock()
        self._opening = threading.RLock()
        self._is_opening = False
        self._topology: Topology | None = None
        self.runs = Runs(engine.workers, lambda: self.transport, self.fail)
        self.pools = Pools(lambda: self.transport.store)
        self.watchdog = Watchdog(self)
        self.owners: list[Owner] = []
        self.ranges = TagRanges(self._first)
        self._frontier: dict[str, int] = {}
        names = "single collectives", "collectives of the backend"
        self.streams = [Owner(self, n, name, window, True) for n, name in enumerate(names)]
        self.calls, self.backend_calls = self.streams
        self._serial = self.counted = self.handles = 0
        engine.communicators.add(self)
        self.member: Member | None = None
        if self.world_size > 1:
            self.member = engine.channel.join(
                info.store, self.rank, self.world_size, self.timeout, self.watchdog
            )
            self.member.ranks = self.ranks
        self._ranks = Ranks([self.member], "", fail=self.fail)

    def count(self) -> int:
        """Number a call without a given step; all ranks make the same calls, so they agree."""
        with self._lock:
            self.counted += 1
            return self.counted - 1

    def handle_name(self, module: torch.nn.Module, first: str) -> str:
        """The name of the next handle for errors: `first`, a parameter, and what tells `module`
        from one that is built alike."""
        self.handles += 1
        return f"module of {first} ({type(module).__name__}, handle {self.handles})"

    # ---- opening -------------------------------------------------------------------------------

    @property
    def transport(self) -> Transport:
        """The transport; the first call waits for the other ranks' first calls.

        Raises:
            TransportError: a peer did not answer, or the group is broken.
        """
        if self._transport is None:
            with self._opening:
                if self._transport is None:
                    self.check()
                    assert self._make is not None
                    self._is_opening = True
                    try:
                        made = self._make()
                    finally:
                        self._is_opening = False
                    self._transport, self._make = made, None
                    if self.error is not None:
                        made.close()
                        raise self.error
        return self._transport

    @property
    def topology(self) -> Topology:
        """Which ranks share a machine, and whether all messages stay in memory; equal on all ranks.

        The first call waits for the other ranks' first calls.

        Raises:
            TransportError: a peer did not answer.
        """
        with self._opening:
            if self._topology is None:
                told = self._ranks.tell("topology", facts(self.transport.in_memory)).result()
                self._topology = Topology.of(self.rank, told)
                if self.member is not None:
                    self.member.ended()  # reads of all processes, while the store answers
            return self._topology

    @property
    def opened_topology(self) -> Topology | None:
        """The topology, or None before the first collective."""
        return self._topology

    @property
    def keeps_order(self) -> bool:
        """Whether rounds of some device already run in stream order."""
        return any(stream is not None for stream in list(self._streams.values()))

    def agree(self, what: str, description: Sequence[str]) -> int:
        """Verify that every rank holds the same `description`; see `Ranks.agree`.

        All ranks call in the same order. Where a peer does not answer, the group is broken: ranks
        that come later would take the next agreement for this one.
        """
        self.check()
        return self._ranks.agree("agreement", what, description).result()

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Within it this rank works for all, and waits for none: a death is told meanwhile, too.

        Args:
            doing: for errors, such as "learns levels".
        """
        self.watchdog.doing.append(doing)
        try:
            yield
        finally:
            self.watchdog.doing.remove(doing)

    def agreement(self, key: str, what: str, description: list[str]) -> Future[int]:
        """As `agree`, asynchronous; `key` names it on all ranks and is used once."""
        self.check()
        if self.member is None:
            alone: Future[int] = Future()
            alone.set_result(control.digest(1, what, description))
            return alone
        return self.member.agree(key, what, description)

    @property
    def opened(self) -> Transport | None:
        """The transport, or None before the first use."""
        return self._transport

    def all_owners(self) -> list[Owner]:
        """The streams of single collectives, and the handles."""
        return [*self.streams, *self.owners]

    def _first(self, key: str, value: bytes) -> bytes:
        return value if self.member is None else self.member.first(key, value)

    # ---- owners and their rounds ---------------------------------------------------------------

    def owner(self, name: str, window: int = 2, **advice: str) -> Owner:
        """Open the next owner; all ranks open owners in the same order. See `Owner`."""
        with self._lock:
            serial, self._serial = self._serial, self._serial + 1
            owner = Owner(self, serial, name, window, False, **advice)
            self._drop_closed()
            self.owners.append(owner)
        self.watchdog.opened(owner)
        return owner

    def close_owner(self, owner: Owner) -> None:
        """`owner` issues no further ticket; tickets that it has issued still complete."""
        with self._lock:
            owner.closed = True
            self._drop_closed()
        with owner.preparing:
            owner.kept.clear()
            owner.scopes.clear()
        self.watchdog.closed(owner)

    def _drop_closed(self) -> None:
        """Drop finished owners, but keep their ticket counts; the lock is held."""
        over = [owner for owner in self.owners if owner.over]
        self._frontier.update({owner.key: owner.returned for owner in over})
        self.owners = [owner for owner in self.owners if owner not in over]

    def stream(self, device: torch.device) -> StreamDriver | None:
        """The stream driver for rounds of tensors on `device`; None where no link keeps stream
        order. The first call is made on all ranks together.

        Raises:
            TransportError: a peer did not make the call.
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
        return self.runs.error

    def check(self) -> None:
        """Raises what broke this group, if anything did."""
        if self.error is not None:
            raise again(self.error)

    # ---- failure and closing -------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Break the group because of a local error, and tell the peers."""
        if not self.first_to_fail():
            return  # another thread has reported the failure already
        error = in_global_ranks(error, self.ranks)
        peer = error.peer if isinstance(error, TransportError) else None
        blamed = self.rank if peer is None else peer
        if self._transport is not None:
            self._transport.fail(blamed)
        self.watchdog.tell_failure(error, blamed, None)
        error = self.watchdog.explained(error, blamed)
        if not self.end(error) or ending():
            return
        if isinstance(error, GradwireError):
            log.error("%s", self.error)
        else:
            log.exception("gradwire: a task failed", exc_info=error)

    def first_to_fail(self) -> bool:
        """Whether the caller is the first to report a failure, and so has to call `end`."""
        with self._lock:
            first = not self._failing and self.error is None
            self._failing = True
        return first

    def end(self, error: BaseException) -> bool:
        """End all present and future rounds with `error`; False if an earlier error did."""
        error = in_global_ranks(error, self.ranks)
        if not self.runs.end_all(error):
            return False
        if self.member is not None:
            self.member.end(error)
        for stream in list(self._streams.values()):
            if stream is not None:
                stream.link.interrupt()
        return True

    def fail_owner(self, owner: Owner, error: BaseException) -> None:
        """Break one owner because of a local error: peers end its rounds, and no others."""
        error = in_global_ranks(error, self.ranks)
        if self.end_owner(owner, error):
            if not ending():
                log.error("%s", error)
            self.watchdog.tell_failure(error, self.rank, owner)

    def end_owner(self, owner: Owner, error: BaseException) -> bool:
        """End all present and future rounds of `owner`; False if an earlier error did."""
        return self.runs.end_all(in_global_ranks(error, self.ranks), owner)

    def close(self) -> None:
        """Close with the process group: rounds in flight end with a TransportError."""
        if self.error is None:
            self._linger()
        # Peers first: once local callers continue, the store may end with this process.
        self.watchdog.leave(self._frontier | {o.key: o.returned for o in self.all_owners()})
        self.end(destroyed(self.rank))
        self.pools.close()
        for owner in self.all_owners():
            owner.kept.clear()
            owner.scopes.clear()
        if self._transport is not None:
            with suppress(TransportError):
                self._transport.close()
        elif self._is_opening:
            self.stop_opening()

    def _linger(self) -> None:
        """Wait for the last sends of rounds whose results are complete on this rank."""
        end = time.monotonic() + _LINGER_S
        owners = self.all_owners()
        while time.monotonic() < end and not self.runs:
            if all(owner.returned == owner.core.issued for owner in owners):
                return
            time.sleep(0.01)
