"""All others receive a rank's notices once and in order; leaving; foreign entries are ignored."""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from control_ranks import SIZES, Ears, Wrapped, agreed, channels, exchanged, group, joined

from gradwire.control import Channel
from gradwire.control import channel as channel_module
from gradwire.errors import TransportError
from leftovers import until
from products import one_in
from ranks import raises, refuses


@pytest.mark.parametrize(
    ("world_size", "shared"), one_in(2, [(n, shared) for n in SIZES for shared in (False, True)])
)
def test_all_others_hear_each_notice_once_and_in_order(world_size: int, shared: bool) -> None:
    ears = [Ears() for _ in range(world_size)]
    count = 40
    with group(world_size, shared=shared, ears=ears) as members:
        for i in range(count):  # the first are sent before the rank has its place
            for member in members:
                member.tell({"i": i})
        assert until(lambda: all(len(e.heard_from) >= count * (world_size - 1) for e in ears))
        exchanged(members)  # a duplicate would arrive before this
    for rank, ear in enumerate(ears):
        for sender in range(world_size):
            told = [notice["i"] for s, notice in ear.heard_from if s == sender]
            assert told == ([] if sender == rank else list(range(count)))


def test_a_rank_that_joins_late_hears_what_was_told_before() -> None:
    store = dist.HashStore()
    ears = Ears()
    with channels(2) as made:
        made[0].join(store, 0, 2, 60.0, Ears()).tell({"failed": "RuntimeError"})
        made[1].join(store, 1, 2, 60.0, ears)
        assert until(lambda: ears.heard_from == [(0, {"failed": "RuntimeError"})])


def test_ticks_and_failing_listeners(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Ears):
        def heard(self, sender: int, notice: Any) -> None:
            super().heard(sender, notice)
            raise RuntimeError("heard")

        def tick(self) -> None:
            super().tick()
            raise RuntimeError("tick")

    ears = [Failing(), Failing()]
    with caplog.at_level(logging.WARNING, "gradwire"), group(2, ears=list(ears)) as members:
        members[0].tell({"one": 1})
        assert until(lambda: ears[0].ticks > 3)
        members[0].tell({"two": 2})
        assert until(lambda: len(ears[1].heard_from) == 2)
        members[0].leave({})
        settled, ticks = ears[1].ticks, ears[0].ticks
        assert until(lambda: ears[1].ticks > settled + 6)
        assert ears[0].ticks <= ticks + 1  # one may have been under way
    texts = [record.getMessage() for record in caplog.records]
    assert sum("tick" in text for text in texts) == 2  # one each
    assert sum("failed on a notice" in text for text in texts) == 3  # two, and the last


def test_what_cannot_be_told(caplog: pytest.LogCaptureFixture) -> None:
    with group(2) as members:
        members[0].tell({"what": object()})
        members[0].tell({"what": "x" * 100_000})
    assert len(caplog.records) == 2


def test_opposite_order_of_two_groups() -> None:
    one, two = dist.HashStore(), dist.HashStore()
    with channels(2) as made:
        first = [made[0].join(one, 0, 2, 60.0, Ears()), made[1].join(two, 1, 2, 60.0, Ears())]
        agreed = [first[0].agree("a", "one", []), first[1].agree("a", "two", [])]
        second = [made[0].join(two, 0, 2, 60.0, Ears()), made[1].join(one, 1, 2, 60.0, Ears())]
        agreed += [second[0].agree("a", "two", []), second[1].agree("a", "one", [])]
        results = [future.result(60) for future in agreed]
        assert results[0] == results[3]
        assert results[1] == results[2]


def test_groups_over_one_server_share_a_thread_and_do_not_mix() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = threading.enumerate()
    stores = [dist.PrefixStore(f"group {g}/", server) for g in range(5)]
    ears = [[Ears() for _ in range(2)] for _ in stores]
    with channels(2) as made:
        members = [joined(made, store, 2, of) for store, of in zip(stores, ears, strict=True)]
        for g, (one, two) in enumerate(members):
            one.tell({"group": g})
            assert exchanged([one, two], tag=f"{g} ") == [b"%d 0" % g, b"%d 1" % g]
        assert until(
            lambda: all(e[1].heard_from == [(0, {"group": g})] for g, e in enumerate(ears))
        )
        # Two for each channel, however many groups.
        ours = [thread for thread in threading.enumerate() if thread not in before]
        assert len(ours) <= 4


