"""Links: what ranks measure of a transport whose delays are known, and what is made of it."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from gradwire.engine import Communicator
from gradwire.errors import ConfigError, TransportError
from gradwire.planner import trips
from gradwire.planner.link_watch import LinkWatch
from gradwire.planner.links import Links, measure_links, tournament
from gradwire.transport import Hub
from leftovers import until
from ranks import as_threads, caught

ALPHA = 0.003
BETA = 1e-7


def delayed(n: int, timeout: float = 20.0) -> Hub:
    """Every rank's sends take ALPHA seconds, and BETA (1 + its number) more for each byte."""

    def late(source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        time.sleep(ALPHA + BETA * (1 + source) * message.numel())

    return Hub(n, timeout=timeout, corrupt=late)


class Clocks:
    """A clock for each pair of ranks, on which the messages between them take time, and nothing
    else does.

    Args:
        seconds: (number of the message, source, bytes, time) -> what the message takes.
    """

    def __init__(self, seconds: Callable[[int, int, int, float], float]) -> None:
        self.seconds = seconds
        self.now: dict[tuple[int, int], float] = defaultdict(float)
        self.sent: Counter[tuple[int, int]] = Counter()
        self.mine = threading.local()  # the pair for which this thread sends

    def hub(self, n: int) -> Hub:
        return Hub(n, corrupt=self.pass_time)

    def pass_time(self, source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        pair = self.mine.pair = min(source, destination), max(source, destination)
        self.sent[pair] += 1
        self.now[pair] += self.seconds(
            self.sent[pair], source, message.numel(), self.now[pair]
        )  # fmt: skip

    def __call__(self) -> float:
        return self.now[self.mine.pair]


def steady(number: int, source: int, nbytes: int, now: float) -> float:
    return ALPHA + BETA * (1 + source) * nbytes


def disturbed(number: int, source: int, nbytes: int, now: float) -> float:
    """Every third large message is late."""
    late = number % 3 == 0 and nbytes > 200_000
    return steady(number, source, nbytes, now) + (0.02 if late else 0)


class Bucket:
    """Lets half a millisecond's worth pass at once after a rest."""

    def __init__(self) -> None:
        self.full = {0: 0.0, 1: 0.0, 2: 0.0}  # when each rank's bucket is full again

    def __call__(self, number: int, source: int, nbytes: int, now: float) -> float:
        takes = BETA * (1 + source) * nbytes
        self.full[source] = max(self.full[source], now) + takes
        return ALPHA + max(self.full[source] - now - 0.0005, 0.0)


def check(links: Links, n: int, rel: float) -> None:
    for i in range(n):
        for j in range(n):
            if i != j:
                assert links.alpha[i][j] == pytest.approx(ALPHA, rel=rel)
                assert links.beta[i][j] == pytest.approx(BETA * (1 + i), rel=rel)


def test_each_two_ranks_meet_once_in_disjoint_pairs() -> None:
    for n in (1, 2, 3, 4, 5, 8):
        rounds = list(tournament(n))
        assert len(rounds) == (n - 1 if n % 2 == 0 else n if n > 1 else 1)
        for pairs in rounds:
            ranks = [rank for pair in pairs for rank in pair]
            assert len(set(ranks)) == len(ranks)
        met = [pair for pairs in rounds for pair in pairs]
        assert sorted(met) == [(i, j) for i in range(n) for j in range(i + 1, n)]


@pytest.mark.parametrize("make", [lambda: steady, lambda: disturbed, Bucket])
def test_the_delays_of_a_transport_are_found(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (2, 3):
        clocks = Clocks(make())
        monkeypatch.setattr(trips, "clock", clocks)
        found = as_threads(n, partial(measure_links, seconds=0.5), hub=clocks.hub(n))
        assert all(links == found[0] for links in found)
        check(found[0], n, 0.02)
        assert found[0].worst_beta == max(max(row) for row in found[0].beta)


def test_one_rank_has_no_link() -> None:
    (links,) = as_threads(1, measure_links)
    assert links == Links(((0.0,),), ((0.0,),))
    assert (links.worst_alpha, links.typical_beta) == (0.0, 0.0)


def test_a_rank_that_does_not_come_is_an_error_on_the_others() -> None:
    hub = delayed(3)

    def body(comm: Communicator) -> BaseException | None:
        if comm.rank == 1:
            hub.kill(1)
            return None
        return caught(lambda: measure_links(comm))

    ends = as_threads(3, body, hub=hub)
    assert all(isinstance(ends[r], TransportError) for r in (0, 2))
    assert "rank 1" in str(ends[0])


def test_links_are_saved(tmp_path: Path) -> None:
    links = Links(((0, 1e-3), (2e-3, 0)), ((0, 1e-8), (3e-8, 0)))
    links.save(tmp_path / "links.json")
    assert Links.load(tmp_path / "links.json") == links
    assert (links.worst_alpha, links.typical_beta) == (2e-3, 2e-8)
    (tmp_path / "bad.json").write_text('{"alpha": [[0]]}')
    with pytest.raises(ConfigError, match=r"bad\.json: no links: KeyError: 'beta'"):
        Links.load(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="alpha has a number that is negative"):
        Links(((0, -1.0), (1.0, 0)), ((0, 1.0), (1.0, 0)))


def test_a_change_is_one_of_the_slowest_link() -> None:
    def links(alpha: float, beta: float) -> Links:
        return Links(((0, alpha), (1e-4, 0)), ((0, beta), (1e-9, 0)))

    before = links(1e-3, 1e-8)
    assert not before.changed(links(1.15e-3, 0.9e-8), 0.2)
    assert before.changed(links(1.25e-3, 1e-8), 0.2)
    assert before.changed(links(1e-3, 0.8e-8), 0.2)
    with pytest.raises(ConfigError, match="by=0"):
        before.changed(before, 0)
    with pytest.raises(ConfigError, match="2 and 1 ranks"):
        before.changed(Links.of(1, []), 0.2)


def test_a_watch_finds_the_delays_beside_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(steady)
    monkeypatch.setattr(trips, "clock", clocks)

    def body(comm: Communicator) -> Links | None:
        watch = LinkWatch(comm, measure_links(comm, 0.2), share=0.5)
        for step in range(30):
            values = torch.ones(100)
            gradwire.all_reduce(values, "identity", group=comm, step=step)
            assert values.eq(3).all()
        calm = watch.rounds + 12
        while watch.rounds < calm and watch.running:  # the first rank to get there ends all
            time.sleep(0.01)
        newest = watch.newest
        watch.close()
        watch.close()
        assert not watch.running
        return newest

    for links in as_threads(3, body, hub=clocks.hub(3)):
        assert links is not None
        check(links, 3, 0.05)


def test_a_watch_finds_no_byte_that_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(lambda *_: ALPHA)
    monkeypatch.setattr(trips, "clock", clocks)
    before = Links.of(2, [(0, 1, ALPHA, BETA, 2 * BETA)])

    def body(comm: Communicator) -> Links | None:
        watch = LinkWatch(comm, before, share=1.0)
        assert until(lambda: watch.newest is not None or not watch.running)
        newest = watch.newest
        watch.close()
        return newest

    for links in as_threads(2, body, hub=clocks.hub(2)):
        assert links is not None
        assert links.beta == before.beta


def test_a_watch_takes_its_share_of_the_time() -> None:
    def body(comm: Communicator) -> tuple[int, float]:
        links = measure_links(comm, 0.5)
        begun = time.monotonic()
        watch = LinkWatch(comm, links, share=0.25)
        while (rounds := watch.rounds) < 3:
            time.sleep(0.01)
        seconds = time.monotonic() - begun  # more of it on a busy machine
        watch.close()
        return rounds, seconds

    for rounds, seconds in as_threads(2, body, hub=delayed(2)):
        # A round takes 12 trips of 2 ALPHA at least, and twice 20 ms.
        assert seconds > (rounds - 1) * (5 * 2 * ALPHA + 0.03) / 0.25


def test_a_watch_ends_with_its_group() -> None:
    watches = []

    def body(comm: Communicator) -> None:
        watch = LinkWatch(comm, measure_links(comm, 0.5), share=1e-6)  # so it rests for minutes
        watches.append(watch)
        assert until(lambda: watch.rounds)

    as_threads(2, body, hub=delayed(2, timeout=1e4))  # closes the communicators
    assert until(lambda: not any(watch.running for watch in watches))


def test_a_peer_that_dies_ends_the_watch() -> None:
    hub = delayed(2, timeout=2.0)

    def body(comm: Communicator) -> bool:
        watch = LinkWatch(comm, measure_links(comm, 0.5), share=1.0)
        if comm.rank == 1:
            hub.kill(1)
        ended = until(lambda: not watch.running, 50)
        return ended and isinstance(comm.error, TransportError)

    assert as_threads(2, body, hub=hub) == [True, True]


def test_a_watch_of_one_rank_has_nothing_to_do_and_a_share_is_checked() -> None:
    (running,) = as_threads(1, lambda comm: LinkWatch(comm, measure_links(comm)).running)
    assert not running

    def body(comm: Communicator) -> None:
        LinkWatch(comm, measure_links(comm), share=0)

    with pytest.raises(ConfigError, match="share=0: give a share above 0"):
        as_threads(1, body)
