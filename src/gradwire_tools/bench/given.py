"""A model whose gradients are given: what its backward takes is averaging, beside a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Weights(torch.nn.Module):
    """Parameters of given shapes; DDP's forward only prepares for a backward."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            name = f"weight{number or ''}"  # keys what codecs draw
            values = torch.zeros(*shape, dtype=torch.float32)
            self.register_parameter(name, torch.nn.Parameter(values))

    def forward(self) -> None:
        """Nothing."""


def as_hook(function: Callable[..., Any]) -> Callable[..., Any]:
    """A communication hook of a module whose annotations are strings: DDP compares them with the
    types themselves."""
    future = torch.futures.Future[torch.Tensor]
    function.__annotations__ = {"bucket": dist.GradBucket, "return": future}
    return function
