"""Ranks as threads over links with in-order delivery and no tags, as NCCL's.

The links are as strict as possible: a rank's batch begins when the one before it has ended; a
message is copied directly once both of its ends have begun; between two ranks the first send
matches the first receive. Batches begin as early as they can, or (`lazy`) when they are waited for:
a send then reads its memory as late as possible.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from gradwire.errors import TransportError
from gradwire.transport.link import Posting


class FifoHub:
    """The shared state of the ranks of one group.

    Args:
        lazy: begin a batch only when it is waited for.
        timeout: seconds that a wait may last.

    Attributes:
        dead: ranks that have failed.
        blamed: (rank, the rank that it blames) per failure.
    """

    def __init__(self, world_size: int, lazy: bool = False, timeout: float = 30.0) -> None:
        self.world_size = world_size
        self.lazy = lazy
        self.timeout = timeout
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int], deque[tuple[Posting, FifoBatch]]] = {}
        self.awaited: dict[tuple[int, int], deque[tuple[Posting, FifoBatch]]] = {}
        self.dead: set[int] = set()
        self.blamed: list[tuple[int, int]] = []

    def link(self, rank: int) -> FifoLink:
        return FifoLink(self, rank)

    def kill(self, rank: int) -> None:
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()

    def begin(self, rank: int, batch: FifoBatch) -> None:
        """Offer the messages of a batch, and move those whose both ends are offered."""
        for message in batch.messages:
            pair = (message.peer, rank) if message.incoming else (rank, message.peer)
            ends = self.awaited if message.incoming else self.sent
            ends.setdefault(pair, deque()).append((message, batch))
            sent, awaited = self.sent.get(pair), self.awaited.get(pair)
            while sent and awaited:
                (source, one), (target, other) = sent.popleft(), awaited.popleft()
                assert source.memory.numel() == target.memory.numel(), f"{pair}: sizes differ"
                target.memory.copy_(source.memory)
                one.left -= 1
                other.left -= 1
        self.changed.notify_all()


class FifoBatch:
    def __init__(self, link: FifoLink, messages: Sequence[Posting]) -> None:
        self.link = link
        self.messages = messages
        self.left = len(messages)

    def wait(self) -> None:
        hub, link = self.link.hub, self.link
        deadline = time.monotonic() + hub.timeout
        with hub.changed:
            while self.left:
                link.advance(hub.lazy)
                if not self.left:
                    break
                lost = next((m.peer for m in self.messages if m.peer in hub.dead), None)
                if lost is None and hub.dead:
                    lost = min(hub.dead)
                left = deadline - time.monotonic()
                if lost is None and left <= 0:
                    lost = self.messages[0].peer
                if lost is not None:
                    raise TransportError(f"rank {link.rank}: rank {lost} is gone", peer=lost)
                hub.changed.wait(min(left, 0.2))


class FifoLink:
    """One rank's end of a `FifoHub`."""

    def __init__(self, hub: FifoHub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.world_size = hub.world_size
        self.queue: deque[FifoBatch] = deque()  # the first has begun, if `begun`
        self.begun: FifoBatch | None = None
        if not hub.lazy:
            threading.Thread(target=self.drive, daemon=True).start()

    def post(self, messages: Sequence[Posting]) -> FifoBatch:
        batch = FifoBatch(self, list(messages))
        with self.hub.changed:
            self.queue.append(batch)
            self.hub.changed.notify_all()
        return batch

    def advance(self, may_begin: bool = True) -> None:
        """Begin the next batch if the one before it has ended; the caller holds the lock."""
        while may_begin and self.queue and (self.begun is None or not self.begun.left):
            self.begun = self.queue.popleft()
            self.hub.begin(self.rank, self.begun)

    def drive(self) -> None:
        while True:
            with self.hub.changed:
                self.advance()
                self.hub.changed.wait(0.2)

    def fail(self, peer: int) -> None:
        self.hub.blamed.append((self.rank, peer))
        self.hub.kill(peer)

    def interrupt(self) -> None:
        """Nothing to do: waits for a rank that is gone end by themselves."""
