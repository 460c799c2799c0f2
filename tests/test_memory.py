"""The memory of a collective, as docs/architecture.md states it."""

from __future__ import annotations

import pytest
import torch

from gradwire import QSGD, Codec, Identity
from gradwire.collectives import prepare
from gradwire.engine import Communicator
from gradwire.partition import Spec
from gradwire.transport import Hub
from ranks import as_threads

NUMEL = 6_000_000  # each rank's share is large enough to be borrowed


def arenas(codec: Codec, dtype: torch.dtype, hub: Hub) -> list[float]:
    """Each rank's arena, as a share of its bucket's bytes."""

    def body(comm: Communicator) -> int:
        return prepare(comm.calls, [Spec("w", NUMEL, dtype, codec)]).prepared.arena_bytes

    return [n / (NUMEL * dtype.itemsize) for n in as_threads(hub.world_size, body, hub)]


@pytest.mark.parametrize(
    ("codec", "dtype", "shares"),
    [
        (QSGD(), torch.float32, {2: 0.20, 4: 0.23, 8: 0.25}),
        (QSGD(), torch.bfloat16, {2: 0.40, 4: 0.47, 8: 0.50}),
        (Identity(), torch.float32, {2: 1.5, 4: 1.75, 8: 1.875}),
    ],
)
def test_an_arena_is_this_share_of_its_bucket(
    codec: Codec, dtype: torch.dtype, shares: dict[int, float]
) -> None:
    for world_size, share in shares.items():
        for found in arenas(codec, dtype, Hub(world_size)):
            assert found == pytest.approx(share, abs=0.011)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize(
    ("codec", "dtype", "share"),
    [
        (QSGD(), torch.float32, 0.13),
        (QSGD(), torch.bfloat16, 0.27),
        (Identity(), torch.float32, 1.0),
    ],
)
def test_an_arena_holds_one_payload_where_messages_are_borrowed(
    codec: Codec, dtype: torch.dtype, share: float, world_size: int
) -> None:
    for found in arenas(codec, dtype, Hub(world_size, lends=True)):
        assert found == pytest.approx(share, abs=0.011)
