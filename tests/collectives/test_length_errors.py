"""Messages whose length depends on data are validated: a change in transit is an error."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from collectives.test_lengths import CODECS, reduce_all
from gradwire import Codec, CodecError, Options
from gradwire.engine import HEADER_BYTES, Communicator
from gradwire.transport import Hub
from ranks import as_threads, caught
from rooms.collectives import placement


class Corrupt:
    """Changes bytes of one message from rank 1 to rank 0.

    Args:
        part: "head": header and table; "body": what is behind them; "all".
        change: is given that part of the message (uint8).
    """

    def __init__(self, part: str, change: Any) -> None:
        self.part, self.change = part, change
        self.changed = False

    def __call__(self, source: int, peer: int, tag: int, message: torch.Tensor) -> None:
        if (source, peer) != (1, 0) or self.changed:
            return
        array = message.numpy()
        head = len(array) - int(array[24:32].view("<u8")[0])  # the length is the body's
        parts = {"head": slice(0, head), "body": slice(head, None), "all": slice(None)}
        self.changed = True
        self.change(array[parts[self.part]])


def errors(corrupt: Corrupt, codec: Codec, **options: Any) -> list[BaseException | None]:
    """How an all-reduce of two ranks ends."""

    def body(comm: Communicator) -> BaseException | None:
        return caught(
            lambda: reduce_all(comm, codec, Options(segments=1, **options), "gaussian", 1)
        )

    return as_threads(2, body, Hub(2, timeout=20, corrupt=corrupt))


@pytest.mark.parametrize("name", ["graddrop", "threelc"])
def test_fuzz_a_changed_byte_ends_in_an_error(name: str) -> None:
    faults = []
    for seed, part in product(range(6), ("head", "body")):
        draw = np.random.default_rng(100 * seed + (part == "body"))

        def change(message: np.ndarray, draw: Any = draw, seed: int = seed) -> None:
            for at in draw.integers(0, len(message), seed % 3 + 1):
                message[at] ^= draw.integers(1, 256)

        corrupt = Corrupt(part, change)
        error = errors(corrupt, CODECS[name])[0]
        if not corrupt.changed or not isinstance(error, CodecError) or "rank 1" not in str(error):
            faults.append(f"seed {seed}, {part}: {error!r}")
    assert not faults, faults


ROWS = 5  # of the message from rank 1 to rank 0


def lie(change: Any, **options: Any) -> str:
    """Rank 0's error for a head whose table was changed, and the length with it."""

    def change_head(message: np.ndarray) -> None:
        table = message[HEADER_BYTES:].view("<u4")
        change(table)
        length = sum(-(-int(n) // 16) * 16 for n in table[:ROWS])
        message[24:32] = np.array([length], dtype="<u8").view("u1")

    error = errors(Corrupt("head", change_head), CODECS["hardthreshold"], **options)[0]
    assert isinstance(error, CodecError)
    assert "rank 1" in str(error)
    return str(error)


def test_a_table_that_lies_is_refused() -> None:
    def longer(table: np.ndarray) -> None:
        table[3] += 1 << 20

    def padding(table: np.ndarray) -> None:
        assert table[-1] == 0
        table[-1] = 16

    def swapped(table: np.ndarray) -> None:
        assert -(-int(table[0]) // 16) == -(-int(table[1]) // 16)
        table[0] += 1

    assert "longer than it can be" in lie(longer)
    assert "the padding of its table is not zero" in lie(padding, checksum=False)
    assert "checksum differs" in lie(padding)
    assert "checksum differs" in lie(swapped)
    assert "contradict" in lie(swapped, checksum=False)


def test_counts_that_lie_are_refused_without_a_checksum() -> None:
    """A body whose counts exceed the room."""

    def change(body: np.ndarray) -> None:
        body[:2] = 255

    errored = errors(Corrupt("body", change), CODECS["hardthreshold"], checksum=False)[0]
    assert isinstance(errored, CodecError)
    assert "contradict" in str(errored)


def test_lengths_that_lie_are_refused_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is read in place: its counts, then the header's length."""
    monkeypatch.setattr(placement, "BORROWED_BYTES", 0)

    def error(place: slice) -> str:
        def change(message: np.ndarray) -> None:
            message[place] = 255

        corrupt = Corrupt("all", change)

        def body(comm: Communicator) -> BaseException | None:
            codec = CODECS["hardthreshold"]
            return caught(lambda: reduce_all(comm, codec, Options(), "gaussian", 1))

        found = as_threads(2, body, Hub(2, timeout=20, corrupt=corrupt, lends=True))[0]
        assert isinstance(found, CodecError)
        return str(found)

    assert "length is" in error(slice(HEADER_BYTES, HEADER_BYTES + 2))
    assert "length is" in error(slice(24, 26))