# ---- leaving


@pytest.mark.parametrize("shared", [False, True])
def test_the_last_notice(shared: bool) -> None:
    """Of ranks in processes of their own, and of ranks that share a channel."""
    ears = [Ears() for _ in range(3)]
    with group(3, ears=ears, shared=shared) as members:
        exchanged(members)
        members[1].tell({"step": 12})
        members[1].leave({"left": "at step 12"})
        members[1].leave({"again": 0})
        members[1].tell({"too": "late"})
        told = [(1, {"step": 12}), (1, {"left": "at step 12"})]
        assert until(lambda: all(len(ears[rank].heard_from) == 2 for rank in (0, 2)))
        for rank in (0, 2):  # rings: what was told too late would be heard first
            members[rank].tell({"after": rank})
        assert until(lambda: all(len(ears[rank].heard_from) == 3 for rank in (0, 2)))
        assert ears[0].heard_from == [*told, (2, {"after": 2})]
        assert ears[2].heard_from == [*told, (0, {"after": 0})]
        assert ears[1].heard_from == []
        raises(TransportError, partial(members[1].first, "k", b""), "has left")
        raises(TransportError, partial(members[1].exchange("f", b"").result, 60), "has left")


def test_closing_ends_what_is_pending_and_tells_what_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "_CLOSING_S", 60.0)  # of a machine that is slow
    store = dist.HashStore()
    ears = Ears()
    with channels(3) as made:
        members = [made[r].join(store, r, 3, 60.0, ears if r == 1 else Ears()) for r in range(2)]
        for future in [m.agree("a", "plan", []) for m in members]:
            assert not future.done()
        assert until(lambda: members[1].part.settled)
        pending = members[0].exchange("e", b"")
        members[0].tell({"last": "word"})
        made[0].close()
        assert isinstance(pending.exception(60), TransportError)
        assert until(lambda: ears.heard_from == [(0, {"last": "word"})])
        assert isinstance(members[0].exchange("f", b"").exception(60), TransportError)
        members[0].tell({"too": "late"})
        members[0].leave({})
        refuses("closed", partial(made[0].join, store, 0, 3, 60.0, Ears()))


def test_closing_leaves_no_thread_in_a_distant_store() -> None:
    """Python would end a process with an abort where one is left there."""
    store, ears = dist.HashStore(), Ears()
    with channels(2) as made:
        near = made[1].join(store, 1, 2, 60.0, ears)
        distant = Wrapped(store, lambda key: time.sleep(0.15))
        member = made[0].join(distant, 0, 2, 60.0, Ears())
        assert exchanged([member, near]) == [b"0", b"1"]
        (thread,) = [one.thread for one in made[0]._connections]
        member.tell({"last": "word"})
        made[0].close()
        assert not thread.is_alive()
        assert until(lambda: ears.heard_from == [(0, {"last": "word"})])


def test_a_store_that_hangs_holds_up_nobody() -> None:
    """Deadlines, ticks, other groups, leaving and closing do not block."""
    hangs = threading.Event()
    end = threading.Event()

    def before(key: str) -> None:
        if hangs.is_set():
            end.wait(300)

    ears = Ears()
    with channels(1) as (channel,):
        other = channel.join(dist.HashStore(), 0, 1, 60.0, Ears())
        member = channel.join(Wrapped(dist.HashStore(), before), 0, 2, 0.3, ears)
        assert until(lambda: member.part.settled)
        hangs.set()
        error = member.agree("a", "the plan", []).exception(60)
        assert isinstance(error, TransportError)
        assert "does not answer" in str(error)
        ticks = ears.ticks
        assert until(lambda: ears.ticks > ticks + 2)
        assert other.exchange("e", b"x").result(60) == [b"x"]
        raises(TransportError, partial(member.first, "k", b""), "does not answer")
        member.leave({})
        again = channel.join(Wrapped(dist.HashStore(), before), 0, 2, 60.0, ears)
        again.tell({})
        channel.close()
        assert not end.is_set()  # none of these has waited for the store
        end.set()


