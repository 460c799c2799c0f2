"""The links between nodes, on a virtual clock.

A node has one link, full duplex: its egress serves at the link's rate, and so does its ingress.
A message occupies both, the latter from a latency later on. Messages from one rank to another go
one after the other; those to several ranks share the egress in turns, a *parcel* at a time, as
TCP's connections do. What comes from several nodes queues at the ingress. Ranks of one node talk
over memory, one message of the node at a time.

A message leaves when its sender has posted it, and word has come that its receiver has posted the
receive: gloo sends nothing that nobody asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from gradwire.sim.clock import Act, Clock, Thread

_PARCEL_BYTES = 1 << 16  # what the kernel hands to a link at a time
_SETTLING = 0.3  # of the time that a parcel takes, until all is lost
_PARCELS = 16  # of a large message, at most: shares of a link stay fair enough


@dataclass(frozen=True)
class Link:
    """What a node's link, and the software at both of its ends, do.

    Attributes:
        rate: bytes a second, in each direction; `inf` for no limit.
        goodput: the share of it that messages to one rank get; headers take the rest.
        shared: the share that messages to several ranks get together.
        settling: seconds that connections lose which begin to share an idle link: they leave some
            of it unused until they have found out what the others do not use.
        latency: seconds from one node to another.
        overhead: seconds that a message takes beyond those, whatever its size.
        stack: seconds of a core that sending a byte takes, and receiving it again.
        memory: bytes a second between ranks of a node.
    """

    rate: float
    goodput: float = 1.0
    shared: float = 1.0
    settling: float = 0.0
    latency: float = 0.0
    overhead: float = 0.0
    stack: float = 0.0
    memory: float = float("inf")


class End(Protocol):
    """A rank, as its links see it.

    Attributes:
        node: where it is.
        stack: the thread that serves its connections.
    """

    node: int
    stack: Thread

    def arrived(self, message: Hashable) -> None:
        """A message that this rank receives has arrived."""
        ...


@dataclass
class Message:
    """One message on its way.

    Attributes:
        name: by which its receiver knows it.
        sender, receiver: who posts it, and who gets it on this clock.
        peer: the rank it goes to: what goes to one rank goes in order.
        beside: whether the two are on one node.
        left: bytes that have not left yet.
        sent: called when its memory is free again.
        number: messages that were posted before.
    """

    name: Hashable
    sender: End
    receiver: End
    peer: int
    beside: bool
    left: int
    sent: Act
    number: int = 0


class Fabric:
    """All links.

    Args:
        largest: bytes of the largest message.
        nodes: how many.

    Attributes:
        moved: bytes that left each node.
    """

    def __init__(self, clock: Clock, link: Link, largest: int, nodes: int) -> None:
        self.clock = clock
        self.link = link
        self.moved = [0] * nodes
        self._parcel = max(_PARCEL_BYTES, -(-largest // _PARCELS))
        self._asked: set[Hashable] = set()
        self._posted: dict[Hashable, Message] = {}
        self._leaving: list[Message] = []
        self._number = 0
        self._egress = [_Egress() for _ in range(nodes)]
        self._ingress = [0.0] * nodes
        self._memory = [0.0] * nodes

    def expect(self, name: Hashable, beside: bool) -> None:
        """Its receiver has posted the receive of a message; `beside` its sender, on one node."""
        away = 0.0 if beside else self.link.latency
        self.clock.at(self.clock.now + away + self.link.overhead, lambda: self._ask(name))

    def send(self, message: Message) -> None:
        """Its sender has posted a message."""
        self._number += 1
        message.number = self._number
        if message.name in self._asked:
            self._asked.remove(message.name)
            self._leave(message)
        else:
            self._posted[message.name] = message

    def _ask(self, name: Hashable) -> None:
        message = self._posted.pop(name, None)
        if message is None:
            self._asked.add(name)
            return
        if not self._leaving:
            self.clock.at(self.clock.now, self._leave_together)
        self._leaving.append(message)

    def _leave_together(self) -> None:
        """What several ranks ask for at one time leaves in the order in which it was posted."""
        leaving, self._leaving = self._leaving, []
        for message in sorted(leaving, key=lambda message: message.number):
            self._leave(message)

    def _leave(self, message: Message) -> None:
        if message.beside:
            self._copy(message)
        else:
            self._queue(message)

    # ---- over memory ---------------------------------------------------------------------------

    def _copy(self, message: Message) -> None:
        node = message.sender.node
        begin = max(self._memory[node], self.clock.now)
        end = self._memory[node] = begin + message.left / self.link.memory

        def done() -> None:
            message.sent()
            message.receiver.arrived(message.name)

        self.clock.at(end + self.link.overhead, done)

    # ---- over the network ----------------------------------------------------------------------

    def _queue(self, message: Message) -> None:
        self.moved[message.sender.node] += message.left
        egress = self._egress[message.sender.node]
        egress.add(message)
        if not egress.busy:
            egress.unsettled = self.link.settling
            self._serve(egress)

    def _serve(self, egress: _Egress) -> None:
        """Put the next parcel on the wire."""
        message = egress.next()
        egress.busy = message is not None
        if message is None:
            return
        nbytes = min(self._parcel, message.left)
        message.left -= nbytes
        share = self.link.shared if egress.is_shared else self.link.goodput
        seconds = nbytes / (self.link.rate * share)
        if egress.is_shared:
            seconds += egress.settle(seconds * _SETTLING)
        receiver, last = message.receiver, message.left == 0
        # All latencies are alike, so parcels reach an ingress in the order in which they left.
        begin = max(self._ingress[receiver.node], self.clock.now + self.link.latency)
        end = self._ingress[receiver.node] = begin + seconds
        end += self.link.overhead
        arrive = _arrival(receiver, message.name) if last else _nothing
        if self.link.stack:
            work = nbytes * self.link.stack
            message.sender.stack.do(work, _nothing)
            self.clock.at(end, lambda: receiver.stack.do(work, arrive))
        elif last:
            self.clock.at(end, arrive)

        def served() -> None:
            egress.served(None if last else message)
            if last:
                message.sent()
            self._serve(egress)

        self.clock.at(self.clock.now + seconds, served)


def _arrival(receiver: End, name: Hashable) -> Act:
    return lambda: receiver.arrived(name)


def _nothing() -> None:
    """What nobody waits for."""


class _Egress:
    """The messages that wait to leave a node: a queue for each connection, served in turns."""

    def __init__(self) -> None:
        self.busy = False
        self.unsettled = 0.0  # seconds that sharing is still to cost
        self._turns: deque[tuple[End, int]] = deque()
        self._queues: dict[tuple[End, int], deque[Message]] = {}

    def add(self, message: Message) -> None:
        connection = message.sender, message.peer
        if connection in self._queues:
            self._queues[connection].append(message)
        else:
            self._queues[connection] = deque([message])
            self._turns.append(connection)

    def settle(self, most: float) -> float:
        """How much of this time is lost."""
        lost = min(self.unsettled, most)
        self.unsettled -= lost
        return lost

    @property
    def is_shared(self) -> bool:
        """Whether messages to several ranks wait."""
        return len(self._turns) > 1

    def next(self) -> Message | None:
        """The message of the connection whose turn it is, taken off."""
        return self._queues[self._turns[0]].popleft() if self._turns else None

    def served(self, rest: Message | None) -> None:
        """The turn is over; `rest` has more to send."""
        connection = self._turns.popleft()
        queue = self._queues[connection]
        if rest is not None:
            queue.appendleft(rest)
        if queue:
            self._turns.append(connection)
        else:
            del self._queues[connection]
