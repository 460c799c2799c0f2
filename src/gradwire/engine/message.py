"""The message header: enough to reject a payload that is not the expected one.

48 bytes, little-endian: magic, version, flags, plan digest, number of the ticket and round, the
call's digest, payload length, checksum, segment, chunk, plan version. Parts of a payload have no
headers: the plan, which ranks compare before its first use, defines every byte
(docs/internals/wire-format.md). The call's digest covers the arguments that may change from call to
call, and must be the same on every rank. Where a payload's length depends on data, the length field
says how much of it is in use, and collectives/packing.py how it travels. The plan version
is the newest that the sender, and all ranks whose values it has summed, can use
(gradwire.handles.switch).

Each buffer has its own header, also within a message of several, since it may later travel with
other buffers.

The checksum is the sum modulo 2^64 of the payload's 64-bit words and the plan version. It detects
every change confined to one word, so every flipped bit, and runs at memory speed; the transport's
own checks cover bursts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from gradwire.errors import CodecError

MAGIC = b"GWIR"
VERSION = 2
CHECKSUM = 1  # flag: the checksum field is set
_FIELDS = {  # name -> code of struct
    "magic": "4s", "version": "H", "flags": "H", "plan": "Q", "sequence": "I", "call": "I",
    "length": "Q", "checksum": "Q", "segment": "H", "chunk": "H", "offered": "I",
}  # fmt: skip
_HEADER = struct.Struct("<" + "".join(_FIELDS.values()))
_COLUMNS = np.dtype([(name, f"<{code}".replace("4s", "S4")) for name, code in _FIELDS.items()])
HEADER_BYTES = _HEADER.size
# What an error says of a field that has the first value instead of the second.
_DIFFERS = {
    "magic": "not a gradwire message (magic {!r}, expected {!r})",
    "version": "wire format version {}, this rank uses {}; install the same gradwire on every rank",
    "call": "the call's seed or step differs from this rank's; give every rank the same, and load "
    "states of the same step on all ranks",
}
_LOW = (1 << 32) - 1
_WORD = (1 << 64) - 1
N = TypeVar("N", int, np.ndarray)
ALIGNMENT = 16  # of every row's payload within a message, so that fields load aligned on a GPU


def align(nbytes: N) -> N:
    """`nbytes` rounded up to the alignment of payloads within a message."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Envelope:
    """What both ends know about a message before it is sent.

    Attributes:
        plan: 64 bits: the digest of what ranks compare (`ScopeProgram.digest`).
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
    checksum = total + version & _WORD if envelope.checksum else 0
    _HEADER.pack_into(message.numpy().data, 0, *_fields(envelope, length, checksum, version))


def _fields(e: Envelope, length: int, checksum: int, version: int) -> tuple[object, ...]:
    """The values of a header."""
    kind = MAGIC, VERSION, CHECKSUM if e.checksum else 0
    call = e.plan, e.sequence & _LOW, e.call
    return *kind, *call, length, checksum, e.segment, e.chunk, version


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
    found = _HEADER.unpack_from(message.numpy().data)
    *_, checksum, _, _, version = found
    expected = _fields(envelope, length, checksum, version)
    if found != expected:
        fields = zip(_FIELDS, found, expected, strict=True)
        name, *values = next(field for field in fields if field[1] != field[2])
        told = _DIFFERS.get(name, name + " is {}, expected {}").format(*values)
        raise CodecError(f"{envelope.of(sender)}: {told}")
    return int(checksum) - int(version)


def version_of(message: torch.Tensor) -> int:
    """The plan version in a header."""
    return int(_HEADER.unpack_from(message.numpy().data)[-1])


def check_sum(expected: int, found: int, envelope: Envelope, sender: int) -> None:
    """Raise CodecError, naming the sender, unless the sums are the same modulo 2^64."""
    if (expected - found) % (1 << 64):
        raise CodecError(
            f"{envelope.of(sender)}: checksum differs; the payload was corrupted on the way"
        )


class Headers:
    """The headers of the adjacent buffers of one message, written and checked together: one by one
    they would cost as much as a small kernel.

    Args:
        nbytes: bytes per buffer, header included; multiples of 16.
        envelopes: one per buffer; only segment and chunk differ.
    """

    def __init__(self, nbytes: Sequence[int], envelopes: Sequence[Envelope]) -> None:
        ends = np.cumsum(nbytes)
        begins = ends - nbytes
        self._bytes = begins[:, None] + np.arange(HEADER_BYTES)
        # offsets of payloads and of the headers between them, alternating, in words
        self._stretches = np.stack([begins + HEADER_BYTES, ends], axis=1).ravel()[:-1] // 8
        places = zip(envelopes, nbytes, strict=True)
        self._known = np.array([_fields(e, n - HEADER_BYTES, 0, 0) for e, n in places], _COLUMNS)

    def seal(self, message: np.ndarray, envelope: Envelope, version: int) -> None:
        """Write all headers of `message` (uint8). `envelope` gives the fields that change per
        call."""
        headers = self._expected(message, envelope, version)
        message[self._bytes] = headers.view("u1").reshape(-1, HEADER_BYTES)

    def least_version(self, message: np.ndarray, envelope: Envelope) -> int | None:
        """The least plan version in the headers of `message`; None if a header differs from what is
        expected: `check` then finds which."""
        found = message[self._bytes].view(_COLUMNS)[:, 0]
        expected = self._expected(message, envelope, found["offered"])
        if expected.tobytes() != found.tobytes():
            return None
        return int(found["offered"].min())

    def _expected(
        self, message: np.ndarray, envelope: Envelope, versions: int | np.ndarray
    ) -> np.ndarray:
        headers = self._known.copy()
        headers["sequence"], headers["call"] = envelope.sequence & _LOW, envelope.call
        headers["offered"] = versions
        if envelope.checksum:
            sums = np.add.reduceat(message.view(np.uint64), self._stretches, dtype=np.uint64)
            headers["checksum"] = sums[::2] + headers["offered"]
        return headers
