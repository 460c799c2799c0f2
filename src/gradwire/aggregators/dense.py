"""The trivial aggregator: the uncompressed average, in the gradient's dtype, fp16 or bf16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregators.compressed import averaged
from gradwire.aggregators.protocol import Aggregator, Context, Steps
from gradwire.codecs import Cast
from gradwire.errors import ConfigError

_CASTS = {None: None, torch.float16: Cast("fp16"), torch.bfloat16: Cast("bf16")}


@dataclass(frozen=True)
class Dense(Aggregator):
    """The average of gradients sent uncompressed or cast. Sums are in fp32; of float64, in float64.

    It uses the same collectives as compressed gradients, so that its result does not depend on
    bucketing.

    Args:
        dtype: sent on the wire: None keeps the gradient's dtype; float16 or bfloat16 cast.
    """

    dtype: torch.dtype | None = None

    feeds_back = True

    def __post_init__(self) -> None:
        if self.dtype not in _CASTS:
            raise ConfigError(
                f"Dense: dtype {self.dtype}; use None, torch.float16 or torch.bfloat16"
            )

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        codec = _CASTS[self.dtype]
        yield [averaged(c, codec) for c in contexts]
        return [c.gradient for c in contexts]

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * (self.dtype or dtype).itemsize

    def recorded(self) -> str:
        return "dense" if self.dtype is None else f"dense in {self.dtype}".replace("torch.", "")
