"""`Ranks`: what all ranks tell, and whether they agree, over one group or over two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
from control_ranks import group

from gradwire.control import Member, Ranks
from gradwire.engine import Communicator, ranks_of
from gradwire.errors import ConfigError, TransportError
from gradwire.transport import Hub
from leftovers import until
from ranks import as_threads, caught

LINES = ["seed 1", "parameter 0: identity"]

Errors = dict[int, list[BaseException]]


@contextmanager
def grid(
    timeout: float = 60.0, check: Callable[[], None] = lambda: None
) -> Iterator[tuple[list[Ranks], list[list[Member]], Errors]]:
    """Two replicas of two shards: the ranks, their memberships, and what breaks them."""
    failed: Errors = {rank: [] for rank in range(4)}
    with ExitStack() as stack:
        rows = [stack.enter_context(group(2, timeout=timeout)) for _ in range(2)]
        columns = [stack.enter_context(group(2, timeout=timeout)) for _ in range(2)]
        of = []
        for rank in range(4):
            row, column = rows[rank // 2][rank % 2], columns[rank % 2][rank // 2]
            row.ranks = range(rank // 2 * 2, rank // 2 * 2 + 2)
            column.ranks = range(rank % 2, 4, 2)
            of.append([row, column])
        yield [Ranks(of[r], "grid", check, failed[r].append) for r in range(4)], of, failed


def test_a_single_rank_answers_at_once() -> None:
    for members in ([], [None], [None, None]):
        alone = Ranks(members, "alone")
        assert (alone.size, alone.rank) == (1, 0)
        assert alone.tell("t", (1, None)).result(timeout=0.0) == [[1, None]]
        assert alone.agree("a", "the plan", LINES).done()
    with group(2) as (one, other):
        ranks = [Ranks([None, one], "k"), Ranks([other, None], "k")]
        assert [(of.size, of.rank) for of in ranks] == [(2, 0), (2, 1)]
        pending = [of.tell("t", of.rank) for of in ranks]
        assert [one.result() for one in pending] == [[0, 1]] * 2


def test_all_ranks_of_all_groups_tell_in_rank_order_and_repeated_keys_are_counted() -> None:
    with grid() as (ranks, members, failed):
        assert [(of.size, of.rank) for of in ranks] == [(4, rank) for rank in range(4)]
        told = [[of.tell("t", [of.rank, turn]) for turn in range(3)] for of in ranks]
        again = Ranks(members[0], "grid")  # one more object goes on counting
        for of in told:
            assert [p.result() for p in of] == [[[r, turn] for r in range(4)] for turn in range(3)]
        last = [of.tell("t", "last") for of in (again, *ranks[1:])]
        assert [pending.result() for pending in last] == [["last"] * 4] * 4
        assert not any(failed.values())


def test_ranks_agree_and_a_difference_in_any_group_reaches_all() -> None:
    with grid() as (ranks, _, failed):
        agreed = [of.agree("a", "the plan", LINES) for of in ranks]
        assert len({pending.result() for pending in agreed}) == 1

        for odd in range(4):  # in the group of shards: the other replica is told what differs
            lines = [["seed 1", f"parameter 0: {'qsgd' if r == odd else 'bf16'}"] for r in range(4)]
            pending = [of.agree("a", "the plan", lines[of.rank]) for of in ranks]
            for found in [caught(one.result) for one in pending]:
                assert isinstance(found, ConfigError)
                assert str(found).startswith("ranks disagree on the plan: rank ")
                assert f"rank {odd} has 'parameter 0: qsgd'" in str(found)
                assert f"rank {odd ^ 1} has 'parameter 0: bf16'" in str(found)

        pending = [of.agree("a", "the plan", [f"replica {of.rank // 2}"]) for of in ranks]
        for rank, found in enumerate([caught(one.result) for one in pending]):
            assert f"rank {rank} has 'replica {rank // 2}', rank {rank ^ 2} has" in str(found)
        assert not any(failed.values())


def test_a_late_rank_ends_the_wait_of_all_groups() -> None:
    with grid(timeout=0.5) as (ranks, _, failed):
        pending = [of.tell("t", 0) for of in ranks[:3]]
        found = [caught(one.result) for one in pending]
        for error, absent in zip(found, (2, 3, 3), strict=True):
            assert isinstance(error, TransportError)
            assert f"rank {absent} did not reach grid/t within 0.5 s" in str(error)
        # On the thread that waits, so that a rank breaks the groups in which others wait for it.
        assert [failed[rank] for rank in range(3)] == [[error] for error in found]


def test_a_rank_that_leaves_or_whose_group_is_broken_waits_no_more() -> None:
    with grid() as (ranks, members, failed):
        pending = [of.tell("t", 0) for of in ranks[:2]]
        assert until(lambda: all(len(members[rank][1].part.open) == 1 for rank in (0, 1)))
        members[0][1].leave({})
        died = TransportError("a peer has died")
        members[1][1].end(died)
        left, broken = [caught(one.result) for one in pending]
        assert "has left the group" in str(left)
        assert str(broken) == str(died)
        assert [len(failed[rank]) for rank in (0, 1)] == [1, 1]


def test_what_a_check_raises_ends_the_wait() -> None:
    """The group's check breaks the others; a caller's own, such as that it detaches, does not."""
    broken: list[BaseException] = []

    def check() -> None:
        for error in broken:
            raise error

    def detached() -> None:
        raise KeyError("detached")

    with grid(check=check) as (ranks, _, failed):
        pending = ranks[0].tell("t", 0)
        assert isinstance(caught(partial(pending.result, detached)), KeyError)
        assert failed[0] == []
        broken.append(TransportError("another group is broken"))
        assert caught(pending.result) == broken[0]
        assert failed[0] == broken


def test_a_wait_with_a_timeout_can_be_taken_up_again() -> None:
    with group(2) as members:
        ranks = [Ranks([member], "k") for member in members]
        pending = ranks[0].tell("t", 0)
        for timeout in (0.0, 0.3):
            with pytest.raises(FutureTimeout):
                pending.result(timeout=timeout)
        assert not pending.done()
        ranks[1].tell("t", 1)
        assert pending.result(timeout=60.0) == [0, 1]


def test_too_much_to_tell_is_refused() -> None:
    with group(2) as members, pytest.raises(ConfigError, match="at most"):
        Ranks([members[0]], "k").tell("t", "x" * (5 << 20)).result()


def test_a_transport_error_breaks_all_groups_or_ends_the_wait_alone() -> None:
    hubs = [Hub(2, timeout=0.5) for _ in range(2)]

    def body(comm: Communicator) -> list[str]:
        other = Communicator(hubs[comm.rank].transport(0))
        found = []
        for breaks in (False, True):
            pending = ranks_of([comm, other], "k", breaks=breaks).tell("t", comm.rank)
            found.append(str(caught(pending.result)))
            assert (comm.error is not None, other.error is not None) == (breaks, breaks)
        other.close()
        return found

    for alone, broken in as_threads(2, body):
        assert "rank 1 did not reach k/t within 0.5 s" in alone
        assert "rank 1 did not reach k/t (2) within 0.5 s" in broken
