"""The memory of a collective, as docs/internals/architecture.md states it."""

from __future__ import annotations

import pytest
import torch

from gradwire import QSGD, Codec
from gradwire.codecs import Identity
from gradwire.collectives import prepare
from gradwire.engine import Communicator
from gradwire.partition import Spec
from gradwire.transport import Hub
from ranks import as_threads

NUMEL = 6_000_000  # each rank's share is large enough to be borrowed


def arenas(codec: Codec, dtype: torch.dtype, hub: Hub) -> list[float]:
    """Each rank's arena, as a share of its bucket's bytes."""

    def body(comm: Communicator) -> int:
        return prepare(comm.calls, [Spec("w", NUMEL, dtype, codec)]).prepared[0][0].arena_bytes

    return [n / (NUMEL * dtype.itemsize) for n in as_threads(hub.world_size, body, hub)]


KINDS = [(QSGD(), torch.float32), (QSGD(), torch.bfloat16), (Identity(), torch.float32)]


def test_an_arena_is_this_share_of_its_bucket() -> None:
    expected = [
        {2: 0.20, 4: 0.23, 8: 0.25},
        {2: 0.40, 4: 0.47, 8: 0.50},
        {2: 1.5, 4: 1.75, 8: 1.875},
    ]
    for (codec, dtype), shares in zip(KINDS, expected, strict=True):
        for n, share in shares.items():
            assert arenas(codec, dtype, Hub(n)) == pytest.approx([share] * n, abs=0.011), codec


def test_an_arena_holds_one_payload_where_messages_are_borrowed() -> None:
    for (codec, dtype), share in zip(KINDS, (0.13, 0.27, 1.0), strict=True):
        for n in (2, 4, 8):
            found = arenas(codec, dtype, Hub(n, lends=True))
            assert found == pytest.approx([share] * n, abs=0.011), (codec, n)
