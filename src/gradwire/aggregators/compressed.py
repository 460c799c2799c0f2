"""One compressed all-reduce, without state (CGX, HiPress)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregators.protocol import Aggregator, Context, Steps
from gradwire.collectives import AllReduce
from gradwire.lang import Codec, layout


@dataclass(frozen=True)
class Compressed(Aggregator):
    """The average through `codec`: encode, sum on the owner of each chunk, encode the sum."""

    codec: Codec

    feeds_back = True

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        codec = self.codec
        yield [AllReduce(c.gradient, "avg", c.residual, codec=codec, of=c) for c in contexts]
        return [c.gradient for c in contexts]

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return layout(self.codec, dtype).nbytes(math.prod(shape))

    def __str__(self) -> str:
        return str(self.codec)
