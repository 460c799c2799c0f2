"""Headers: an unexpected payload is rejected, and the error says why; those of several buffers at
once have the same bytes and results as one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.engine import HEADER_BYTES
from gradwire.errors import CodecError
from rooms.engine import Envelope, Headers, check, seal

NBYTES = [64, 1072, 48 + 16, 4144]
CALL = Envelope(plan=(1 << 63) + 9, sequence=(5 << 32) + 7, segment=2, chunk=3, call=11)


def drawn(nbytes: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (nbytes,), generator=made, dtype=torch.uint8)


def sealed(payload: int, envelope: Envelope = CALL) -> torch.Tensor:
    data = drawn(HEADER_BYTES + payload)
    seal(data, envelope)
    return data


def test_a_sealed_message_passes_and_a_foreign_one_is_refused_by_the_name_of_the_field() -> None:
    for payload in (0, 16, 32, 4096):
        for checksum in (True, False):
            envelope = replace(CALL, checksum=checksum)
            check(sealed(payload, envelope), envelope, sender=1)
    foreign = {"plan": 1, "sequence": 8, "call": 1, "segment": 0, "chunk": 0}
    for field, value in foreign.items():
        with pytest.raises(CodecError, match=f"rank 5.*{field}"):
            check(sealed(64), replace(CALL, **{field: value}), sender=5)


def test_every_flipped_bit_and_a_truncation_are_noticed() -> None:
    data = sealed(160)
    for bit in range(data.numel() * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError):
            check(data, CALL, sender=1)
        data[bit // 8] ^= 1 << bit % 8
    check(data, CALL, sender=1)
    with pytest.raises(CodecError, match="length"):
        check(data[:-16], CALL, sender=1)


# ---- of several buffers


def parts(message: torch.Tensor) -> list[torch.Tensor]:
    return list(message.split(NBYTES))


def envelopes(checksum: bool) -> list[Envelope]:
    call = replace(CALL, checksum=checksum)
    return [replace(call, segment=i % 2, chunk=300 * i) for i in range(len(NBYTES))]


@pytest.mark.parametrize("checksum", [True, False])
def test_they_are_those_of_each(checksum: bool) -> None:
    every, found, expected = envelopes(checksum), drawn(sum(NBYTES)), drawn(sum(NBYTES))
    for part, envelope in zip(parts(expected), every, strict=True):
        seal(part, envelope, 3)
    headers = Headers(NBYTES, every)
    headers.seal(found.numpy(), every[0], 3)
    assert torch.equal(found, expected)
    for part, envelope in zip(parts(found), every, strict=True):
        check(part, envelope, 0)
    for part in range(len(NBYTES)):
        for place in (0, 4, 6, 8, 16, 20, 24, 40, 42, HEADER_BYTES, HEADER_BYTES + 15):
            changed = found.clone()
            parts(changed)[part][place] ^= 1
            least = headers.least_version(changed.numpy(), every[0])
            assert (least is None) == (place < HEADER_BYTES or checksum), (part, place)
    # The least version of all is found.
    for version, part, envelope in zip([9, 4, 6, 5], parts(found), every, strict=True):
        seal(part, envelope, version)
    assert headers.least_version(found.numpy(), every[0]) == 4
    assert headers.least_version(found.numpy(), replace(every[0], call=12)) is None
    assert headers.least_version(found.numpy(), replace(every[0], sequence=8)) is None
