"""Graphs: dependencies follow from buffers."""

from __future__ import annotations

import pytest

from gradwire.engine import Buffer, Graph, Kind, Task

A, B = Buffer("a", 0, 0, 0), Buffer("b", 0, 0, 0)


def test_a_task_waits_for_the_writer_of_what_it_reads() -> None:
    graph = Graph(
        [
            Task(Kind.RECV, 0, writes=(A,), peer=1),
            Task(Kind.MERGE, 0, reads=(A,), writes=(B,)),
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