# ---- incarnations


def looked(channel: Channel) -> None:
    """Wait until a channel's thread has looked several times at what there is of its groups."""
    ears = Ears()
    beside = channel.join(dist.HashStore(), 0, 1, 60.0, ears)
    assert until(lambda: ears.ticks > 3)
    beside.leave({})


def test_a_group_that_is_made_anew_over_its_store() -> None:
    store = dist.HashStore()
    with channels(2) as made:
        for incarnation in range(3):
            ears = [Ears(), Ears()]
            members = joined(made, store, 2, ears)
            members[0].tell({"incarnation": incarnation})
            # Under the same key: older entries must not count.
            assert len({*agreed(members, "a", [f"version {incarnation}"])}) == 1
            assert members[0].first("k", b"%d" % incarnation) == b"%d" % incarnation
            assert [members[r].first("empty", b"x" * (1 - r)) for r in (1, 0)] == [b"", b""]
            heard = ears[1].heard_from
            assert until(lambda heard=heard: bool(heard))
            assert heard == [(0, {"incarnation": incarnation})]
            for member in members:
                member.leave({})


@pytest.mark.parametrize("leaves", [True, False])
def test_an_incarnation_admits_no_rank_again(leaves: bool) -> None:
    """A rank comes back before the others have left; or is started anew, where rank 0 of the
    former incarnation lives: it waits for the next."""
    store = dist.HashStore()
    with channels(4) as made:
        old = joined(made[:2], store)
        assert exchanged(old, tag="old ") == [b"old 0", b"old 1"]
        if leaves:
            old[1].leave({})
        new = made[1 if leaves else 3].join(store, 1, 2, 60.0, Ears())
        waits = new.exchange("e", b"new 1")
        looked(made[1 if leaves else 3])
        assert not new.part.settled
        if leaves:
            old[0].leave({})
        other = made[0 if leaves else 2].join(store, 0, 2, 60.0, Ears())
        assert other.exchange("e", b"new 0").result(60) == [b"new 0", b"new 1"]
        assert waits.result(60) == [b"new 0", b"new 1"]


def test_ranks_count_their_incarnations() -> None:
    """A rank that is one ahead, having left before rank 0 came, waits for rank 0's next."""
    store = dist.HashStore()
    with channels(2) as made:
        made[1].join(store, 1, 2, 60.0, Ears()).leave({})
        ahead = made[1].join(store, 1, 2, 60.0, Ears())
        first = made[0].join(store, 0, 2, 60.0, Ears())
        assert until(lambda: first.part.settled)
        looked(made[1])
        assert not ahead.part.settled
        first.leave({})
        second = made[0].join(store, 0, 2, 60.0, Ears())
        assert exchanged([second, ahead]) == [b"0", b"1"]


def test_processes_that_are_started_again() -> None:
    """New channels count from 1; ranks of the former incarnation died, one before it joined."""
    store = dist.HashStore()
    with channels(2) as former:
        former[0].join(store, 0, 3, 60.0, Ears()).tell({"stale": 1})
        stale = former[1].join(store, 1, 3, 60.0, Ears())
        stale.agree("a", "plan", ["stale"])
        assert until(lambda: stale.part.settled)
    with channels(3) as made:
        # Early, while the former rank 0 could still have answered.
        members = {r: made[r].join(store, r, 3, 60.0, Ears()) for r in (1, 2)}
        ears = Ears()
        members[0] = made[0].join(store, 0, 3, 60.0, ears)
        futures = [m.agree("a", "plan", ["fresh"]) for m in members.values()]
        assert len({future.result(60) for future in futures}) == 1
        assert ears.heard_from == []


@pytest.mark.parametrize(("kind", "groups"), [("hash", 60), ("tcp", 12)])
def test_groups_that_were_left_leave_nothing(kind: str, groups: int) -> None:
    if kind == "hash":
        server: Any = dist.HashStore()
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = {*threading.enumerate()}
    held, kept = [], []

    def now() -> tuple[int, int]:
        return len({*threading.enumerate()} - before), len(os.listdir("/proc/self/fd"))

    with channels(2) as made:
        for g in range(groups):
            store = dist.PrefixStore(f"group {g % (groups - 5)}/", server)
            members = joined(made, store)
            exchanged(members)
            for member in members:
                member.leave({})
            kept += members  # references to them must not keep a connection
            held.append(now())
        # Threads end, and the server lets its ends go, a little later.
        assert until(lambda: now()[0] <= held[0][0] and now()[1] <= held[0][1] + 4)


