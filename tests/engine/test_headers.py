"""Headers of several buffers at once: the same bytes and results as one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.engine import HEADER_BYTES
from rooms.engine import Envelope, Headers, check, seal

NBYTES = [64, 1072, 48 + 16, 4144]
CALL = Envelope(plan=(1 << 63) + 9, sequence=(5 << 32) + 7, segment=0, chunk=0, call=11)


def parts(message: torch.Tensor) -> list[torch.Tensor]:
    return list(message.split(NBYTES))


def envelopes(checksum: bool) -> list[Envelope]:
    call = replace(CALL, checksum=checksum)
    return [replace(call, segment=i % 2, chunk=300 * i) for i in range(len(NBYTES))]


def message() -> torch.Tensor:
    made = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (sum(NBYTES),), generator=made, dtype=torch.uint8)


@pytest.mark.parametrize("checksum", [True, False])
def test_they_are_those_of_each(checksum: bool) -> None:
    every, found, expected = envelopes(checksum), message(), message()
    for part, envelope in zip(parts(expected), every, strict=True):
        seal(part, envelope, 3)
    headers = Headers(NBYTES, every)
    headers.seal(found.numpy(), every[0], 3)
    assert torch.equal(found, expected)
    for part, envelope in zip(parts(found), every, strict=True):
        check(part, envelope, 0)
    # The least version of all is found.
    for version, part, envelope in zip([9, 4, 6, 5], parts(found), every, strict=True):
        seal(part, envelope, version)
    assert headers.least_version(found.numpy(), every[0]) == 4
    assert headers.least_version(found.numpy(), replace(every[0], call=12)) is None
    assert headers.least_version(found.numpy(), replace(every[0], sequence=8)) is None


@pytest.mark.parametrize("checksum", [True, False])
def test_what_is_changed_on_the_way_is_found(checksum: bool) -> None:
    every, sealed = envelopes(checksum), message()
    headers = Headers(NBYTES, every)
    headers.seal(sealed.numpy(), every[0], 3)
    for part in range(len(NBYTES)):
        for place in (0, 4, 6, 8, 16, 20, 24, 40, 42, HEADER_BYTES, HEADER_BYTES + 15):
            changed = sealed.clone()
            parts(changed)[part][place] ^= 1
            found = headers.least_version(changed.numpy(), every[0])
            assert (found is None) == (place < HEADER_BYTES or checksum), (part, place)
