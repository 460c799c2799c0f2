"""The links between nodes, on a virtual clock, and which rank receives what they carry.

A node has one full-duplex link: its egress and its ingress each serve at the link's rate. A message
occupies both; it reaches the ingress one latency after the egress. Messages from one rank to
another leave one after the other. Messages to several ranks share the egress round-robin, one
*parcel* at a time, as TCP connections do. Messages from several nodes queue at the ingress. Ranks
of one node communicate through memory, one message per node at a time.

A message leaves when its sender has posted it and has been told that its receiver has posted the
receive, as in gloo.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from gradwire.engine import Graph
from gradwire_tools.sim.clock import Callback, Clock, Thread
from gradwire_tools.sim.symmetry import Symmetry

_PARCEL_BYTES = 1 << 16  # the kernel passes as many to a link at a time
_SETTLING = 0.3  # largest settling loss per parcel, as a share of the parcel's time
_PARCELS = 16  # per large message, at most: connections still share a link fairly


@dataclass(frozen=True)
class Software:
    """What messages cost beside the wire's rate and latency, at both ends.

    Attributes:
        goodput: the share of the rate that messages to one rank get; headers take the rest.
        shared: the share of the rate that messages to several ranks get together.
        settling: seconds lost when several connections start to share an idle link, before TCP
            has adapted to its share.
        overhead: seconds per message beyond latency and rate, whatever its size.
        stack: seconds of core time per byte, once to send it and once to receive it.
        message: seconds of core time per message, alike; over memory only to receive it.
        memory: bytes per second between ranks of a node.
    """

    goodput: float = 1.0
    shared: float = 1.0
    settling: float = 0.0
    overhead: float = 0.0
    stack: float = 0.0
    message: float = 0.0
    memory: float = math.inf


@dataclass(frozen=True)
class Link(Software):
    """A node's link, and its software.

    Attributes:
        rate: bytes per second in each direction; `inf` for no limit.
        latency: seconds from one node to another.
    """

    rate: float = math.inf
    latency: float = 0.0


class Endpoint(Protocol):
    """A rank, as the fabric sees it.

    Attributes:
        number: the rank.
        node: the index of its node.
        stack: the thread that serves its connections.
    """

    number: int
    node: int
    stack: Thread

    def arrived(self, message: Hashable) -> None:
        """A message that this rank receives has arrived."""
        ...


@dataclass
class Message:
    """One message in transit.

    Attributes:
        name: the name under which its receiver expects it.
        sender, receiver: the simulated ranks that send and receive it.
        peer: the destination rank; messages to one rank stay in order.
        left: bytes not yet sent.
        sent: called when the send buffer is free again.
        number: the order of posting.
    """

    name: Hashable
    sender: Endpoint
    receiver: Endpoint
    peer: int
    left: int
    sent: Callback
    number: int


class Fabric:
    """All links.

    A message's name is (sender, receiver, job, role, segment, chunk), from the receiver's view.

    Args:
        largest: bytes of the largest message.
        nodes: number of simulated nodes.
        per_node: ranks per node.

    Attributes:
        ranks: the simulated ranks, in order.
        moved: bytes that left each node.
    """

    def __init__(
        self,
        clock: Clock,
        link: Link,
        largest: int,
        nodes: int,
        per_node: int,
    ) -> None:
        self.clock = clock
        self.link = link
        self.ranks: list[Endpoint] = []
        self.moved = [0] * nodes
        self._per_node = per_node
        self._parcel = max(_PARCEL_BYTES, -(-largest // _PARCELS))
        self._requested: set[Hashable] = set()
        self._posted: dict[Hashable, Message] = {}
        self._leaving: list[Message] = []
        self._number = 0
        self._egress = [_Egress() for _ in range(nodes)]
        self._ingress = [0.0] * nodes
        self._memory = [0.0] * nodes

    def same_node(self, rank: int, peer: int) -> bool:
        """Whether two ranks are on one node."""
        return rank // self._per_node == peer // self._per_node

    def expect(self, rank: Endpoint, job: Hashable, graph: Graph, task: int) -> Hashable:
        """`rank` has posted a receive; returns the name of its message."""
        b, peer = graph.message(task)[0], graph.peer[task]
        place = graph.buffer_role[b], graph.buffer_segment[b], graph.buffer_chunk[b]
        name = (peer, rank.number, job, *place)
        latency = 0.0 if self.same_node(rank.number, peer) else self.link.latency
        self.clock.at(self.clock.now + latency + self.link.overhead, lambda: self._request(name))
        return name

    def send(
        self,
        rank: Endpoint,
        job: Hashable,
        graph: Graph,
        task: int,
        nbytes: int,
        sent: Callback,
        rotation: Symmetry | None,
    ) -> None:
        """`rank` has posted a send; `sent` is called when the send buffer is free again; if node 0
        represents all, `rotation` makes other nodes' messages its own."""
        b, peer = graph.message(task)[0], graph.peer[task]
        role, segment, chunk = graph.buffer_role[b], graph.buffer_segment[b], graph.buffer_chunk[b]
        sender, receiver = rank.number, peer
        if rotation is not None:
            back = -(peer // self._per_node)
            sender, chunk = rotation.rank(sender, back), rotation.chunk(chunk, back)
            receiver %= self._per_node
        name = (sender, receiver, job, role, segment, chunk)
        self._number += 1
        message = Message(name, rank, self.ranks[receiver], peer, nbytes, sent, self._number)
        if name in self._requested:
            self._requested.remove(name)
            self._leave(message)
        else:
            self._posted[name] = message

    def _request(self, name: Hashable) -> None:
        """The sender learns that the receive is posted."""
        message = self._posted.pop(name, None)
        if message is None:
            self._requested.add(name)
            return
        if not self._leaving:
            self.clock.at(self.clock.now, self._leave_together)
        self._leaving.append(message)

    def _leave_together(self) -> None:
        """Messages requested at the same time leave in the order of posting."""
        leaving, self._leaving = self._leaving, []
        for message in sorted(leaving, key=lambda message: message.number):
            self._leave(message)

    def _leave(self, message: Message) -> None:
        if self.same_node(message.sender.number, message.peer):
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
            arrive = _arrival(message.receiver, message.name)
            if self.link.message:
                message.receiver.stack.do(self.link.message, arrive)
            else:
                arrive()

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
        # All latencies are equal, so parcels reach an ingress in the order in which they left.
        begin = max(self._ingress[receiver.node], self.clock.now + self.link.latency)
        end = self._ingress[receiver.node] = begin + seconds
        end += self.link.overhead
        arrive = _arrival(receiver, message.name) if last else _nothing
        work = nbytes * self.link.stack + (self.link.message if last else 0.0)
        if work:
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


def _arrival(receiver: Endpoint, name: Hashable) -> Callback:
    return lambda: receiver.arrived(name)


def _nothing() -> None:
    pass


class _Egress:
    """The messages that wait to leave a node: one queue per connection, served round-robin."""

    def __init__(self) -> None:
        self.busy = False
        self.unsettled = 0.0  # seconds of settling that are still to be lost
        self._turns: deque[tuple[Endpoint, int]] = deque()
        self._queues: dict[tuple[Endpoint, int], deque[Message]] = {}

    def add(self, message: Message) -> None:
        connection = message.sender, message.peer
        if connection in self._queues:
            self._queues[connection].append(message)
        else:
            self._queues[connection] = deque([message])
            self._turns.append(connection)

    def settle(self, most: float) -> float:
        """The seconds of settling that this parcel loses, at most `most`."""
        lost = min(self.unsettled, most)
        self.unsettled -= lost
        return lost

    @property
    def is_shared(self) -> bool:
        """Whether messages to several ranks wait."""
        return len(self._turns) > 1

    def next(self) -> Message | None:
        """Pop the first message of the connection whose turn it is."""
        return self._queues[self._turns[0]].popleft() if self._turns else None

    def served(self, rest: Message | None) -> None:
        """End the turn; `rest` is the message if it has more to send."""
        connection = self._turns.popleft()
        queue = self._queues[connection]
        if rest is not None:
            queue.appendleft(rest)
        if queue:
            self._turns.append(connection)
        else:
            del self._queues[connection]
