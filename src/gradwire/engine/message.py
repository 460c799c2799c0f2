"""The message header: enough to reject a payload that is not the expected one.

48 bytes, little-endian: magic, version, flags, plan digest, number of the ticket and round, the
call's digest, payload length, checksum, segment, chunk, plan version. Parts of a payload have no
headers: the plan, which ranks compare before its first use, defines every byte
(docs/reference/wire-format.md). The call's digest covers the arguments that may change from call to
call, and must be the same on every rank. Where a payload's length depends on data, the length field
says how much of it is in use, and collectives/packed_messages.py how it travels. The plan version
is the newest that the sender, and all ranks whose values it has summed, can use
(gradwire.handles.switch).

The checksum is the sum modulo 2^64 of the payload's 64-bit words and the plan version. It detects
every change confined to one word, so every flipped bit, and runs at memory speed; the transport's
own checks cover bursts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.errors import CodecError

MAGIC = b"GWIR"
VERSION = 2
CHECKSUM = 1  # flag: the checksum field is set
_HEADER = struct.Struct("<4sHHQIIQQHHI")
HEADER_BYTES = _HEADER.size
_LOW = (1 << 32) - 1
_WORD = (1 << 64) - 1
ALIGNMENT = 16  # of every row's payload within a message, so that fields load aligned on a GPU


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of payloads within a message."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Envelope:
    """What both ends know about a message before it is sent.

    Attributes:
        plan: 64 bits: the digest of what ranks compare (`Collective.issue`).
        sequence: number of the ticket and round; the low 32 bits travel.
        segment, chunk: the payload's part of the plan.
        call: 32 bits: the digest of this call's arguments that must be equal on every rank.
        checksum: whether the payload has one.
    """

    plan: int
    sequence: int
    segment: int
    chunk: int
    call: int = 0
    checksum: bool = True

    def of(self, sender: int) -> str:
        """The message, for errors."""
        return f"message from rank {sender} (segment {self.segment}, chunk {self.chunk})"


def word_sum(memory: np.ndarray) -> int:
    """The sum modulo 2^64 of the 64-bit words of uint8 memory, a multiple of 8 bytes long. The sums
    of consecutive parts add up to the sum of the whole."""
    return int(np.add.reduce(memory.view(np.uint64), dtype=np.uint64))


def seal(message: torch.Tensor, envelope: Envelope, version: int = 0) -> None:
    """Write the header of `message` (uint8, header included, payload a multiple of 16 bytes)."""
    payload = message.numpy()[HEADER_BYTES:]
    total = word_sum(payload) if envelope.checksum else 0
    write_header(message, envelope, len(payload), total, version)


def write_header(
    message: torch.Tensor, envelope: Envelope, length: int, total: int, version: int = 0
) -> None:
    """Write the header of a message: `length` bytes of payload, `total` the sum of its words."""
    e = envelope
    flags, checksum = (CHECKSUM, total + version & _WORD) if e.checksum else (0, 0)
    kinds = (MAGIC, VERSION, flags, e.plan, e.sequence & _LOW, e.call)
    place = e.segment, e.chunk, version
    _HEADER.pack_into(message.numpy().data, 0, *kinds, length, checksum, *place)


def check(message: torch.Tensor, envelope: Envelope, sender: int) -> None:
    """Raise CodecError, naming the sender and the field, unless `message` is the one expected."""
    payload = message.numpy()[HEADER_BYTES:]
    expected = check_header(message, envelope, sender, len(payload))
    if envelope.checksum:
        check_sum(expected, word_sum(payload), envelope, sender)


def check_header(message: torch.Tensor, envelope: Envelope, sender: int, length: int) -> int:
    """As `check`, for the header only, of a message whose payload has `length` bytes.

    Returns:
        The sum that the payload's words must have, if there is a checksum.
    """
    magic, version, flags, *fields = _HEADER.unpack_from(message.numpy().data)
    where = envelope.of(sender)
    if magic != MAGIC:
        raise CodecError(f"{where}: not a gradwire message (magic {magic!r}, expected {MAGIC!r})")
    if version != VERSION:
        raise CodecError(
            f"{where}: wire format version {version}, this rank uses {VERSION}; "
            "install the same gradwire on every rank"
        )
    plan, sequence, call, found_length, checksum, segment, chunk, offered = fields
    expected = {
        "flags": (flags, CHECKSUM if envelope.checksum else 0),
        "plan": (plan, envelope.plan),
        "sequence": (sequence, envelope.sequence & _LOW),
        "length": (found_length, length),
        "segment": (segment, envelope.segment),
        "chunk": (chunk, envelope.chunk),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise CodecError(f"{where}: {name} is {found}, expected {wanted}")
    if call != envelope.call:
        raise CodecError(
            f"{where}: the call's seed or step differs from this rank's; give every rank the "
            "same, and load states of the same step on all ranks"
        )
    return int(checksum) - int(offered)


def version_of(message: torch.Tensor) -> int:
    """The plan version in a header."""
    return int(_HEADER.unpack_from(message.numpy().data)[-1])


def check_sum(expected: int, found: int, envelope: Envelope, sender: int) -> None:
    """Raise CodecError, naming the sender, unless the sums are the same modulo 2^64."""
    if (expected - found) % (1 << 64):
        raise CodecError(
            f"{envelope.of(sender)}: checksum differs; the payload was corrupted on the way"
        )
