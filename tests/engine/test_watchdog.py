"""The watchdog: the rank that a failure is attributed to, closed owners, and a rank that dies."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gradwire.engine import Communicator, Issue
from gradwire.errors import TransportError
from gradwire.transport import Hub
from leftovers import until
from ranks import as_threads, raises
from rooms.engine import Watchdog, watchdog


class Comm:
    """Rank 0 of four, which has met a failure, and records its notices."""

    rank, world_size, ranks, error, opened = 0, 4, range(4), None, None

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.member = SimpleNamespace(tell=self.told.append, ended=dict)

    def all_owners(self) -> list[Any]:
        return []

    def first_to_fail(self) -> bool:
        return False


# The notices of peers (sender, the rank that it blames, its text; no text: it waits for that rank),
# the rank that a failure is attributed to at first, and by then; and the error's text.
BLAME: dict[str, tuple[list[tuple[int, int, str | None]], int, int, str]] = {
    "a peer that says nothing": ([], 2, 2, "rank 2 closed"),
    "followed to where it ends": (
        [(1, 3, "receive failed"), (3, 2, None)], 1, 2,
        "rank 1 closed. The first to fail was rank 2",
    ),
    "whoever failed by itself is quoted": (
        [(1, 2, "receive failed"), (2, 2, "rank 2: payload of another step")], 1, 2,
        "rank 0: rank 2 has failed: rank 2: payload of another step",
    ),
    "blame that comes back ends": (
        [(1, 2, "receive failed"), (2, 0, "receive failed")], 1, 2,
        "rank 1 closed. The first to fail was rank 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BLAME)
def test_who_is_to_blame(what: str) -> None:
    notices, at_first, blamed, said = BLAME[what]
    watch = Watchdog(Comm())  # type: ignore[arg-type]
    for sender, peer, text in notices:
        notice = {"kind": "failed", "text": text, "blamed": peer, "owner": None, "origin": sender}
        watch.heard(sender, notice if text else {"kind": "waits", "for": peer})
    error = watch.explained(TransportError(f"rank {at_first} closed", peer=at_first), at_first)
    assert (str(error), error.peer) == (said, blamed)


def test_rounds_that_are_only_slow_are_reported_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    comm = Comm()
    comm.member.first = lambda key, value: value
    watch = Watchdog(comm)  # type: ignore[arg-type]
    owner = SimpleNamespace(key="owner 0", single=False)

    def looks_at(number: int, waited: float) -> int:
        """How many rounds were reported by then."""
        issue = SimpleNamespace(digest=1, what="all_reduce")
        ticket = SimpleNamespace(
            owner=owner, is_prepared=True, under_way=lambda: ((number, 0), issue, now - waited)
        )
        watch._report([ticket])  # type: ignore[list-item]
        return len(comm.told)

    for number in range(100):
        for waited in (0.5, 0.7, 3.0):
            looks_at(number, waited)
    assert [notice["place"][1] for notice in comm.told] == list(range(10))
    assert looks_at(100, 3.0) == 10
    assert looks_at(100, 3.8) == 11, "little longer than what is usual"
    assert looks_at(100, 100.0) == 11


def test_what_is_issued_counts_where_an_owner_is_closed() -> None:
    """The last sends of a ticket may still be in flight, and its peers may wait for them."""
    comm = Comm()
    owner = SimpleNamespace(
        key="owner 0", name="a module", core=SimpleNamespace(issued=4), returned=3
    )
    Watchdog(comm).closed(owner)  # type: ignore[arg-type]
    assert [notice["at"] for notice in comm.told] == [4]


def test_a_round_that_begins_while_it_is_looked_at_is_not_taken_for_the_last() -> None:
    """Numbers and contents of a round are read together: a mismatch would break the group."""
    comm = Communicator(Hub(1).transport(0))
    claimed: list[dict[str, Any]] = []

    class Member:
        def first(self, key: str, value: bytes) -> bytes:
            claimed.append(json.loads(value))
            return value

        def tell(self, notice: object) -> None:
            pass

        def ended(self) -> dict[int, list[str]]:
            return {}

    comm.member = cast("Any", Member())
    owner = comm.owner("a test")
    ticket = owner.ticket()
    ticket.next_round(Issue(100, "the first"))
    ticket.since = 0.0
    with owner.lock:  # as in next_round
        ticket.rounds += 1
        looking = threading.Thread(target=comm.watchdog._report, args=([ticket],))
        looking.start()
        looking.join(0.2)
        ticket.issue = Issue(101, "the second")
    looking.join()
    assert [(c["place"][2], c["digest"]) for c in claimed] == [(1, 101)]


# ---- in a group


def test_a_death_ends_all_waits_once_there_is_one_that_the_dead_rank_has_not_reached() -> None:
    """Rank 2 comes to the first exchange, and ends."""
    came, looked = threading.Event(), threading.Event()

    def body(comm: Communicator) -> None:
        assert comm.member is not None
        member: Any = comm.member
        if comm.rank == 2:
            member.exchange("first", b"")
            until(lambda: member.part.settled and member.part.open)
            came.set()
            return
        assert came.wait(60)
        if comm.rank == 1:
            assert looked.wait(60)
        first = member.exchange("first", b"")
        looks, ended = [], member.ended
        until(lambda: member.part.settled)
        member.part.dead = lambda: [2]

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
        error = raises(TransportError, lambda: comm.agree("a plan", ["a"]))
        assert error.peer == 2
        assert "rank 2 has died" in str(error)
        assert pending.exception(60) is comm.error
        assert member.exchange("third", b"").exception(60) is comm.error

    as_threads(3, body, Hub(3, timeout=600.0))
