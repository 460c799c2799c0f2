"""Headers of several buffers at once: the same bytes and results as one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.engine import HEADER_BYTES
from gradwire.engine.headers import Headers
from gradwire.engine.message import Envelope, check, seal

NBYTES = [64, 1072, 48 + 16, 4144]
CALL = Envelope(plan=(1 << 63) + 9, sequence=(5 << 32) + 7, segment=0, chunk=0, call=11)


def parts(message: torch.Tensor) -> list[torch.Tensor]:
    return list(message.split(NBYTES))


@pytest.fixture(params=[True, False], ids=["checksum", "none"])
def envelopes(request: pytest.FixtureRequest) -> list[Envelope]:
    call = replace(CALL, checksum=request.param)
    return [replace(call, segment=i % 2, chunk=300 * i) for i in range(len(NBYTES))]


@pytest.fixture
def message() -> torch.Tensor:
    made = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (sum(NBYTES),), generator=made, dtype=torch.uint8)


def test_they_are_those_of_each(message: torch.Tensor, envelopes: list[Envelope]) -> None:
    expected = message.clone()
    for part, envelope in zip(parts(expected), envelopes, strict=True):
        seal(part, envelope, 3)
    Headers(NBYTES, envelopes).seal(message.numpy(), envelopes[0], 3)
    assert torch.equal(message, expected)
    for part, envelope in zip(parts(message), envelopes, strict=True):
        check(part, envelope, 0)


def test_the_least_version_of_all_is_found(
    message: torch.Tensor, envelopes: list[Envelope]
) -> None:
    headers = Headers(NBYTES, envelopes)
    for version, part, envelope in zip([9, 4, 6, 5], parts(message), envelopes, strict=True):
        seal(part, envelope, version)
    assert headers.least_version(message.numpy(), envelopes[0]) == 4
    assert headers.least_version(message.numpy(), replace(envelopes[0], call=12)) is None
    assert headers.least_version(message.numpy(), replace(envelopes[0], sequence=8)) is None


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("place", [0, 4, 6, 8, 16, 20, 24, 40, 42, HEADER_BYTES, HEADER_BYTES + 15])
def test_what_is_changed_on_the_way_is_found(
    part: int, place: int, message: torch.Tensor, envelopes: list[Envelope]
) -> None:
    headers = Headers(NBYTES, envelopes)
    headers.seal(message.numpy(), envelopes[0], 3)
    parts(message)[part][place] ^= 1
    found = headers.least_version(message.numpy(), envelopes[0])
    assert (found is None) == (place < HEADER_BYTES or envelopes[0].checksum)
