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
from gradwire.lang import Codec, layout
from gradwire.lang.kernels import Kernels, for_device
from gradwire.lang.rows import ROW, check_memory

_ONES = 255  # a byte


class Payloads:
    """The layout of the payloads of one group, for one dtype.

    Args:
        pieces: the parameters, in FSDP's order.
        codecs: of each of them; `Identity` copies.
        stride: values of a rank, with padding.
        ranks: that gather.

    Attributes:
        nbytes: of each rank's payloads.
        ends: of each parameter within a rank's values, padding included.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        codecs: Sequence[Codec],
        stride: int,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pieces = list(pieces)
        self.ends = [*(piece.at for piece in self.pieces[1:]), stride]
        self.stride, self.ranks = stride, ranks
        self.dtype, self.device = dtype, device
        sizes = np.array(
            [
                [layout(codec, dtype).nbytes(piece.lengths[rank]) for rank in range(ranks)]
                for piece, codec in zip(pieces, codecs, strict=True)
            ],
            dtype=np.int64,
        ).reshape(len(self.pieces), ranks)
        self._sizes = sizes
        self.nbytes = tuple(int(n) for n in sizes.sum(axis=0))
        by_rank = sizes.T.ravel()  # parameter after parameter, rank after rank
        self._begin = (by_rank.cumsum() - by_rank).reshape(ranks, -1).T
        self._most = {
            at: _most(codec, dtype)
            for at, codec in enumerate(codecs)
            if not isinstance(codec, Identity)
        }
        self._coded = [(at, r) for at in self._most for r in range(ranks) if sizes[at, r]]
        self._firsts = np.array([self._begin[one] for one in self._coded], dtype=np.int64)
        self._kernels: dict[Codec, tuple[Kernels, list[int]]] = {}
        for at, codec in enumerate(codecs):
            if codec not in self._kernels:
                self._kernels[codec] = kernels_of(codec, dtype, device), []
            self._kernels[codec][1].append(at)

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
        self._check(values, self.stride, payloads)
        for kernels, of in self._kernels.values():
            before = rank * self.stride * self.dtype.itemsize
            rows = self._rows(of, [rank], values.data_ptr() - before, payloads.data_ptr())
            rows["key"] = keys[of]
            self._run(kernels, "encode", rows)

    def unfit(self, values: torch.Tensor, rank: int) -> list[int]:
        """The parameters that are unfit for their codecs, of a rank's `values`, with padding. Waits
        for the device."""
        found = []
        for at, most in self._most.items():
            part = values[self.pieces[at].at :][: self.pieces[at].lengths[rank]]
            if part.numel():
                low, high = torch.stack(torch.aminmax(part)).tolist()
                if not (low >= -most and high <= most):  # NaN is neither
                    found.append(at)
        return found

    def withhold(self, payloads: torch.Tensor, rank: int, parameters: Sequence[int]) -> None:
        """Make a rank's payloads of these parameters say that they are unfit."""
        for at in parameters:
            self._of(payloads, at, rank)[:] = _ONES

    def withheld(self, payloads: torch.Tensor) -> list[int]:
        """The parameters of which any rank has withheld its payload. Waits for the device."""
        found = payloads.cpu().numpy()
        (likely,) = np.nonzero(found[self._firsts] == _ONES)  # mostly none
        coded = [self._coded[n] for n in likely]
        return sorted({at for at, r in coded if (self._of(found, at, r) == _ONES).all()})

    def _of(self, payloads: Any, at: int, rank: int) -> Any:
        """The part of a rank's payload of a parameter."""
        return payloads[self._begin[at, rank] :][: self._sizes[at, rank]]

    def decode(self, payloads: torch.Tensor, values: torch.Tensor) -> None:
        """Decode all ranks' payloads into `values`, whose padding becomes zero.

        Raises:
            CodecError: a payload is malformed.
            ConfigError: the memory does not fit this layout.
        """
        self._check(values, self.ranks * self.stride, payloads)
        for kernels, of in self._kernels.values():
            every = range(self.ranks)
            rows = self._rows(of, every, values.data_ptr(), payloads.data_ptr())
            self._run(kernels, "decode", rows)
        parts = values.view(self.ranks, self.stride)
        for piece, end in zip(self.pieces, self.ends, strict=True):
            for rank, length in enumerate(piece.lengths):
                parts[rank, piece.at + length : end].zero_()

    def _check(self, values: torch.Tensor, numel: int, payloads: torch.Tensor) -> None:
        nbytes = sum(self.nbytes)
        check_memory("weights", "values", values, numel, self.dtype, self.device)
        check_memory("weights", "payloads", payloads, nbytes, torch.uint8, self.device)

    def _rows(
        self, of: Sequence[int], ranks: Sequence[int], values: int, payloads: int
    ) -> np.ndarray:
        """A row for each of these parameters on each of these ranks, of no values on some."""
        rows = np.zeros((len(of), len(ranks)), ROW)
        at = np.array([self.pieces[p].at for p in of], dtype=np.int64)[:, None]
        first = np.array(ranks, dtype=np.int64)[None] * self.stride
        rows["values"] = values + (first + at) * self.dtype.itemsize
        rows["payload"] = payloads + self._begin[np.ix_(of, ranks)]
        rows["numel"] = [[self.pieces[p].lengths[rank] for rank in ranks] for p in of]
        return rows.ravel()

    def _run(self, kernels: Kernels, form: str, rows: np.ndarray) -> None:
        on_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_gpu else nullcontext():
            kernels.run(form, rows, threads=torch.get_num_threads())


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
