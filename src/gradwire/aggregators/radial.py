"""The mean length in the mean direction: an average no shorter than what is averaged (2604.21428).

Of what ranks send, D_r, of one parameter:

    average = mean of |D_r|  *  unit(sum of unit(D_r))

The mean of n replicas that have drifted apart is shorter than any of them, up to sqrt(n) times, so
an outer learning rate must fit their number; this average keeps their length. Every rank has the
same weight. A contribution of zeros has no direction, and shortens the average. If directions
cancel out, the average is zero.

Payload bytes per rank: the codec's, to N - 1 ranks: contributions differ, so no sum of them can
travel. What is decoded is added in the order of ranks, and squares in an order that no number of
threads changes: all ranks have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregators.compressed import Encoded
from gradwire.aggregators.local import keep_residual, with_residual
from gradwire.aggregators.protocol import Context, Steps
from gradwire.codecs import Cast
from gradwire.collectives import AllGather
from gradwire.lang import Codec, layout
from gradwire.lang.codec import check_codec

_BF16 = Cast("bf16")
_ROUNDING = 2.0**-18  # the length of what it leaves of a sum of unit vectors, for each


@dataclass(frozen=True)
class Radial(Encoded):
    """The mean length in the mean direction, per parameter, by all-gather.

    Args:
        codec: of what each rank sends; as text "radial:codec=qsgd:bits=4".
    """

    codec: Codec = _BF16

    algorithm = "all_gather"

    def __post_init__(self) -> None:
        check_codec(self.codec, otherwise="the text radial:codec=NAME:OPTION=VALUE")

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        fed = [with_residual(c) for c in contexts]
        every = zip(fed, contexts, strict=True)
        received = yield [AllGather(f, codec=self.codec, of=c) for f, c in every]
        averages = []
        for c, f, found in zip(contexts, fed, received, strict=True):
            sent = found.view(c.world_size, len(f))
            averages.append(radial_mean(sent))
            if c.residual is not None:
                keep_residual(c, averages[-1].isfinite().all(), f - sent[c.rank])
        return averages

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return layout(self.codec, torch.float32).nbytes(math.prod(shape))

    def recorded(self) -> str:
        return f"radial({self.codec!r})"


def radial_mean(rows: torch.Tensor) -> torch.Tensor:
    """The mean length of rows in the direction of the sum of their directions."""
    norms = norms_of(rows)
    total, size = torch.zeros_like(rows[0]), torch.zeros_like(norms[0])
    for row, norm in zip(rows, norms, strict=True):
        total += torch.where(norm == 0, 0.0, row / norm)  # 0 / 0, if it has no direction
        size += norm
    (length,) = norms_of(total[None])
    # What rounding leaves of directions that cancel out is no direction.
    nothing = length <= len(rows) * _ROUNDING
    return torch.where(nothing, 0.0, total / length * (size / len(rows)))


def norms_of(rows: torch.Tensor) -> torch.Tensor:
    """The norm of each row, fp32, with the same bits on all machines: sums of halves."""
    squares = rows.double().square()
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        rest = squares[:, 2 * half :]
        squares = torch.cat([squares[:, :half] + squares[:, half : 2 * half], rest], 1)
    return squares.sum(1).sqrt().float()  # of one value, or none
