"""The headers of a message of several buffers, written and checked together.

Each buffer has its own header (message.py), since it may later travel with other buffers. Handled
one by one, headers cost as much as a small kernel; here they are columns of one array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.engine.message import CHECKSUM, HEADER_BYTES, MAGIC, VERSION, Envelope

_FIELDS = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("plan", "<u8"),
        ("sequence", "<u4"),
        ("call", "<u4"),
        ("length", "<u8"),
        ("checksum", "<u8"),
        ("segment", "<u2"),
        ("chunk", "<u2"),
        ("offered", "<u4"),
    ]
)
assert _FIELDS.itemsize == HEADER_BYTES
_LOW = (1 << 32) - 1


class Headers:
    """The headers of adjacent buffers.

    Args:
        nbytes: bytes per buffer, header included; multiples of 16.
        envelopes: one per buffer; only segment and chunk differ.
    """

    def __init__(self, nbytes: Sequence[int], envelopes: Sequence[Envelope]) -> None:
        ends = np.cumsum(nbytes)
        begins = ends - nbytes
        self._bytes = begins[:, None] + np.arange(HEADER_BYTES)
        # offsets of payloads and of the headers between them, alternating, in words
        words = np.stack([begins + HEADER_BYTES, ends], axis=1).ravel() // 8
        self._stretches = words[:-1]
        self._checksum = envelopes[0].checksum
        self._known = known = np.zeros(len(envelopes), _FIELDS)
        known["magic"], known["version"] = MAGIC, VERSION
        known["flags"] = CHECKSUM if self._checksum else 0
        known["plan"] = envelopes[0].plan
        known["length"] = np.array(nbytes) - HEADER_BYTES
        known["segment"] = [envelope.segment for envelope in envelopes]
        known["chunk"] = [envelope.chunk for envelope in envelopes]

    def seal(self, message: np.ndarray, envelope: Envelope, version: int) -> None:
        """Write all headers of `message` (uint8). `envelope` gives the fields that change per
        call."""
        headers = self._of(envelope)
        headers["offered"] = version
        if self._checksum:
            headers["checksum"] = self._sums(message) + np.uint64(version)
        message[self._bytes] = headers.view("u1").reshape(-1, HEADER_BYTES)

    def least_version(self, message: np.ndarray, envelope: Envelope) -> int | None:
        """The least plan version in the headers of `message`; None if a header differs from what is
        expected: `message.check` then finds which."""
        found = message[self._bytes].view(_FIELDS)[:, 0]
        headers = self._of(envelope)
        headers["offered"] = found["offered"]
        if self._checksum:
            headers["checksum"] = self._sums(message) + found["offered"]
        if headers.tobytes() != found.tobytes():
            return None
        return int(found["offered"].min())

    def _of(self, envelope: Envelope) -> np.ndarray:
        headers = self._known.copy()
        headers["sequence"], headers["call"] = envelope.sequence & _LOW, envelope.call
        return headers

    def _sums(self, message: np.ndarray) -> np.ndarray:
        """The sum of each payload's words, modulo 2^64."""
        words = message.view(np.uint64)
        sums: np.ndarray = np.add.reduceat(words, self._stretches, dtype=np.uint64)[::2]
        return sums
