"""Executes the graphs of all ranks symbolically: a payload is the set of ranks that it sums.

Receives are awaited in the order of the graph, as on the thread driver; so a deadlock there is a
deadlock here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradwire.algorithms import Algorithm
from gradwire.engine import Graph, Kind

Sum = Counter[int]  # rank -> how often its values are in it
MessageKey = tuple[int, int, str, int, int]  # sender, receiver, role, segment, chunk
Name = tuple[str, int, int, int]  # of a buffer: role, segment, chunk, source
Message = list[tuple[Name, Sum]]


@dataclass
class Rank:
    """One rank's state.

    Attributes:
        values: (segment, chunk) -> the ranks that its values sum.
        maker: (segment, chunk) -> the payloads that its values were decoded from.
    """

    number: int
    graph: Graph
    waits: list[int]
    values: dict[tuple[int, int], Sum] = field(default_factory=dict)
    maker: dict[tuple[int, int], tuple[Name, ...]] = field(default_factory=dict)
    held: dict[int, Sum] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


def begin(algorithm: Algorithm, sizes: Sequence[Sequence[int]], world_size: int) -> list[Rank]:
    """All ranks, whose values are their own."""
    ranks = []
    for number in range(world_size):
        graph = algorithm.build(number, world_size, sizes)
        rank = Rank(number, graph, list(graph.waits))
        for s, segment in enumerate(sizes):
            for c in range(algorithm.chunks(world_size)):
                if segment[c]:
                    rank.values[s, c] = Counter([number])
        ranks.append(rank)
    return ranks


def run(algorithm: Algorithm, sizes: Sequence[Sequence[int]], world_size: int) -> list[Rank]:
    """Run all ranks to their ends. Fails on a deadlock, or if two messages have the same key."""
    chunks, ranks = algorithm.chunks(world_size), begin(algorithm, sizes, world_size)
    mail: dict[MessageKey, Message] = {}
    reused = {
        key_of(rank, task): (rank, earlier)
        for rank in ranks
        for task, earlier in enumerate(rank.graph.reuses)
        if earlier >= 0
    }
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            graph = rank.graph
            receives = (t for t, kind in enumerate(graph.kind) if kind is Kind.RECV)
            awaited = next((t for t in receives if t not in rank.done), None)
            for task, kind in enumerate(graph.kind):
                is_next = kind is not Kind.RECV or task == awaited
                if task in rank.done or rank.waits[task] or not is_next:
                    continue
                if kind is Kind.SEND and (key := key_of(rank, task)) in reused:
                    assert_free(*reused[key], mail)
                if step(rank, task, chunks, mail):
                    rank.done.add(task)
                    moved = True
                    for dependent in graph.dependents[task]:
                        rank.waits[dependent] -= 1
    for rank in ranks:
        left = [rank.graph.describe(t) for t in range(len(rank.graph)) if t not in rank.done]
        assert not left, f"rank {rank.number} waits for ever: {left}"
    assert not mail, f"sent and never received: {list(mail)}"
    return ranks


def name_of(graph: Graph, buffer: int) -> Name:
    """A buffer's name, the same on all ranks."""
    g = graph
    place = g.buffer_segment[buffer], g.buffer_chunk[buffer], g.buffer_source[buffer]
    return g.buffer_role[buffer], *place


def key_of(rank: Rank, task: int) -> MessageKey:
    """The key of a send's or recv's message, the same on both ends."""
    graph, peer = rank.graph, rank.graph.peer[task]
    role, segment, chunk, _ = name_of(graph, graph.message(task)[0])
    sends = graph.kind[task] is Kind.SEND
    return *((rank.number, peer) if sends else (peer, rank.number)), role, segment, chunk


def assert_free(receiver: Rank, buffer: int, mail: dict[MessageKey, Message]) -> None:
    """Assert that all readers of the message that begins with `buffer` have ended, since a new
    message is about to overwrite it."""
    graph = receiver.graph
    (sent,) = {reads for reads in graph.reads if buffer in reads}
    for task in range(len(graph)):
        if not set(sent).isdisjoint(graph.reads[task]):
            what = graph.describe(task)
            assert graph.kind[task] is Kind.SEND, f"{what}: reads what a receive would overwrite"
            assert task in receiver.done, f"{what}: not sent yet"
            assert key_of(receiver, task) not in mail, f"{what}: still on its way"


def step(rank: Rank, task: int, chunks: int, mail: dict[MessageKey, Message]) -> bool:
    """Run one task; False if its message has not arrived."""
    graph = rank.graph
    kind, reads, writes = graph.kind[task], graph.reads[task], graph.writes[task]
    if graph.peer[task] >= 0:
        key = key_of(rank, task)
        if kind is Kind.SEND:
            assert key not in mail, f"two messages of one tag: {key}"
            mail[key] = message_of(rank, task)
            return True
        if key not in mail:
            return False
        take(rank, task, mail.pop(key))
        return True
    takes_own = kind is Kind.ENCODE or (kind is Kind.MERGE and graph.own[task] >= 0)
    places = {b: (graph.buffer_segment[b], graph.buffer_chunk[b] % chunks) for b in reads + writes}
    for place in set(places.values()):
        total = Counter(rank.values[place]) if takes_own else Sum()
        for b in reads:
            if places[b] == place:
                total.update(rank.held[b])
        for b in writes:
            if places[b] == place:
                rank.held[b] = total
        if kind is not Kind.ENCODE:
            rank.values[place] = total
            made = tuple(b for b in writes or reads if places[b] == place)
            rank.maker[place] = tuple(name_of(graph, b) for b in made)
    return True


def message_of(rank: Rank, task: int) -> Message:
    """The message of a send: name and content of each buffer."""
    graph = rank.graph
    return [(name_of(graph, b), rank.held[b]) for b in graph.message(task)]


def take(rank: Rank, task: int, message: Message) -> None:
    """Complete a receive; checks that both ends list the same buffers."""
    for buffer, (name, total) in zip(rank.graph.message(task), message, strict=True):
        assert name_of(rank.graph, buffer) == name
        rank.held[buffer] = total
