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
        (QSGD(), torch.float32, {2: 0.27, 4: 0.33, 8: 0.37}),
        (QSGD(), torch.bfloat16, {2: 0.53, 4: 0.66, 8: 0.73}),
        (Identity(), torch.float32, {2: 2.0, 4: 2.5, 8: 2.75}),
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
