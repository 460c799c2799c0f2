"""Messages whose length depends on data are validated: a change in transit is an error."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from collectives.test_lengths import CODECS, reduce_all
from gradwire import CodecError, Options
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


def error_of(corrupt: Corrupt, name: str, lends: bool = False, **options: Any) -> Any:
    """How an all-reduce of two ranks ends on rank 0."""
    given = CODECS[name], Options(segments=1, **options), "gaussian", 1

    def body(comm: Communicator) -> BaseException | None:
        return caught(lambda: reduce_all(comm, *given))

    return as_threads(2, body, Hub(2, timeout=20, corrupt=corrupt, lends=lends))[0]


@pytest.mark.parametrize("name", ["graddrop", "threelc"])
def test_fuzz_a_changed_byte_ends_in_an_error(name: str) -> None:
    faults = []
    for seed, part in product(range(6), ("head", "body")):
        draw = np.random.default_rng(100 * seed + (part == "body"))

        def change(message: np.ndarray, draw: Any = draw, seed: int = seed) -> None:
            for at in draw.integers(0, len(message), seed % 3 + 1):
                message[at] ^= draw.integers(1, 256)

        corrupt = Corrupt(part, change)
        error = error_of(corrupt, name)
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

    error = error_of(Corrupt("head", change_head), "hardthreshold", **options)
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


def test_counts_and_lengths_that_lie_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body whose counts exceed the room, without a checksum; and of a message that is read in
    place its counts, then the header's length."""

    def change(place: slice) -> Any:
        return lambda message: message.__setitem__(place, 255)

    error = error_of(Corrupt("body", change(slice(2))), "hardthreshold", checksum=False)
    assert isinstance(error, CodecError)
    assert "contradict" in str(error)
    monkeypatch.setattr(placement, "BORROWED_BYTES", 0)
    for place in (slice(HEADER_BYTES, HEADER_BYTES + 2), slice(24, 26)):
        error = error_of(Corrupt("all", change(place)), "hardthreshold", lends=True)
        assert isinstance(error, CodecError)
        assert "length is" in str(error)
