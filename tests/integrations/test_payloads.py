"""Payloads of shards: what is encoded comes back, and padding is zero whatever memory held."""

from __future__ import annotations

import numpy as np
import torch

import gradwire as gw
from gradwire.integrations.fsdp import Piece
from gradwire.integrations.payloads import Payloads
from gradwire.lang import layout

CPU = torch.device("cpu")


def test_all_ranks_shards_come_back_and_padding_is_zero() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        come_back(dtype)


def come_back(dtype: torch.dtype) -> None:
    pieces = [Piece(None, 0, (5, 5, 1)), Piece(None, 5, (3, 0, 0)), Piece(None, 8, (2, 2, 2))]
    codecs = [gw.Identity(), gw.RandomShift(bits=8), gw.Identity()]
    payloads = Payloads(pieces, codecs, 10, 3, dtype, CPU)
    for rank, nbytes in enumerate(payloads.nbytes):
        sizes = [
            layout(c, dtype).nbytes(p.lengths[rank]) for p, c in zip(pieces, codecs, strict=True)
        ]
        assert nbytes == sum(sizes)
    sent = torch.empty(sum(payloads.nbytes), dtype=torch.uint8)
    parts = torch.randn(3, 10).to(dtype)
    for rank in range(3):
        payloads.encode(parts[rank], sent, rank, np.zeros(3, np.uint64))
    found = torch.full((3, 10), torch.nan, dtype=dtype)
    payloads.decode(sent, found)
    for rank in range(3):
        for piece, end in zip(pieces, payloads.ends, strict=True):
            length = piece.lengths[rank]
            ours, theirs = (t[rank, piece.at : end] for t in (found, parts))
            torch.testing.assert_close(ours[:length], theirs[:length], rtol=0, atol=0.05)
            assert not ours[length:].any(), (rank, piece)
