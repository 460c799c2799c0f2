"""LowRank: the product of two thin matrices (HIPRESS 4.2; PowerSGD's step without its state)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import bf16, concat, decomp, elements, fp32, matmul, matrix

STORED = {"bf16": bf16, "fp32": fp32}


@dataclass(frozen=True)
class LowRank(Codec):
    """P and Q with P Q^T close to the gradient as a matrix; needs error feedback.

    Options:
        rank: columns of P and Q, 1 to 256, and at most `columns`.
        columns: of the matrix that a row's values are reshaped to, 1 to 65536.
        values: how P and Q are sent, "bf16" or "fp32".

    P is an orthonormal basis of the gradient times a random matrix; Q is the transposed gradient
    times P. Both operators call torch's BLAS, so no target fuses them, and their bits depend on it.
    A non-finite value makes the whole row non-finite. The aggregator PowerSGD is more accurate: it
    sums factors instead of products and starts from the previous step's factors.
    """

    rank: int = 4
    columns: int = 128
    values: str = "bf16"

    contracts = True

    def __post_init__(self) -> None:
        checks.integer(self, "rank", 1, 256)
        checks.integer(self, "columns", 1, 65536)
        checks.integer(self, "rank", 1, min(256, self.columns), given="columns")
        checks.one_of(self, "values", STORED)

    def encode(self, g: Value) -> Payload:
        p, q = decomp(matrix(g, self.columns), self.rank)
        return concat(p=STORED[self.values](p), q=STORED[self.values](q))

    def decode(self, p: Value, q: Value) -> Value:
        return elements(matmul(p, q))
