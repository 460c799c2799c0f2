"""The payloads in which one group of FSDP2's parameters is gathered, and their kernels.

A rank's payloads follow each other in the order of parameters, without gaps. Those of all ranks, in
the order of ranks, are one tensor of bytes: what an uncompressed all-gather moves.

A parameter is unfit for its codec if it holds what is not finite, which would spread over its
block, or magnitudes from which the codec's arithmetic may overflow. The rank that finds it in its
shard withholds the payload: its bytes are all ones, which no codec's grid of finite numbers is. So
all ranks know of it from what they receive, whichever rank has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from gradwire.codecs import Identity
from gradwire.handles.fsdp import Piece
from gradwire.lang import Codec, Kernels, layout
from gradwire.lang.call import ROW, check_memory
from gradwire.lang.kernels import for_device

_ONES = 255  # a byte


class Payloads:
    """The layout of the payloads of one group, for one dtype.

    Args:
        pieces: the parameters, in FSDP's order.
        codecs: of each of them; `Identity` copies.

    Attributes:
        stride: values of a rank, with padding.
        ranks: that gather.
        nbytes: of each rank's payloads.
        coded: by number, the places within a rank's values of parameters that are not copied.
        looked: whether ranks have looked for unfit parameters in it.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        codecs: Sequence[Codec],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pieces = list(pieces)
        self.stride, self.ranks = pieces[-1].end, len(pieces[0].lengths)
        self.dtype, self.device = dtype, device
        self.looked = False
        both = list(zip(pieces, codecs, strict=True))
        sizes = [[layout(codec, dtype).nbytes(n) for n in piece.lengths] for piece, codec in both]
        self._sizes = np.array(sizes, dtype=np.int64)
        self.nbytes = tuple(self._sizes.sum(axis=0).tolist())
        # Of each parameter and rank, at addresses from 0 on.
        self._rows = np.zeros(self._sizes.shape, ROW)
        first = np.arange(self.ranks) * self.stride + np.array([[piece.at] for piece in pieces])
        self._rows["values"] = first * dtype.itemsize
        ends = self._sizes.T.cumsum().reshape(self.ranks, -1).T
        self._rows["payload"] = ends - self._sizes
        self._rows["numel"] = [piece.lengths for piece in pieces]
        self._padding = [
            slice(rank * self.stride + piece.at + length, rank * self.stride + piece.end)
            for piece in pieces
            for rank, length in enumerate(piece.lengths)
            if piece.at + length < piece.end
        ]
        self._kernels = [
            (kernels_of(one, dtype, device), [n for n, codec in enumerate(codecs) if codec == one])
            for one in dict.fromkeys(codecs)
        ]
        coded = [n for n, codec in enumerate(codecs) if not isinstance(codec, Identity)]
        self.coded = {n: slice(pieces[n].at, pieces[n].end) for n in coded}
        self._most = {n: _most(codecs[n], dtype) for n in coded}

    def own(self, payloads: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of all payloads that a rank encodes."""
        return payloads[sum(self.nbytes[:rank]) :][: self.nbytes[rank]]

    def encode(
        self, values: torch.Tensor, payloads: torch.Tensor, rank: int, keys: np.ndarray
    ) -> None:
        """Encode this rank's `values`, with padding, into its part of `payloads`.

        Args:
            keys: uint64, of each parameter.

        Raises:
            ConfigError: the memory does not fit this layout.
        """
        check_memory("weights", "values", values, self.stride, self.dtype, self.device)
        rows = self._rows[:, rank : rank + 1].copy()
        rows["values"] -= np.uint64(rank * self.stride * self.dtype.itemsize)
        rows["key"] = keys[:, None]
        self._run("encode", rows, values, payloads)

    def decode(self, payloads: torch.Tensor, values: torch.Tensor) -> None:
        """Decode all ranks' payloads into `values`, whose padding becomes zero.

        Raises:
            CodecError: a payload is malformed.
            ConfigError: the memory does not fit this layout.
        """
        numel = self.ranks * self.stride
        check_memory("weights", "values", values, numel, self.dtype, self.device)
        self._run("decode", self._rows.copy(), values, payloads)
        for padding in self._padding:
            values.view(-1)[padding].zero_()

    def _run(
        self, form: str, rows: np.ndarray, values: torch.Tensor, payloads: torch.Tensor
    ) -> None:
        """Run a form on rows of each parameter."""
        nbytes, on_gpu = sum(self.nbytes), self.device.type == "cuda"
        check_memory("weights", "payloads", payloads, nbytes, torch.uint8, self.device)
        rows["values"] += np.uint64(values.data_ptr())
        rows["payload"] += np.uint64(payloads.data_ptr())
        with torch.cuda.device(self.device) if on_gpu else nullcontext():
            for kernels, of in self._kernels:
                kernels.run(form, rows[of].ravel(), threads=torch.get_num_threads())

    def withhold(self, values: torch.Tensor, payloads: torch.Tensor, rank: int) -> None:
        """Make a rank's payloads of parameters that are unfit in its `values`, with padding, say
        so. Waits for the device."""
        for at, most in self._most.items():
            part = values[self.pieces[at].at :][: self.pieces[at].lengths[rank]]
            if part.numel():
                low, high = torch.stack(torch.aminmax(part)).tolist()
                if not (low >= -most and high <= most):  # NaN is neither
                    self._of(payloads, at, rank)[:] = _ONES

    def withheld(self, payloads: torch.Tensor) -> list[int]:
        """The parameters of which any rank has withheld its payload. Waits for the device."""
        coded = np.array(list(self._most), dtype=np.int64)
        at, rank = self._sizes[coded].nonzero()
        at = coded[at]
        found = payloads.cpu().numpy()
        likely = found[self._rows["payload"][at, rank]] == _ONES  # mostly none
        pairs = zip(at[likely].tolist(), rank[likely].tolist(), strict=True)
        return sorted({at for at, rank in pairs if (self._of(found, at, rank) == _ONES).all()})

    def _of(self, payloads: Any, at: int, rank: int) -> Any:
        """The part of a rank's payload of a parameter."""
        return payloads[int(self._rows["payload"][at, rank]) :][: self._sizes[at, rank]]


def _most(codec: Codec, dtype: torch.dtype) -> float:
    """The largest magnitude that is encoded: codecs compute with the range of a block, and with
    grids that are wider, so a quarter of the largest float of what they get and store."""
    half = any(field.dtype == "fp16" for field in layout(codec, dtype).fields)
    return torch.finfo(torch.float16 if half else dtype).max / 4


def kernels_of(codec: Codec, dtype: torch.dtype, device: torch.device) -> Kernels:
    """What encodes and decodes, compiled."""
    made = for_device(codec, dtype, device, "auto", "encode")
    made.ready(["decode"])
    return made
