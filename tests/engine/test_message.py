"""Headers: an unexpected payload is rejected, and the error says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.engine import HEADER_BYTES
from gradwire.errors import CodecError
from rooms.engine import Envelope, check, seal

ENVELOPE = Envelope(plan=0xFEDCBA9876543210, sequence=7, segment=2, chunk=3)


def message(payload: int, envelope: Envelope = ENVELOPE) -> torch.Tensor:
    data = torch.randint(0, 256, (HEADER_BYTES + payload,), dtype=torch.uint8)
    seal(data, envelope)
    return data


def test_a_sealed_message_passes() -> None:
    for payload in (0, 16, 32, 4096):
        for checksum in (True, False):
            envelope = replace(ENVELOPE, checksum=checksum)
            check(message(payload, envelope), envelope, sender=1)


def test_a_foreign_message_is_refused_by_the_name_of_the_field() -> None:
    foreign = {"plan": 1, "sequence": 8, "call": 1, "segment": 0, "chunk": 0}
    for field, value in foreign.items():
        with pytest.raises(CodecError, match=f"rank 5.*{field}"):
            check(message(64), replace(ENVELOPE, **{field: value}), sender=5)


def test_every_flipped_bit_and_a_truncation_are_noticed() -> None:
    data = message(160)
    for bit in range(data.numel() * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError):
            check(data, ENVELOPE, sender=1)
        data[bit // 8] ^= 1 << bit % 8
    check(data, ENVELOPE, sender=1)
    with pytest.raises(CodecError, match="length"):
        check(data[:-16], ENVELOPE, sender=1)