# ---- foreign entries


def test_what_others_write_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    ears = [Ears(), Ears()]
    with group(2, store, ears=ears) as members:
        exchanged(members)
        news = members[0].part.space.below("news")
        pending = members[1].exchange("f", b"1")
        agreement = members[1].agree("a", "the plan", [])
        entries = [
            b"",
            b"\xff\xfe",
            b"[" * 100_000,
            b"[]",
            b"{}",
            b'{"from": 7, "told": {}}',
            b'{"from": "0", "told": {}}',
            b'{"from": true, "told": {}}',
            b'{"from": 0, "told": []}',
            b'{"from": 0, "exchanged": "f"}',  # false
            b'{"from": 0, "differs": "a"}',  # without a description
            b'{"from": 0, "told": {"true": 1}}',
        ]
        for entry in entries:
            news.write(str(news.add("n")), entry)
        members[0].tell({"after": 1})  # rings
        members[1].tell({"after": 1})
        assert until(lambda: (0, {"after": 1}) in ears[1].heard_from)
        assert ears[1].heard_from == [(0, {"true": 1}), (0, {"after": 1})]
        assert not pending.done()
        assert members[0].exchange("f", b"0").result(60) == [b"0", b"1"]
        assert pending.result(60) == [b"0", b"1"]
        members[0].agree("a", "the plan", [])
        assert agreement.result(60)
        assert until(lambda: len(caplog.records) == 2)
    # One for each rank, though ten entries are garbled.
    assert {record.getMessage()[:38] for record in caplog.records} == {
        "gradwire: rank 0 ignores entries in th",
        "gradwire: rank 1 ignores entries in th",
    }
    assert len(caplog.records) == 2


def test_a_writer_that_dies_between_two_operations_holds_up_nobody() -> None:
    ears = [Ears(), Ears()]
    with group(2, ears=ears) as members:
        exchanged(members)
        news = members[0].part.space.below("news")
        late = news.add("n")
        members[0].tell({"i": 1})
        assert until(lambda: ears[1].heard_from == [(0, {"i": 1})])
        news.write(str(late), b'{"from": 0, "told": {"i": 0}}')  # it was only slow
        assert until(lambda: ears[1].heard_from == [(0, {"i": 1}), (0, {"i": 0})])


def test_a_counter_that_makes_no_sense_ends_its_group_only() -> None:
    store = dist.HashStore()
    with channels(1) as (channel,):
        groups = [
            [channel.join(dist.PrefixStore(f"{g}/", store), r, 2, 60.0, Ears()) for r in range(2)]
            for g in range(2)
        ]
        for members in groups:
            exchanged(members)
        pending = groups[0][1].exchange("f", b"")
        store.set(groups[0][0].part.space.below("news")._prefix + "n", b"many")
        groups[1][0].tell({"rings": 1})
        error = pending.exception(60)
        assert isinstance(error, TransportError)
        assert "invalid data" in str(error)
        assert exchanged(groups[1], "f") == [b"0", b"1"]


def test_a_store_that_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fails = threading.Event()

    def before(key: str) -> None:
        if fails.is_set():
            raise RuntimeError("Broken pipe\nand a stack trace")

    with group(2, Wrapped(dist.HashStore(), before)) as members:
        exchanged(members)
        pending = members[0].exchange("f", b"")
        fails.set()
        error = pending.exception(60)
        assert isinstance(error, TransportError)
        assert "(Broken pipe)" in str(error)
        members[0].tell({"into": "the void"})
        assert isinstance(members[0].agree("a", "plan", []).exception(60), TransportError)
        raises(TransportError, partial(members[0].first, "k", b""))
    # Rank 1 waited for nothing, so it logs nothing.
    assert [record.levelname for record in caplog.records] == ["WARNING"]
