"""Ranks as threads of one process: the transport of the tests.

It implements the whole protocol, timeouts and failures included, so that tests with threads check
the engine without a network.
"""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from gradwire.errors import TransportError


class Hub:
    """The shared state of the ranks of one loopback group.

    Args:
        world_size: number of ranks.
        timeout: seconds that a wait may last.
        lends: whether ranks can borrow each other's messages.
        corrupt: if given, called with (source, destination, tag, bytes) of every message; it may
            change the bytes (a uint8 tensor) in place, as a bad link does.
    """

    def __init__(
        self,
        world_size: int,
        timeout: float = 30.0,
        corrupt: object = None,
        lends: bool = False,
    ) -> None:
        self.lends = lends
        self.world_size = world_size
        self.timeout = timeout
        self.corrupt = corrupt
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self.dead: set[int] = set()
        self.board = dist.HashStore()

    def kill(self, rank: int) -> None:
        """Make `rank` a dead peer: its messages are lost, and it receives none."""
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()

    def transport(self, rank: int) -> Loopback:
        return Loopback(self, rank)


class _Sent:
    """A send copies into the hub, so it ends at once."""

    def wait(self) -> None:
        return


class _Receive:
    def __init__(
        self, hub: Hub, key: tuple[int, int, int], nbytes: int, data: torch.Tensor | None = None
    ) -> None:
        self.hub = hub
        self.key = key
        self.nbytes = nbytes
        self.data = data

    def wait(self) -> None:
        assert self.data is not None
        message = self.message()
        self.data[: message.numel()] = message

    def message(self) -> torch.Tensor:
        """Wait for the message."""
        source, me, _ = self.key
        hub = self.hub
        deadline = time.monotonic() + hub.timeout
        with hub.changed:
            while not hub.mail.get(self.key):
                if hub.dead:
                    lost = source if source in hub.dead else min(hub.dead)
                    raise TransportError(f"rank {me}: rank {lost} has died", peer=lost)
                left = deadline - time.monotonic()
                if left <= 0 or not hub.changed.wait(left):
                    raise TransportError(
                        f"rank {me}: nothing came from rank {source} within {hub.timeout:g} s",
                        peer=source,
                    )
            queue = hub.mail[self.key]
            message = queue.pop(0)
            if not queue:
                del hub.mail[self.key]
        if message.numel() > self.nbytes or (self.data is None and message.numel() < self.nbytes):
            raise TransportError(
                f"rank {me}: rank {source} sent {message.numel()} bytes where "
                f"{self.nbytes} were expected",
                peer=source,
            )
        return message


class _Borrowed:
    """A loan of the hub's copy of the message."""

    def __init__(self, receive: _Receive) -> None:
        self.receive = receive
        self.message = torch.empty(0, dtype=torch.uint8)

    def wait(self) -> torch.Tensor:
        self.message = self.receive.message()
        return self.message

    def give_back(self) -> None:
        self.message.fill_(0xA5)  # exposes readers that continue after giving back


class Loopback:
    """One rank's end of a `Hub`."""

    in_memory = False  # it emulates a network
    shared_bytes = lent_bytes = 0
    store = None

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.world_size = hub.world_size
        self.timeout = hub.timeout
        self.board = hub.board
        self.reached = self.lenders = frozenset(range(hub.world_size) if hub.lends else ())

    def isend(self, data: torch.Tensor, peer: int, tag: int, in_use: int | None = None) -> _Sent:
        message = data.clone()
        if callable(self.hub.corrupt):
            self.hub.corrupt(self.rank, peer, tag, message)
        with self.hub.changed:
            if self.rank not in self.hub.dead:
                self.hub.mail.setdefault((self.rank, peer, tag), []).append(message)
                self.hub.changed.notify_all()
        return _Sent()

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> _Receive:
        return _Receive(self.hub, (peer, self.rank, tag), data.numel(), data)

    def borrow(self, nbytes: int, peer: int, tag: int) -> _Borrowed:
        return _Borrowed(_Receive(self.hub, (peer, self.rank, tag), nbytes))

    def fail(self, peer: int) -> None:
        self.hub.kill(peer)

    def longest_wait(self) -> tuple[float, int] | None:
        return None

    def close(self) -> None:
        return
