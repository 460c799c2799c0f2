"""Ranks of a control channel as threads of one process, and stores that misbehave."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from gradwire.control import Channel, Member

SIZES = [1, 2, 3, 5, 8]


class Ears:
    """A listener that records notices."""

    def __init__(self) -> None:
        self.heard_from: list[tuple[int, dict[str, Any]]] = []
        self.ticks = 0

    def heard(self, sender: int, notice: Any) -> None:
        self.heard_from.append((sender, dict(notice)))

    def tick(self) -> None:
        self.ticks += 1


@contextmanager
def channels(count: int, shared: bool = False) -> Iterator[list[Channel]]:
    """A channel per rank, or one for all."""
    made = [Channel()] * count if shared else [Channel() for _ in range(count)]
    try:
        yield made
    finally:
        for channel in made:
            channel.close()


@contextmanager
def group(
    world_size: int,
    store: Any = None,
    timeout: float = 60.0,
    shared: bool = False,
    ears: list[Ears] | None = None,
) -> Iterator[list[Member]]:
    """The members of a group; each rank has its own channel, unless it is `shared`."""
    store = dist.HashStore() if store is None else store
    ears = ears or [Ears() for _ in range(world_size)]
    with channels(world_size, shared) as made:
        yield [m.join(store, r, world_size, timeout, ears[r]) for r, m in enumerate(made)]


def exchanged(members: Iterable[Member], key: str = "e", *, tag: str = "") -> list[bytes]:
    """What the members tell, each its rank behind `tag`, as each of them learns it; entries of the
    group that are older have been handled then."""
    pending = [m.exchange(key, f"{tag}{m.rank}".encode()) for m in members]
    (found,) = {tuple(future.result(60)) for future in pending}
    return list(found)


def joined(
    made: Sequence[Channel], store: Any, world_size: int = 2, ears: Sequence[Ears] = ()
) -> list[Member]:
    """The members of a group, of whose first ranks each has a channel."""
    heard = ears or [Ears() for _ in made]
    pairs = enumerate(zip(made, heard, strict=True))
    return [channel.join(store, rank, world_size, 60.0, of) for rank, (channel, of) in pairs]


def agreed(members: Iterable[Member], key: str, *lines: Sequence[str]) -> list[Any]:
    """What the members' agreements end with, an error or a number: all have the same lines, or each
    its own."""
    futures = [m.agree(key, "the plan", lines[m.rank % len(lines)]) for m in members]
    return [future.exception(60) or future.result() for future in futures]


class Wrapped:
    """A store that calls a function with the (first) key before each operation."""

    def __init__(self, store: Any, before: Callable[[str], Any]) -> None:
        self.store = store
        self.before = before

    def clone(self) -> Wrapped:
        return Wrapped(self.store.clone(), self.before)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.store, name)

        def call(keys: Any, *arguments: Any) -> Any:
            self.before(keys if isinstance(keys, str) else keys[0])
            return method(keys, *arguments)

        return call


def delayed(store: Any, seed: int, most: float) -> Any:
    """`store`, where every operation begins up to `most` seconds late."""
    dice = random.Random(seed)
    return Wrapped(store, lambda key: time.sleep(dice.uniform(0.0, most)))
