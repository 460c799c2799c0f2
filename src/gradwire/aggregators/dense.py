"""The trivial aggregator: the plain average, in fp32, fp16 or bf16."""

from __future__ import annotations

import torch

from gradwire.aggregators.compressed import Compressed
from gradwire.codecs import Cast, Identity
from gradwire.errors import ConfigError

_CODECS = {
    None: Identity(),
    torch.float16: Cast("fp16"),
    torch.bfloat16: Cast("bf16"),
}


class Dense(Compressed):
    """The average, sent uncompressed or cast.

    It takes the same road as compressed gradients, so that its result does not depend on bucketing.

    Args:
        dtype: what travels: None keeps the gradient's own dtype; float16 or bfloat16 cast.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        if dtype not in _CODECS:
            raise ConfigError(f"Dense: dtype {dtype}; use None, torch.float16 or torch.bfloat16")
        super().__init__(_CODECS[dtype])
