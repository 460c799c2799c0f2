"""One compressed all-reduce, without state of its own (CGX, HiPress), per parameter or over the
whole model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire import algorithms
from gradwire.aggregators.protocol import Aggregator, Context, Steps
from gradwire.codecs import checks
from gradwire.collectives import AllReduce, Request
from gradwire.collectives.legal import FLOATS
from gradwire.errors import ConfigError
from gradwire.lang import Codec, layout

SCOPES = ("layer", "model")


class Encoded(Aggregator):
    """Base class: gradients are averaged by one all-reduce through a codec.

    Attributes:
        codec: as passed to the all-reduce.
        algorithm: of the all-reduce; None: the handle's.
        scope: "layer": each parameter is encoded by itself; "model": all of them as one tensor, in
            the order of their names, after the last bucket of backward.
    """

    codec: Codec
    algorithm: str | None = None
    feeds_back = True

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return self.codec.contracts

    @property
    def encoders(self) -> tuple[Codec, ...]:
        return (self.codec,)

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        if self.scope == "model":
            return (yield from self._as_one(contexts))
        yield [averaged(c, self.codec, self.algorithm) for c in contexts]
        return [c.gradient for c in contexts]

    def _as_one(self, given: Sequence[Context]) -> Steps:
        contexts = sorted(given, key=lambda c: c.name)  # not DDP's order, which changes
        lengths = [c.gradient.numel() for c in contexts]
        values = torch.cat([c.gradient for c in contexts])
        kept = [c.residual for c in contexts if c.residual is not None]
        residual = torch.cat(kept) if kept else None
        of, codec, algorithm = contexts[0], self.codec, self.algorithm
        yield AllReduce(values, "avg", residual, codec=codec, algorithm=algorithm, of=of)
        averages = values.split(lengths)
        for c, average in zip(contexts, averages, strict=True):
            c.gradient.copy_(average)
        if residual is not None:
            for before, after in zip(kept, residual.split(lengths), strict=True):
                before.copy_(after)
        return [c.gradient for c in given]

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return layout(self.codec, dtype).nbytes(math.prod(shape))


def averaged(c: Context, codec: Codec | None, algorithm: str | None = None) -> Request:
    """The collective that replaces a gradient by its average, with the residual, if there is one.
    Values that no codec takes travel uncompressed."""
    request = c.reduction or AllReduce(c.gradient)
    request.of = c
    if request.home is None:
        request.values = c.gradient  # error feedback may have it in fp32
    if algorithm is not None:
        request.algorithm = algorithm
    if c.gradient.dtype in FLOATS:
        request.codec, request.residual = codec, c.residual  # type: ignore[misc]
    return request


@dataclass(frozen=True)
class Compressed(Encoded):
    """The average through `codec`: encode, sum on the owner of each chunk, encode the sum; or as
    another algorithm does.

    Args:
        codec: encodes the values and, in most algorithms, sums of them.
        algorithm: the name of an all-reduce algorithm for these parameters; None: the handle's.
            Through "all_gather" no sum is encoded.
        scope: "layer" or "model"; see `Encoded`.
    """

    codec: Codec
    algorithm: str | None = None
    scope: str = "layer"

    def __post_init__(self) -> None:
        checks.one_of(self, "scope", SCOPES)
        if self.algorithm is not None:
            if not isinstance(self.algorithm, str):
                raise ConfigError(f"{self.codec}: algorithm={self.algorithm!r}: give a name")
            object.__setattr__(self, "algorithm", checks.plain(self.algorithm))
            algorithms.get(self.algorithm)

    def recorded(self) -> str:
        through = "" if self.algorithm is None else f", {self.algorithm}"
        return f"{self.codec!r}{through}{', whole model' if self.scope == 'model' else ''}"
