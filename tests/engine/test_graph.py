"""Graphs: dependencies follow from buffers."""

from __future__ import annotations

import pytest

from gradwire.engine import Buffer, Graph, Kind, Task

A, B = Buffer("a", 0, 0, 0), Buffer("b", 0, 0, 0)


def test_a_task_waits_for_the_writer_of_what_it_reads() -> None:
    graph = Graph(
        [
            Task(Kind.RECV, 0, writes=(A,), peer=1),
            Task(Kind.MERGE, 0, reads=(A,), writes=(B,), own=0),
            Task(Kind.SEND, 0, reads=(B,), peer=1),
        ]
    )
    assert graph.waits == (0, 1, 1)
    assert graph.dependents == ((1,), (2,), ())
    assert graph.sent() == [B]


def test_a_buffer_has_one_writer() -> None:
    tasks = [Task(Kind.ENCODE, 0, writes=(A,)), Task(Kind.RECV, 0, writes=(A,), peer=1)]
    with pytest.raises(AssertionError, match="two tasks"):
        Graph(tasks)


def test_a_reader_stands_behind_its_writer() -> None:
    tasks = [Task(Kind.SEND, 0, reads=(A,), peer=1), Task(Kind.ENCODE, 0, writes=(A,))]
    with pytest.raises((AssertionError, KeyError)):
        Graph(tasks)


def test_a_task_waits_for_those_that_change_its_values() -> None:
    changed = Task(Kind.MERGE, 0, reads=(A,), own=0)
    graph = Graph(
        [
            Task(Kind.RECV, 0, writes=(A,), peer=1),
            changed,
            Task(Kind.ENCODE, 0, writes=(B,), after=(changed,)),
        ]
    )
    assert graph.dependents == ((1,), (2,), ())
    assert graph.waits == (0, 1, 1)


def test_a_sum_is_encoded_where_own_values_bring_a_residual() -> None:
    with pytest.raises(AssertionError, match="without own values"):
        Task(Kind.MERGE, 0, reads=(A,), writes=(B,))
    Task(Kind.MERGE, 0, reads=(A,))  # payloads alone, into the values


def test_a_task_is_listed_once() -> None:
    task = Task(Kind.ENCODE, 0)
    with pytest.raises(AssertionError, match="twice"):
        Graph([task, task])


def test_every_source_has_its_share_of_the_receives_before_it() -> None:
    sources = [Task(Kind.ENCODE, s, writes=(Buffer("own", s, 0, 0),)) for s in range(2)]
    receives = [
        Task(Kind.RECV, s, writes=(Buffer("theirs", s, 0, peer),), peer=peer)
        for peer in (1, 2)
        for s in range(2)
    ]
    merge = Task(Kind.MERGE, 0, reads=(Buffer("theirs", 0, 0, 1),), own=0)
    assert Graph([*sources, *receives, merge]).opening == (((2, 3), 0), ((4, 5), 1))
    assert Graph([*receives, merge]).opening == (((0, 1, 2, 3), None),)
    assert Graph(sources).opening == (((), 0), ((), 1))
    assert Graph([]).opening == (((), None),)
