"""A complete codec to copy: the sign of every value and the mean magnitude of every block.

    python examples/skeleton_codec.py

To write your own codec, copy this file, rename the class, and change `encode` and `decode`. Both
are traced on symbols, so they use the operators of `gradwire.lang.ops`, and `where` instead of `if`
on data. The language derives everything else: payload sizes, the error-feedback and reducing forms,
and compiled kernels. tests/examples/test_skeleton_codec.py shows the tests a codec should pass;
docs/how-to/writing-a-codec.md goes from an empty file to a trained model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.errors import ConfigError
from gradwire.lang import Codec, Payload, Value, decode, encode
from gradwire.lang.ops import abs, bf16, concat, count, map, reduce, uint, where


@dataclass(frozen=True)
class SignMean(Codec):
    """One bit per value: plus or minus the mean magnitude of its block. Biased: use error feedback.

    Options:
        block: values that share a magnitude.
    """

    block: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.block <= 65536:
            raise ConfigError(f"SignMean: block={self.block!r} must be 1 to 65536")

    def encode(self, g: Value) -> Payload:
        x = g.blocks(self.block)  # reductions over x give one value per block
        size = reduce(sum, map(abs, x))
        sign = map(lambda v: where(v > 0.0, 1, 0), x)
        return concat(mean=bf16(size / count(x)), sign=uint(1, sign))

    def decode(self, mean: Value, sign: Value) -> Value:
        return map(lambda s: where(s > 0.0, mean, -mean), sign)


def main() -> None:
    """Encode and decode a gradient; print the compression ratio and the error."""
    gradient = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    codec = SignMean()
    payload = encode(codec, gradient)
    decoded = decode(codec, payload, gradient.numel())
    cosine = torch.nn.functional.cosine_similarity(gradient, decoded, dim=0)
    ratio = gradient.nbytes / payload.nbytes
    print(f"{ratio:.1f} times smaller; cosine between gradient and decoded: {cosine:.3f}")


if __name__ == "__main__":
    main()
