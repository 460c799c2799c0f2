"""The payloads in which one group of FSDP2's parameters is gathered, and their kernels.

A rank's payloads follow each other in the order of parameters, without gaps. Those of all ranks, in
the order of ranks, are one tensor of bytes: what an uncompressed all-gather moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from gradwire.integrations.fsdp import Piece
from gradwire.lang import Codec, layout
from gradwire.lang.kernels import Kernels, for_device
from gradwire.lang.rows import ROW, check_memory


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
        self.nbytes = tuple(int(n) for n in sizes.sum(axis=0))
        by_rank = sizes.T.ravel()  # parameter after parameter, rank after rank
        self._begin = (by_rank.cumsum() - by_rank).reshape(ranks, -1).T
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


def kernels_of(codec: Codec, dtype: torch.dtype, device: torch.device) -> Kernels:
    """What encodes and decodes, compiled."""
    made = for_device(codec, dtype, device, "auto", "encode")
    made.ready(["decode"])
    return made
