"""One compressed all-reduce, no state (CGX, HiPress)."""

from __future__ import annotations

import torch

from gradwire.aggregators.protocol import CompressedAllReduce, Steps
from gradwire.errors import ConfigError
from gradwire.lang import Codec


class Compressed:
    """The average through `codec`: encoded, summed by the owner of each chunk, encoded again."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def aggregate(self, gradient: torch.Tensor) -> Steps:
        return (yield CompressedAllReduce(gradient, self.codec))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if state:
            raise ConfigError(f"{self.codec} without error feedback has no state: {list(state)}")
