"""The header of a message: enough to refuse a payload that is not the one expected.

48 bytes, little-endian: magic, version, flags, plan digest, number of the ticket and round, the
call's digest, payload length, checksum, segment, chunk. Payload segments carry no header of their
own: the plan, which ranks compare before its first use, says what each byte is
(docs/wire-format.md). What may change from call to call, and must be the same on every rank, is in
the call's digest.

The checksum is the sum modulo 2^64 of the payload's 64-bit words. It catches every change
confined to one word, so every flipped bit, and runs at the speed of memory; the transport's own
checks cover bursts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.errors import CodecError

MAGIC = b"GWIR"
VERSION = 1
CHECKSUM = 1  # flag: the checksum field is set
_HEADER = struct.Struct("<4sHHQIIQQII")
HEADER_BYTES = _HEADER.size
_LOW = (1 << 32) - 1
ALIGNMENT = 16  # of every row's payload within a message, so that fields load aligned on a GPU


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of payloads within a message."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Envelope:
    """What both ends know about a message before it is sent.

    Attributes:
        plan: 64 bits: the digest of what ranks compare (`Collective.issue`).
        sequence: which ticket of its owner, and which round of it; its low 32 bits travel.
        segment, chunk: what of the plan the payload is.
        call: 32 bits, a digest of this call's arguments that must be alike on every rank.
        checksum: whether the payload has one.
    """

    plan: int
    sequence: int
    segment: int
    chunk: int
    call: int = 0
    checksum: bool = True


def _sum(message: torch.Tensor) -> int:
    words: np.ndarray = message.numpy()[HEADER_BYTES:].view(np.uint64)
    return int(np.add.reduce(words, dtype=np.uint64))


def seal(message: torch.Tensor, envelope: Envelope) -> None:
    """Write the header of `message` (uint8, header included, payload a multiple of 16 bytes)."""
    flags, checksum = (CHECKSUM, _sum(message)) if envelope.checksum else (0, 0)
    length = message.numel() - HEADER_BYTES
    e = envelope
    kinds = (MAGIC, VERSION, flags, e.plan, e.sequence & _LOW, e.call)
    _HEADER.pack_into(message.numpy().data, 0, *kinds, length, checksum, e.segment, e.chunk)


def check(message: torch.Tensor, envelope: Envelope, sender: int) -> None:
    """Raise CodecError, naming the sender and the field, unless `message` is the one expected."""
    magic, version, flags, *fields = _HEADER.unpack_from(message.numpy().data)
    where = f"message from rank {sender} (segment {envelope.segment}, chunk {envelope.chunk})"
    if magic != MAGIC:
        raise CodecError(f"{where}: not a gradwire message (magic {magic!r}, expected {MAGIC!r})")
    if version != VERSION:
        raise CodecError(
            f"{where}: wire format version {version}, this rank speaks {VERSION}; "
            "install the same gradwire on every rank"
        )
    plan, sequence, call, length, checksum, segment, chunk = fields
    expected = {
        "flags": (flags, CHECKSUM if envelope.checksum else 0),
        "plan": (plan, envelope.plan),
        "sequence": (sequence, envelope.sequence & _LOW),
        "length": (length, message.numel() - HEADER_BYTES),
        "segment": (segment, envelope.segment),
        "chunk": (chunk, envelope.chunk),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise CodecError(f"{where}: {name} is {found}, expected {wanted}")
    if call != envelope.call:
        raise CodecError(
            f"{where}: it is of a call with another op, seed or step than this rank's; give every "
            "rank the same, and load states of one step on all of them"
        )
    if flags & CHECKSUM and checksum != _sum(message):
        raise CodecError(f"{where}: checksum differs; the payload was corrupted on the way")
