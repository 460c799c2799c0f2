"""The memory of a collective, as docs/architecture.md states it."""

from __future__ import annotations

import pytest
import torch

from gradwire import QSGD, Codec, Identity
from gradwire.collectives import prepare
from gradwire.engine import Communicator
from gradwire.partition import Spec
from ranks import as_threads

NUMEL = 1_000_000


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
    def body(comm: Communicator) -> int:
        return prepare(comm, [Spec("w", NUMEL, dtype, codec)]).arena_bytes

    for world_size, share in shares.items():
        for arena_bytes in as_threads(world_size, body):
            assert arena_bytes / (NUMEL * dtype.itemsize) == pytest.approx(share, abs=0.011)
