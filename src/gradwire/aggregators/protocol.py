"""What an aggregator is: a coroutine that yields collectives and returns the average.

One method is the contract. It takes the local gradient and yields the collectives it needs; each
`yield` hands back the collective's result. What it yields in the same round as the other
parameters of a bucket travels in the same messages, so an aggregator never thinks about fusion:

    def aggregate(self, gradient):
        return (yield CompressedAllReduce(gradient, QSGD(bits=4)))
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch

from gradwire.lang import Codec


@dataclass
class CompressedAllReduce:
    """Average `values` over the ranks, in place, through `codec` (Identity: uncompressed).

    Attributes:
        values: 1-D, contiguous; fp32, fp16 or bf16.
        codec: makes the payloads.
        residual: error feedback (fp32, as long as `values`), read and written by the kernels; or
            None.
    """

    values: torch.Tensor
    codec: Codec
    residual: torch.Tensor | None = None


Steps = Generator[CompressedAllReduce, torch.Tensor, torch.Tensor]


class Aggregator(Protocol):
    """How one parameter's gradient becomes its average over the ranks.

    An implementer's duties:
    - `aggregate` may overwrite the gradient, and returns the average (the same tensor, or
      another of its shape and dtype), bit-identical on all ranks.
    - The kind and number of collectives do not depend on the values.
    - State that lives across steps is in `state_dict`, and only there.
    """

    def aggregate(self, gradient: torch.Tensor) -> Steps:
        """Yield collectives until the average of `gradient` (1-D) is known; return it."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's state by name; tensors are not copied."""
        ...

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what `state_dict` gave; raises ConfigError for anything else."""
        ...
