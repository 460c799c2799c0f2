"""The laws of every transport: bytes arrive in order, by peer and tag, of any size, lent or copied;
and every wait ends, with delivery or with an error that names the peer."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import TransportError
from gradwire.transport import Hub, Transport
from ranks import at_once, raises, refuses
from transport.shm_ends import Key, content, ends, failing, killable, nothing, taken

RING = 1 << 12  # so that most messages are larger
SIZE = 300_000  # more than is worth lending
KINDS = ["loopback", "shm"]
Messages = dict[Key, list[int]]


@contextmanager
def transports(
    kind: str, world_size: int, timeout: float = 20.0, lends: bool = False
) -> Iterator[list[Any]]:
    """Every rank's transport; a loopback that lends overwrites what is given back."""
    if kind == "loopback":
        hub = Hub(world_size, timeout=timeout, lends=lends)
        yield [hub.transport(rank) for rank in range(world_size)]
    else:
        with ends(world_size, timeout, RING) as made:
            yield made


def play(transport: Transport, messages: Messages, seed: int, lends: bool) -> dict[object, bytes]:
    """A rank's part: it starts its sends and receives in an order of its own, waits in another.

    Where it `lends`, half of the sends are from its store and half of the receives borrow, and it
    ends the receives before its sends, as borrowers must. Of one tag it waits in the order of
    starting, by which shared memory matches: the loopback matches in the order of waiting.
    """
    rank, mixed = transport.rank, random.Random(seed * 10 + transport.rank)
    steps = [(k, k[0] == rank) for k, sizes in messages.items() if rank in k[:2] for _ in sizes]
    mixed.shuffle(steps)
    begun: Counter[Key] = Counter()
    pending: defaultdict[Key, list[tuple[int, Any, torch.Tensor | None]]] = defaultdict(list)
    for key, sends in steps:
        place, (source, destination, tag) = begun[key], key
        begun[key] += 1
        size, inbox = messages[key][place], None
        lent = lends and size > 0 and bool(mixed.getrandbits(1))
        if sends:
            data = content(key, place, size)
            if lent and transport.store is not None:
                data = taken(transport, size).copy_(data)
            started: Any = transport.isend(data, destination, tag)
        elif lent:
            started = transport.borrow(size, source, tag)
        else:
            inbox = nothing(size)
            started = transport.irecv(inbox, source, tag)
        pending[key].append((place, started, inbox))
    mixed.shuffle(steps)
    if lends:
        steps.sort(key=lambda step: step[1])
    found, held = {}, []
    for key, sends in steps:
        place, started, inbox = pending[key].pop(0)
        if sends:
            for loan in held:
                loan.give_back()
            held.clear()
        message = started.wait()
        if not sends:
            found[key, place] = (message if inbox is None else inbox).numpy().tobytes()
            held += [started] * (inbox is None)
        if mixed.getrandbits(1):
            for loan in held:
                loan.give_back()
            held.clear()
    for loan in held:
        loan.give_back()
    return found


sizes = st.lists(
    st.one_of(st.integers(0, 100), st.integers(0, 5 * RING), st.sampled_from([RING, RING - 16])),
    min_size=1,
    max_size=4,
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, Messages, int]:
    """World size, sizes of the messages of each source, destination and tag, a seed."""
    world_size = draw(st.integers(2, 3))
    ranks = st.integers(0, world_size - 1)
    keys = st.tuples(ranks, ranks, st.integers(0, 2)).filter(lambda key: key[0] != key[1])
    return world_size, draw(st.dictionaries(keys, sizes, max_size=8)), draw(st.integers(0, 1 << 20))


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_any_messages_arrive_in_order_by_peer_and_tag(kind: str, lends: bool) -> None:
    @settings(max_examples=60 if lends else 30, deadline=None, derandomize=True)
    @given(plans())
    def arrive(plan: tuple[int, Messages, int]) -> None:
        world_size, messages, seed = plan
        with transports(kind, world_size, lends=lends) as made:
            found = at_once(*(partial(play, end, messages, seed, lends) for end in made))
        assert found == [
            {
                (key, place): content(key, place, size).numpy().tobytes()
                for key, sent in messages.items()
                for place, size in enumerate(sent)
                if key[1] == rank
            }
            for rank in range(world_size)
        ]

    arrive()


