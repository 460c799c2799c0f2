"""TopKC (UTIL 3.1.2): the chunks with the largest norms over all ranks, by all-reduce alone.

Per parameter of n values, cut into M = ceil(n / chunk) chunks, the last padded with zeros:

    1. every rank computes the squared L2 norm of each of its chunks; all-reduce them, as bf16
    2. every rank picks the J chunks whose mean square is largest; ties go to the lower chunk
    3. all-reduce the values of these chunks, as fp16

The average is zero elsewhere; error feedback keeps the rest. Two rounds per scope.

    payload bytes = 2 M + width min(J chunk, n)      width: bytes of a value, 2 as fp16 or bf16
    J = floor((bits n / 8 - 2 M) / (width chunk)), at least 1, at most M

So `bits` is what a rank sends per value and payload, squares included (UTIL's bits per coordinate;
a parameter of few values sends one chunk, whatever that takes).

With scope="model", one choice is made over the chunks of all parameters. Each parameter is cut by
itself, so that no chunk has values of two; n and M are sums over the parameters, J is of the whole,
and the padding travels:

    payload bytes = 2 M + width J chunk, of which a parameter of n values has a share, bits n / 8

Squares travel as bf16, which has the range of fp32: of a scaled gradient they overflow fp16, the
paper's, and of a small one they vanish in it. Norms from 2^-63 to 2^55 keep their order; beyond,
they count as these. Each rank's square and their mean are rounded to 8 bits: of two chunks whose
mean squares differ by less than 1.6 %, the smaller may be picked (a ring rounds sums at every hop,
too).

Values travel times a power of two per chunk, which all ranks derive from its mean square. By
Cauchy's inequality, N times its root is the most that a value or a sum of N can be, and it becomes
at most 2^15. So within that range of norms fp16 neither overflows nor loses digits, and no byte is
spent on it. Smaller values are rounded to fewer digits; error feedback keeps the rest. Larger ones,
which fp16 cannot hold, are Inf on all ranks.

A value that is not finite makes its chunk's square not finite on all ranks. Such chunks come first,
the average is NaN in all that is not picked, and the residual stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregators.chunks import gather_chunks, largest_chunks, scatter_chunks
from gradwire.aggregators.local import keep_residual, run_local, with_residual
from gradwire.aggregators.local_codecs import ChunkSquares
from gradwire.aggregators.protocol import Aggregator, Context, Steps
from gradwire.codecs import Cast, checks
from gradwire.collectives import AllReduce
from gradwire.errors import ConfigError

SCOPES = ("layer", "model")
_SQUARE_BITS = 16
_MOST_CHUNK = 65536
_LEAST_BITS = 0.00025  # more than the squares of the largest chunks take
_CODEC = {"fp16": Cast("fp16"), "bf16": Cast("bf16"), "fp32": None}  # of the chosen values


@dataclass(frozen=True)
class TopKC(Aggregator):
    """All-reduce of the chunks with the largest norms; `ErrorFeedback` keeps the others.

    Args:
        bits: sent per value and payload, squared norms included: more than those alone take (16 /
            chunk), at most what the values take.
        chunk: values per chunk; None: 64, or 128 below 1 bit, as in the paper.
        values: how the chosen values travel, "fp16", "bf16" or "fp32".
        permuted: permute the values at random in each step, alike on all ranks, before they are
            cut. Neighbours then have nothing in common, so the error grows: this shows what
            TopKC owes to large values being close to each other (UTIL Table 2).
        scope: what one choice of chunks is over: "model", all parameters, in the order of their
            names, after the last bucket of backward; "layer", each parameter by itself, as its
            bucket comes, with several times the error.
    """

    bits: float = 2.0
    chunk: int | None = None
    values: str = "fp16"
    permuted: bool = False
    scope: str = "model"

    feeds_back = True
    needs_feedback = True

    def __post_init__(self) -> None:
        checks.one_of(self, "values", _CODEC)
        checks.one_of(self, "scope", SCOPES)
        checks.one_of(self, "permuted", (False, True))
        if self.chunk is not None:
            checks.integer(self, "chunk", 2, _MOST_CHUNK)
        checks.number(self, "bits", above=0, most=8 * self.width)
        if self.bits * self.size <= _SQUARE_BITS:
            mend = f"use bits={_LEAST_BITS} or more, and chunk={_MOST_CHUNK}"
            if self.bits * _MOST_CHUNK > _SQUARE_BITS:
                chunk = math.floor(_SQUARE_BITS / self.bits) + 1
                mend = f"give more bits, or chunk={chunk} or more"
            raise ConfigError(
                f"TopKC: bits={self.bits!r}: the squares of chunks of {self.size} values take "
                f"{_SQUARE_BITS / self.size:g} bits per value; {mend}"
            )

    @property
    def size(self) -> int:
        """Values per chunk."""
        return self.chunk or (64 if self.bits >= 1 else 128)

    @property
    def width(self) -> int:
        """Bytes of a value that is sent."""
        return 4 if self.values == "fp32" else 2

    def cut(self, *numels: int) -> tuple[int, int]:
        """(the number of chunks of parameters of so many values, the number of those that are
        sent)."""
        chunks = sum(-(-numel // self.size) for numel in numels)
        left = self.bits * sum(numels) / 8 - _SQUARE_BITS / 8 * chunks
        return chunks, min(max(1, math.floor(left / (self.width * self.size))), chunks)

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        given, contexts = contexts, [c for c in contexts if c.gradient.numel()]
        if not contexts:
            return [c.gradient for c in given]
        groups = [[c] for c in contexts]
        if self.scope == "model":  # DDP's order changes
            groups = [sorted(contexts, key=lambda c: c.name)]
        vectors = [_Vector(group, self.size, self.permuted) for group in groups]
        firsts = [v.first for v in vectors]
        cuts = [self.cut(*(part.numel() for part in v.parts)) for v in vectors]

        all_squares = torch.empty(
            sum(chunks for chunks, _ in cuts), dtype=torch.bfloat16, device=vectors[0].values.device
        )
        squares = all_squares.split([chunks for chunks, _ in cuts])
        run_local(ChunkSquares(self.size), "encode", [v.values for v in vectors], squares)
        yield [AllReduce(square, of=c) for square, c in zip(squares, firsts, strict=True)]

        chosen = largest_chunks(squares, [sent for _, sent in cuts])
        picked = torch.cat([square[at] for square, at in zip(squares, chosen, strict=True)])
        up, down = _scales(picked, contexts[0].world_size)
        all_rows = vectors[0].values.new_empty(len(picked), self.size)
        rows = all_rows.split([sent for _, sent in cuts])
        for v, at, row in zip(vectors, chosen, rows, strict=True):
            gather_chunks(v.values, at, row)
        all_rows *= up
        all_errors = torch.zeros_like(all_rows)
        errors = all_errors.split([sent for _, sent in cuts])
        codec = _CODEC[self.values]
        yield [
            AllReduce(
                v.sent(row), "avg", v.sent(error) if v.first.residual is not None else None,
                codec=codec, of=v.first,
            )
            for v, row, error in zip(vectors, rows, errors, strict=True)
        ]  # fmt: skip
        all_rows *= down
        all_errors *= down
        for v, square, at, row, error in zip(vectors, squares, chosen, rows, errors, strict=True):
            v.keep(error, at, square.isfinite().all())
            v.average(row, at, (square * 0).sum())  # zero, or NaN
        averages = {
            id(c): part for v in vectors for c, part in zip(v.contexts, v.parts, strict=True)
        }
        return [averages.get(id(c), c.gradient) for c in given]

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        numel = math.prod(shape)
        if self.scope == "model":
            return math.ceil(self.bits * numel / 8)
        chunks, sent = self.cut(numel)
        return _SQUARE_BITS // 8 * chunks + self.width * min(sent * self.size, numel)

    def recorded(self) -> str:
        how = f"bits={self.bits:g}, chunk={self.size}"
        how += f", values={self.values}" if self.values != "fp16" else ""
        how += ", permuted" if self.permuted else ""
        return f"topkc({how}{', by layer' if self.scope == 'layer' else ''})"


class _Vector:
    """The error-fed values among which one choice of chunks is made.

    Attributes:
        first: the context of its collectives.
        parts: per parameter, its values: views of one vector, where each of several parameters
            begins with a chunk, so that the last of each is padded with zeros.
        values: that vector, permuted if the aggregator does so; of a single parameter, fp32 and
            not permuted, its gradient itself.
    """

    def __init__(self, contexts: Sequence[Context], size: int, permuted: bool) -> None:
        self.contexts = contexts
        self.first = contexts[0]
        fed = [with_residual(c) for c in contexts]
        self.parts, self._whole = fed, fed[0]
        if len(fed) > 1:
            lengths = [-(-f.numel() // size) * size for f in fed]
            self._whole = fed[0].new_zeros(sum(lengths))
            padded = self._whole.split(lengths)
            self.parts = [p[: f.numel()].copy_(f) for p, f in zip(padded, fed, strict=True)]
        self._order: torch.Tensor | None = None  # the step's permutation, equal on all ranks
        self.values = self._whole
        if permuted:
            numel, generator = self._whole.numel(), self.first.generator()
            order = torch.randperm(numel, generator=generator, dtype=torch.int64)
            self._order = order.to(self._whole.device)
            self.values = self._whole[self._order]

    def sent(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as one vector, without the padding of the last chunk of a single parameter, if
        every chunk is sent."""
        return rows.view(-1)[: self.values.numel()]

    def keep(self, errors: torch.Tensor, at: torch.Tensor, finite: torch.Tensor) -> None:
        """Keep what was not sent, of the chunks `at` only the errors, in the residuals."""
        if self.first.residual is None:
            return
        scatter_chunks(errors, at, self.values)
        if self._order is not None:
            self._whole[self._order] = self.values
        for c, part in zip(self.contexts, self.parts, strict=True):
            keep_residual(c, finite, part)

    def average(self, rows: torch.Tensor, at: torch.Tensor, elsewhere: torch.Tensor) -> None:
        """Replace the values by the rows at the chunks `at`, and by `elsewhere` otherwise."""
        self.values.copy_(elsewhere)
        scatter_chunks(rows, at, self.values)
        if self._order is not None:
            self._whole[self._order] = self.values


def _scales(squares: torch.Tensor, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(s, 1 / s) per chunk, [chunks, 1]: s is the power of two for which s times the world size
    times the square's root is at most 2^15, and more than a quarter of that; NaN for a square that
    is not finite.

    A square is below 2^(exponent - 126), with its exponent as bf16 stores it.
    """
    exponent = (squares.view(torch.int16).int() >> 7) & 0xFF
    root = (exponent - 126 + 1) >> 1  # the square's root is below 2^root, from 2^-63 to 2^65
    ranks = (world_size - 1).bit_length()  # 2^ranks >= world_size
    scale = 127 + 15 - ranks - root
    up, down = ((e << 23).view(torch.float32) for e in (scale, 254 - scale))
    return torch.where(exponent < 255, up, torch.nan)[:, None], down[:, None]
