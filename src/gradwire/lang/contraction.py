"""How large the error of one encoding may be, measured on inputs that quantisers are worst at."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

from gradwire.lang.codec import Codec
from gradwire.lang.forms import derive
from gradwire.lang.kernels import decode, encode
from gradwire.lang.layout import layout

_LEAST = 2048  # values, or two blocks
_SMALL = (1.0, 0.25, 0.02, 0.0)  # against the largest value of a block
_DRAWS = 3


@lru_cache(maxsize=1024)
def worst_error(codec: Codec) -> float:
    """The largest mean squared error of one encoding that was found, over the squared norm of the
    input: of normal numbers, and of blocks that are small but for their ends."""
    draws = _DRAWS if "random" in derive(codec, "fp32").operators else 1
    return max(_error(codec, values, draws) for values in _inputs(layout(codec).block))


Codec._worst_error = worst_error


def _inputs(block: int) -> Iterator[torch.Tensor]:
    block = max(block, 2)
    blocks = max(2, _LEAST // block)
    generator = torch.Generator().manual_seed(0)
    yield torch.randn(blocks * block, generator=generator, dtype=torch.float32)
    for small in _SMALL:
        values = torch.full((blocks, block), small, dtype=torch.float32)
        values[:, 1::2] *= -1
        values[0, 0] = 1.0
        yield values.view(-1).clone()  # one large value in all
        values[:, 0] = 1.0
        yield values.view(-1).clone()  # one per block
        values[:, 1] = -1.0
        yield values.view(-1)  # two of both signs


def _error(codec: Codec, values: torch.Tensor, draws: int) -> float:
    found = [
        decode(codec, encode(codec, values, key, "eager"), len(values), key=key, target="eager")
        for key in range(draws)
    ]
    errors = torch.stack(found).double() - values.double()
    return float(errors.square().sum() / values.double().square().sum() / draws)
