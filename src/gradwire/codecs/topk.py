"""TopK: the largest values by magnitude, and where they are (THESIS 2.2.3)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.errors import ConfigError
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import abs, concat, fp16, fp32, gather, map, scatter, share, topk


@dataclass(frozen=True)
class TopK(Codec):
    """Exactly k = max(1, floor(density * n)) values of the largest magnitude; needs error feedback.

    Options:
        density: share of the values that is kept, above 0 and at most 1.
        values: how they are sent, "fp16" or "fp32".

    Of equal magnitudes the first are kept. NaN and infinities are the largest, so they travel.
    """

    density: float = 0.01
    values: str = "fp16"

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ConfigError(f"TopK: density={self.density!r} must be above 0 and at most 1")
        if self.values not in ("fp16", "fp32"):
            raise ConfigError(f"TopK: values={self.values!r} must be 'fp16' or 'fp32'")

    def encode(self, g: Value) -> Payload:
        chosen = topk(map(abs, g), share(self.density))
        store = fp16 if self.values == "fp16" else fp32
        return concat(chosen=chosen, value=store(gather(g, chosen)))

    def decode(self, chosen: Value, value: Value) -> Value:
        return scatter(value, chosen)
