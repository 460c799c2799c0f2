"""Payloads of shards: what is encoded comes back, and padding is zero whatever memory held."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

import gradwire as gw
from gradwire.lang import layout
from gradwire.planner.weights import weight_codec
from rooms.handles import Payloads, Piece, _most

CPU = torch.device("cpu")
TWO = [Piece(None, 0, 5, (5, 5, 1)), Piece(None, 5, 8, (3, 0, 0))]


def test_all_ranks_shards_come_back_and_padding_is_zero() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pieces = [*TWO, Piece(None, 8, 10, (2, 2, 2))]
        codecs = [gw.codecs.Identity(), gw.codecs.RandomShift(bits=8), gw.codecs.Identity()]
        payloads = Payloads(pieces, codecs, dtype, CPU)
        for rank, nbytes in enumerate(payloads.nbytes):
            sizes = [
                layout(c, dtype).nbytes(p.lengths[rank])
                for p, c in zip(pieces, codecs, strict=True)
            ]
            assert nbytes == sum(sizes)
        sent = torch.empty(sum(payloads.nbytes), dtype=torch.uint8)
        parts = torch.randn(3, 10).to(dtype)
        for rank in range(3):
            payloads.encode(parts[rank], sent, rank, np.zeros(3, np.uint64))
        found = torch.full((3, 10), torch.nan, dtype=dtype)
        payloads.decode(sent, found)
        for rank in range(3):
            for piece in pieces:
                length = piece.lengths[rank]
                ours, theirs = (t[rank, piece.at : piece.end] for t in (found, parts))
                torch.testing.assert_close(ours[:length], theirs[:length], rtol=0, atol=0.05)
                assert not ours[length:].any(), (rank, piece)


FOR_WEIGHTS = ["randomshift:bits=1", "qsgd", "qsgd:scale=max:rounding=nearest", "fp8", "bf16"]
FOR_WEIGHTS += ["fp16", "learnedlevels", "terngrad"]


def test_what_no_codec_holds_is_withheld_whichever_rank_has_it() -> None:
    pieces = [*TWO, Piece(None, 8, 72, (64, 64, 64))]
    for name, dtype in product(FOR_WEIGHTS, (torch.float32, torch.bfloat16, torch.float16)):
        codec = weight_codec("weights", name)
        most = 0.99 * _most(codec, dtype)  # which bf16 may round up
        payloads = Payloads(pieces, [gw.codecs.Identity(), codec, codec], dtype, CPU)

        def sent(parts: torch.Tensor, payloads: Payloads = payloads) -> torch.Tensor:
            found = torch.empty(sum(payloads.nbytes), dtype=torch.uint8)
            for rank, part in enumerate(parts):
                payloads.encode(part, found, rank, np.arange(3, dtype=np.uint64))
                payloads.withhold(part, found, rank)
            return found

        # The largest that are sent come back finite, and nothing looks withheld.
        parts = torch.full((3, 72), most, dtype=dtype)
        parts[:, 1::2] = -most
        parts[:, 0] = torch.nan  # of what is sent as it is
        assert payloads.withheld(sent(parts)) == []
        found = torch.empty(3, 72, dtype=dtype)
        payloads.decode(sent(parts), found)
        assert torch.isfinite(found[:, 5:]).all(), (name, dtype)
        for rank, (at, first) in product(range(3), ((1, 5), (2, 20))):
            for bad in (-torch.inf, torch.nan, torch.finfo(dtype).min):
                parts = torch.zeros(3, 72, dtype=dtype)
                parts[rank, first] = bad
                held = pieces[at].lengths[rank] > 0  # padding is not looked at
                assert payloads.withheld(sent(parts)) == [at] * held, (name, dtype, rank, bad)
