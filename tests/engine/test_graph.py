"""Graphs: dependencies follow from buffers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from gradwire.engine import Graph
from ranks import raises

ROLES = ("theirs", "own")


def test_a_task_waits_for_the_writer_of_what_it_reads() -> None:
    graph = Graph("ab")
    a, b = graph.buffer("a", 0, 0, 0), graph.buffer("b", 0, 0, 0)
    assert graph.recv(0, a, peer=1) == 0
    assert graph.merge(0, [a], [b], own=0) == 1
    assert graph.send(0, b, peer=1) == 2
    assert graph.waits == [0, 1, 1]
    assert graph.dependents == [[1], [2], []]
    assert graph.sent() == [b]
    assert graph.describe(2) == "send to rank 1, segment 0"


def test_a_buffer_is_one_whoever_names_it() -> None:
    graph = Graph("ab")
    places = list(product("ab", range(2), range(2), range(2)))
    numbers = [graph.buffer(*place) for place in places]
    assert numbers == list(range(16))
    assert [graph.buffer(*place) for place in places] == numbers
    columns = graph.buffer_role, graph.buffer_segment, graph.buffer_chunk, graph.buffer_source
    assert list(zip(*columns, strict=True)) == places


def test_what_contradicts_itself_is_refused() -> None:
    graph = Graph("ab")
    a, b = graph.buffer("a", 0, 0, 0), graph.buffer("b", 0, 0, 0)
    graph.recv(0, a, peer=1)
    refusals: dict[str, Callable[[], object]] = {
        "'c' is none": lambda: graph.buffer("c", 0, 0, 0),
        "that another task has written": lambda: graph.encode(0, [a]),
        "before the writer of a buffer": lambda: graph.send(0, b, peer=1),
        "before a task that it waits for": lambda: graph.decode(0, [a], after=[7]),
        # A sum is encoded where own values bring a residual.
        "without own values": lambda: graph.merge(0, [a], [b]),
    }
    for said, call in refusals.items():
        raises(AssertionError, call, said)
    graph.merge(0, [a])  # payloads alone, into the values
    graph.recv(0, graph.buffer("a", 0, 0, 1), peer=1)
    raises(AssertionError, lambda: graph.slots, "another message has the same name")


def test_a_task_waits_for_those_that_change_its_values() -> None:
    graph = Graph("ab")
    a, b = graph.buffer("a", 0, 0, 0), graph.buffer("b", 0, 0, 0)
    graph.recv(0, a, peer=1)
    changed = graph.merge(0, [a], own=0)
    graph.encode(0, [b], after=[changed])
    assert graph.dependents == [[1], [2], []]
    assert graph.waits == [0, 1, 1]


def test_every_source_has_its_share_of_the_receives_before_it() -> None:
    def graph(sources: int, receives: int) -> Graph:
        made = Graph(ROLES)
        for s in range(sources):
            made.encode(s, [made.buffer("own", s, 0, 0)])
        for number in range(receives):
            made.recv(number % 2, made.buffer("theirs", number % 2, 0, number // 2), number // 2)
        if receives:
            made.merge(0, [made.buffer("theirs", 0, 0, 0)], own=0)
        return made

    assert graph(2, 4).opening == (((2, 3), 0), ((4, 5), 1))
    assert graph(0, 4).opening == (((0, 1, 2, 3), None),)
    assert graph(2, 0).opening == (((), 0), ((), 1))
    assert graph(0, 0).opening == (((), None),)


def test_slots_count_the_messages_of_a_link_by_role_segment_and_chunk() -> None:
    graph = Graph(ROLES)
    own = [graph.buffer("own", s, c, 0) for s, c in ((1, 0), (0, 2), (0, 1))]
    graph.encode(0, own)
    to_1 = [graph.send(0, b, peer=1) for b in own]
    to_2 = graph.send(0, own[0], peer=2)
    theirs = graph.buffer("theirs", 5, 0, 2)
    from_2 = graph.recv(5, theirs, peer=2)
    onward = graph.send(5, theirs, peer=1)
    assert [graph.slot[t] for t in to_1] == [3, 2, 1]
    assert graph.slot[onward] == 0  # its role comes first
    assert graph.slot[to_2] == graph.slot[from_2] == 0
    assert graph.slot[0] == -1
    assert graph.slots == 4
    assert Graph(ROLES).slots == 0


def test_tasks_in_another_order_keep_what_they_are() -> None:
    graph = Graph("ab")
    a, b = graph.buffer("a", 0, 0, 0), graph.buffer("b", 0, 0, 1)
    graph.encode(0, [a])
    graph.send(0, a, peer=1)
    graph.recv(0, b, peer=1, reuses=a)
    moved = graph.reordered([2, 0, 1], gates=[(), (2,), ()])
    assert [moved.describe(t) for t in range(3)] == [graph.describe(t) for t in (2, 0, 1)]
    assert moved.reuses == [a, -1, -1]
    assert moved.after == [(), (), (0,)]
    assert moved.dependents == [[2], [2], []]
