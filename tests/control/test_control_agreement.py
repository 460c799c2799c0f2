"""Ranks agree on a description, or learn at once where they differ; and exchange bytes."""

from __future__ import annotations

import hashlib
import threading
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from control_ranks import SIZES, Ears, Wrapped, agreed, channels, delayed, exchanged, group

from gradwire.errors import ConfigError, TransportError
from leftovers import until
from products import one_in
from ranks import raises, refuses

LINES = ["parameter 0: qsgd(bits=4)", "parameter 1: identity"]
OTHER = ["parameter 0: qsgd(bits=4)", "parameter 1: qsgd(bits=2)"]


# The first ranks of a group that differ, with a channel each or one for all.
WORLDS = [(n, odd, shared) for n in SIZES for odd in {0, n - 1} for shared in (False, True)]


@pytest.mark.parametrize(("world_size", "odd", "shared"), one_in(3, WORLDS))
def test_ranks_agree_or_all_are_told_the_difference_and_exchange_in_rank_order(
    world_size: int, odd: int, shared: bool
) -> None:
    body = "\n".join([f"world size {world_size}", "the plan", *LINES]).encode()
    digest = hashlib.blake2b(body, digest_size=32).digest()
    wanted = [b"=" * rank for rank in range(world_size)]
    with group(world_size, shared=shared) as members:
        assert {*agreed(members, "plan/1", LINES)} == {int.from_bytes(digest[:8], "little")}

        lines = [OTHER if rank == odd else LINES for rank in range(world_size)]
        differs = agreed(members, "plan/2", *lines)
        for rank, error in enumerate(differs if world_size > 1 else []):
            assert isinstance(error, ConfigError)
            assert str(error).startswith("ranks disagree on the plan: ")
            assert f"rank {odd} has 'parameter 1: qsgd(bits=2)'" in str(error)
            assert rank == odd or f"rank {rank} has 'parameter 1: identity'" in str(error)

        for last in members:
            key = f"{last.rank} comes last"
            met = [m.exchange(key, wanted[m.rank]) for m in (*{*members} - {last}, last)]
            assert [future.result(60) for future in met] == [wanted] * world_size


def test_other_stores(tmp_path: Any) -> None:
    for store in (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        dist.FileStore(str(tmp_path / "store"), 3),
    ):
        with group(3, dist.PrefixStore("a", dist.PrefixStore("b", store))) as members:
            assert len({*agreed(members, "plan", LINES)}) == 1
            assert exchanged(members) == [b"0", b"1", b"2"]


def test_the_first_line_that_differs_is_named() -> None:
    with group(2) as members:
        _, error = agreed(members, "short", LINES, LINES[:1])
        assert "rank 1 has '(nothing)', rank 0 has 'parameter 1: identity'" in str(error)
        first, second = agreed(members, "plan", ["same", "a", "b"], ["same", "c", "d"])
        assert "rank 0 has 'a', rank 1 has 'c'" in str(first)
        assert "rank 1 has 'c', rank 0 has 'a'" in str(second)


@pytest.mark.parametrize("joined", [False, True])
def test_a_difference_does_not_wait_for_the_last_rank(joined: bool) -> None:
    """Which has joined by then, and heard of it, or joins later."""
    store = dist.HashStore()
    with channels(3) as made:

        def join(rank: int) -> Any:
            return made[rank].join(store, rank, 3, 60.0, Ears())

        last = join(2) if joined else None
        early = [join(r).agree("plan", "the plan", [LINES, OTHER][r]) for r in (0, 1)]
        assert all(isinstance(future.exception(60), ConfigError) for future in early)
        if joined:
            assert until(lambda: last.part.settled and "plan" in last.part.differing)
        late = (last or join(2)).agree("plan", "the plan", LINES)
        assert "rank 2 has 'parameter 1: identity', rank 1 has" in str(late.exception(60))


def test_the_first_to_come_is_slow_to_say_what_it_holds() -> None:
    """Others that differ from it, and not from each other, see each other's entries meanwhile."""
    store = dist.HashStore()
    goes_on = threading.Event()
    describes = threading.Event()

    def before(key: str) -> None:
        if key.endswith("meetings/plan/0"):
            describes.set()
            goes_on.wait(60)

    slow = Wrapped(store, before)
    with channels(3) as made:
        members = [made[r].join(store if r else slow, r, 3, 60.0, Ears()) for r in range(3)]
        exchanged(members)
        futures = [members[0].agree("plan", "the plan", OTHER)]
        assert describes.wait(60)
        futures += [members[r].agree("plan", "the plan", LINES) for r in (1, 2)]
        assert until(lambda: all(m.part._news._counted >= 3 for m in members[1:]))
        assert not any(future.done() for future in futures[1:])
        goes_on.set()
        for rank in (1, 2):
            error = str(futures[rank].exception(60))
            assert f"rank {rank} has 'parameter 1: identity', rank 0 has" in error
        assert isinstance(futures[0].exception(60), ConfigError)


