"""Headers: an unexpected payload is rejected, and the error says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.engine.message import HEADER_BYTES, Envelope, check, seal
from gradwire.errors import CodecError

ENVELOPE = Envelope(plan=0xFEDCBA9876543210, sequence=7, segment=2, chunk=3)


def message(payload: int, envelope: Envelope = ENVELOPE) -> torch.Tensor:
    data = torch.randint(0, 256, (HEADER_BYTES + payload,), dtype=torch.uint8)
    seal(data, envelope)
    return data


@pytest.mark.parametrize("payload", [0, 16, 32, 4096])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_sealed_message_passes(payload: int, checksum: bool) -> None:
    envelope = replace(ENVELOPE, checksum=checksum)
    check(message(payload, envelope), envelope, sender=1)


@pytest.mark.parametrize(
    ("field", "value"), [("plan", 1), ("sequence", 8), ("call", 1), ("segment", 0), ("chunk", 0)]
)
def test_a_foreign_message_is_refused_by_the_name_of_the_field(field: str, value: int) -> None:
    with pytest.raises(CodecError, match=f"rank 5.*{field}"):
        check(message(64), replace(ENVELOPE, **{field: value}), sender=5)


def test_a_truncated_message_is_refused() -> None:
    with pytest.raises(CodecError, match="length"):
        check(message(64)[:-16], ENVELOPE, sender=1)


@given(st.integers(0, (HEADER_BYTES + 160) * 8 - 1))
def test_every_flipped_bit_is_noticed(bit: int) -> None:
    data = message(160)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CodecError):
        check(data, ENVELOPE, sender=1)
