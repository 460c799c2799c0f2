"""Agreement between ranks, one of which dies: tests/control has the rest."""

from __future__ import annotations

import threading
from typing import Any

from gradwire.engine import Communicator
from gradwire.errors import TransportError
from gradwire.transport import Hub
from leftovers import until
from ranks import as_threads, caught


def test_a_death_ends_all_waits_once_there_is_one_that_the_dead_rank_has_not_reached() -> None:
    """Rank 2 comes to the first exchange, and ends."""
    came, looked = threading.Event(), threading.Event()

    def body(comm: Communicator) -> None:
        assert comm.member is not None
        member: Any = comm.member
        if comm.rank == 2:
            member.exchange("first", b"")
            part = member._part
            until(lambda: part._settled is not None and part._settled.exchanges.pending)
            came.set()
            return
        assert came.wait(60)
        if comm.rank == 1:
            assert looked.wait(60)
        first = member.exchange("first", b"")
        looks, ended = [], member.ended
        until(lambda: member._part.processes is not None)
        member._part.processes.ended = lambda: [2]

        def counted() -> Any:
            looks.append(ended())
            if len(looks) > 2:
                looked.set()
            return looks[-1]

        member.ended = counted
        assert first.result(60) == [b""] * 3
        assert comm.error is None
        if comm.rank == 0:
            assert looks[:2] == [{2: []}] * 2
        pending = member.exchange("second", b"")
        error = caught(lambda: comm.agree("a plan", ["a"]))
        assert isinstance(error, TransportError)
        assert error.peer == 2
        assert "rank 2 has died" in str(error)
        assert pending.exception(60) is comm.error
        assert member.exchange("third", b"").exception(60) is comm.error

    as_threads(3, body, Hub(3, timeout=600.0))