def test_a_late_rank_is_no_difference() -> None:
    with group(3) as members:
        futures = [members[r].agree("plan", "the plan", LINES) for r in (0, 2)]
        exchanged(members)  # handled behind the agreement
        assert not any(future.done() for future in futures)
        futures.append(members[1].agree("plan", "the plan", LINES))
        assert len({future.result(60) for future in futures}) == 1


def test_missing_ranks_are_named() -> None:
    with group(5, timeout=3.0) as members:
        futures = [
            (rank, future)
            for rank in (0, 2, 4)
            for future in (
                members[rank].agree("plan", "the plan", LINES),
                members[rank].exchange("the plan", b""),
            )
        ]
        for rank, future in futures:
            error = future.exception(60)
            assert isinstance(error, TransportError)
            assert error.peer == 1
            assert str(error).startswith(
                f"rank {rank}: ranks 1, 3 did not reach the plan within 3 s"
            )


def test_many_missing_ranks_are_not_all_named_and_rank_0_may_be_one() -> None:
    with channels(1) as (channel,):
        member = channel.join(dist.HashStore(), 0, 1024, 0.1, Ears())
        error = str(member.exchange("e", b"").exception(60))
        assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and others did not reach" in error
        member = channel.join(dist.HashStore(), 1, 3, 0.3, Ears())
        (missing,) = agreed([member], "plan", LINES)
        assert isinstance(missing, TransportError)
        assert missing.peer == 0
        raises(TransportError, partial(member.first, "key", b""), "rank 0 has not joined")


def test_many_agreements_in_any_order() -> None:
    keys = [f"plan/{i}" for i in range(30)]
    with group(3) as members:
        futures = {
            (member.rank, key): member.agree(key, key, LINES)
            for member in members
            for key in keys[:: (-1) ** member.rank]
        }
        for key in keys:
            assert len({futures[rank, key].result(60) for rank in range(3)}) == 1


def test_a_key_is_used_once() -> None:
    with group(2) as (member, other):
        first, second = member.exchange("e", b""), member.exchange("e", b"")
        assert isinstance(second.exception(60), ConfigError)
        other.exchange("e", b"1")
        assert first.result(60) == [b"", b"1"]


def test_arguments_are_checked() -> None:
    with channels(1) as (channel,):
        join = partial(channel.join, dist.HashStore(), listener=Ears())
        refuses("rank 2 of a group of 2", partial(join, 2, 2, 1.0))
        refuses("timeout", partial(join, 0, 2, 0.0))


@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_random_delays_before_every_operation(seed: int) -> None:
    store = dist.HashStore()
    ears = [Ears() for _ in range(3)]
    with channels(3) as made:
        members = [
            made[r].join(delayed(store, seed * 3 + r, 0.01), r, 3, 60.0, ears[r]) for r in range(3)
        ]
        for step in range(3):
            pending = [m.agree(f"equal {step}", "the plan", LINES) for m in members]
            odd = (seed + step) % 3
            differing = [
                m.agree(f"odd {step}", "the plan", OTHER if m.rank == odd else LINES)
                for m in members
            ]
            met = [m.exchange(f"e {step}", bytes([m.rank])) for m in members]
            for number in range(7):
                for member in members:
                    member.tell({"i": 7 * step + number})
            assert len({future.result(60) for future in pending}) == 1
            assert all(isinstance(future.exception(60), ConfigError) for future in differing)
            assert [future.result(60) for future in met] == [[b"\0", b"\1", b"\2"]] * 3
        assert {m.first("k", bytes([m.rank])) for m in members} == {b"\0"}
        # Entries are in order: notices sent before a completed agreement have arrived.
        exchanged(members, "last")
    for rank, ear in enumerate(ears):
        for sender in {0, 1, 2} - {rank}:
            told = [notice["i"] for s, notice in ear.heard_from if s == sender]
            assert told == list(range(21))


def test_what_all_have_reached_ends_though_the_last_dies_before_it_says_so() -> None:
    with group(2) as members:
        exchanged(members, "ready")
        first: Any = members[0]
        last: Any = members[1]
        met, agreement = first.exchange("e", b"a"), first.agree("p", "the plan", LINES)
        assert until(lambda: len(first.part.open) == 2)
        last.part.publish = lambda kind, key: None
        members[1].exchange("e", b"b").result(60)
        members[1].agree("p", "the plan", LINES).result(60)
        first.part.dead = lambda: [1]
        assert members[0].ended() == {1: []}
        assert met.result(60) == [b"a", b"b"]
        assert agreement.result(60)
        late = members[0].exchange("late", b"")
        assert until(lambda: members[0].ended() == {1: ["late"]})
        members[0].end(TransportError("rank 1 has died"))
        for future in (late, members[0].exchange("later", b"")):
            assert str(future.exception(60)) == "rank 1 has died"