@pytest.mark.parametrize("kind", KINDS)
def test_silence_ends_in_an_error_that_names_the_peer(kind: str) -> None:
    with transports(kind, 2, timeout=0.3) as (a, _):
        error = failing(a.irecv(nothing(), 1, 0).wait)
        assert error.peer == 1
        assert "rank 1" in str(error)
        if kind == "shm":
            assert "timeout of 0.3 s" in str(error)
            assert failing(lambda: a.isend(nothing(), 1, 0)) is error  # broken from now on
    with ends(2, timeout=0.3) as (a, _):
        assert failing(a.isend(nothing(), 1, 0).wait).peer == 1  # nobody receives it


@pytest.mark.parametrize("lends", [False, True])
def test_another_size_is_an_error(lends: bool) -> None:
    given = ((3, 4), (100_000, 4), (4, 100_000), (0, 1))
    for sent, expected in given if not lends else ((SIZE, SIZE + by) for by in (-1, 1, 1 - SIZE)):
        with transports("shm", 2) as (a, b):
            coming = b.borrow(expected, 0, 0) if lends else b.irecv(nothing(expected), 0, 0)
            a.isend(taken(a, sent) if lends else nothing(sent), 1, 0).wait()
            error = failing(coming.wait)
            assert f"rank 0 sent {sent} bytes where {expected} were expected" in str(error)
            assert error.peer == 0


def test_on_loopback_a_shorter_message_fills_the_beginning_a_longer_one_is_an_error() -> None:
    with transports("loopback", 2) as (a, b):
        data = nothing(4)
        for numel in (3, 5):
            b.isend(torch.ones(numel, dtype=torch.uint8), 0, 0)
        a.irecv(data, 1, 0).wait()
        assert data.tolist() == [1, 1, 1, 0]
        raises(TransportError, a.irecv(data, 1, 0).wait, "5 bytes")


def told(a: Any, b: Any, die: Callable[[], object], blamed: int = 1) -> TransportError:
    """What ends a wait of rank 0 for rank 1, which dies; what came before still arrives."""
    early, late = nothing(), nothing()
    coming = [a.irecv(early, 1, 0), a.irecv(late, 1, 1)]
    b.isend(torch.ones(1, dtype=torch.uint8), 0, 0).wait()
    death = threading.Timer(0.2, die)
    death.start()
    error = failing(coming[1].wait)
    death.join()
    coming[0].wait()
    assert early.item() == 1
    assert error.peer == blamed
    return error


def test_a_death_is_told_and_what_came_before_arrives() -> None:
    hub = Hub(3, timeout=600)
    a, b, _ = map(hub.transport, range(3))
    told(a, b, lambda: hub.kill(1))
    assert failing(a.irecv(nothing(), 2, 0).wait).peer == 1  # it ends every wait
    with ends(3, timeout=600) as (a, b, c):
        other = a.irecv(nothing(), 2, 0)
        assert "destroyed its process group" in str(told(a, b, b.close))
        c.isend(nothing(), 0, 0)
        other.wait()  # what another peer has sent still arrives
    with ends(3, timeout=600) as (a, b, _):
        told(a, b, lambda: b.fail(2), blamed=2)
    with killable() as (first, second, process):
        error = told(first, second, lambda: (process.kill(), process.wait()))
        assert "its process has ended" in str(error)


def test_ending_our_own_end_ends_our_waits() -> None:
    with ends(2, timeout=600) as (a, _):
        coming = a.irecv(nothing(), 1, 0)
        threading.Timer(0.2, a.fail, (1,)).start()
        failing(coming.wait)
    with ends(2, timeout=600) as (a, _):
        coming = a.irecv(nothing(), 1, 0)
        threading.Timer(0.2, a.close).start()
        for body in (coming.wait, lambda: a.irecv(nothing(), 1, 0), coming.wait):
            assert "destroyed" in str(failing(body))


def test_a_message_of_another_kind_is_refused() -> None:
    """Its bytes are found by its address."""
    with ends(2) as (a, b):
        for bad in (torch.zeros(8), torch.zeros(16, dtype=torch.uint8)[::2]):
            for start, peer in ((a.isend, 1), (b.irecv, 0)):
                refuses("give contiguous uint8 on the CPU", partial(start, bad, peer, 0))
