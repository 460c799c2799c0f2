"""TopKC (UTIL 3.1.2): the chunks with the largest norms over all ranks, by all-reduce alone.

Per parameter of n values, cut into M = ceil(n / chunk) chunks, the last padded with zeros:

    1. every rank computes the L2 norm of each of its chunks; all-reduce the norms, as bf16
    2. every rank picks the J chunks whose mean norm is largest; ties go to the lower chunk
    3. all-reduce the values of these chunks, as fp16

The average is zero elsewhere; error feedback keeps the rest. Two rounds per scope.

    payload bytes = 2 M + width min(J chunk, n)      width: bytes of a value, 2 as fp16 or bf16
    J = floor((bits n / 8 - 2 M) / (width chunk)), at least 1, at most M

So `bits` is what a rank sends per value and payload, norms included (UTIL's bits per coordinate;
a parameter of few values sends one chunk, whatever that takes).

Norms are not squared and travel as bf16, which has the range of fp32: squares of a scaled gradient
overflow fp16, and those of a small one vanish in it. Chunks whose norms differ by less than 0.4 %
may be picked in either order.

Values travel times a power of two per chunk, which all ranks derive from its mean norm: N times
the mean norm is the most that a value or a sum of N can be, and it becomes at most 2^15. So fp16
neither overflows nor loses digits, whatever the gradient's scale, and no byte is spent on it.

A value that is not finite makes its chunk's norm not finite on all ranks. Such chunks come first,
the average is NaN in all that is not picked, and the residual stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregators.chunks import gather_chunks, largest_chunks, scatter_chunks
from gradwire.aggregators.local import keep_residual, run_local, stored, with_residual
from gradwire.aggregators.local_codecs import ChunkNorms
from gradwire.aggregators.protocol import Aggregator, Context, Steps
from gradwire.codecs import Cast
from gradwire.collectives import AllReduce
from gradwire.errors import ConfigError

_NORM_BITS = 16
_CODEC = {"fp16": Cast("fp16"), "bf16": Cast("bf16"), "fp32": None}  # of the chosen values


@dataclass(frozen=True)
class TopKC(Aggregator):
    """All-reduce of the chunks with the largest norms; `ErrorFeedback` keeps the others.

    Args:
        bits: sent per value and payload, norms included: more than the norms alone take (16 /
            chunk), at most what the values take.
        chunk: values per chunk; None: 64, or 128 below 1 bit, as in the paper.
        values: how the chosen values travel, "fp16", "bf16" or "fp32".
        permuted: permute the values at random in each step, alike on all ranks, before they are
            cut. Neighbours then have nothing in common, so the error grows: this shows what
            TopKC owes to large values being close to each other (UTIL Table 2).
    """

    bits: float = 2.0
    chunk: int | None = None
    values: str = "fp16"
    permuted: bool = False

    feeds_back = True
    needs_feedback = True

    def __post_init__(self) -> None:
        if self.values not in _CODEC:
            raise ConfigError(f"values={self.values!r}: use {', '.join(_CODEC)}")
        if type(self.permuted) is not bool:
            raise ConfigError(f"permuted={self.permuted!r}: use True or False")
        if self.chunk is not None and not (type(self.chunk) is int and 2 <= self.chunk <= 65536):
            raise ConfigError(f"chunk={self.chunk!r}: give a whole number from 2 to 65536, or None")
        most, real = 8 * self.width, type(self.bits) in (int, float)
        if not real or not 0 < self.bits <= most:
            raise ConfigError(
                f"bits={self.bits!r}: give a number above 0 and at most {most}, which the values "
                f"take as {self.values}"
            )
        if self.bits * self.size <= _NORM_BITS:
            least = math.floor(_NORM_BITS / self.bits) + 1
            raise ConfigError(
                f"bits={self.bits!r}: the norms of chunks of {self.size} values take "
                f"{_NORM_BITS / self.size:g} bits per value; give more bits, or chunk={least} or "
                "more"
            )

    @property
    def size(self) -> int:
        """Values per chunk."""
        return self.chunk or (64 if self.bits >= 1 else 128)

    @property
    def width(self) -> int:
        """Bytes of a value that is sent."""
        return 4 if self.values == "fp32" else 2

    def cut(self, numel: int) -> tuple[int, int]:
        """(the number of chunks of `numel` values, the number of those that are sent)."""
        chunks = -(-numel // self.size)
        left = self.bits * numel / 8 - _NORM_BITS / 8 * chunks
        return chunks, min(max(1, math.floor(left / (self.width * self.size))), chunks)

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        averages = [c.gradient for c in contexts]
        contexts = [c for c in contexts if c.gradient.numel()]
        if not contexts:
            return averages
        fed = [with_residual(c) for c in contexts]
        orders = [self._order(c) for c in contexts]
        values = [f if o is None else f[o] for f, o in zip(fed, orders, strict=True)]
        cuts = [self.cut(v.numel()) for v in values]

        all_norms = fed[0].new_empty(sum(chunks for chunks, _ in cuts), dtype=torch.bfloat16)
        norms = all_norms.split([chunks for chunks, _ in cuts])
        run_local(ChunkNorms(self.size), "encode", values, norms)
        yield [AllReduce(norm, of=c) for norm, c in zip(norms, contexts, strict=True)]

        chosen = largest_chunks(norms, [sent for _, sent in cuts])
        mean_norms = torch.cat([norm[at] for norm, at in zip(norms, chosen, strict=True)])
        up, down = _scales(mean_norms, contexts[0].world_size)
        all_rows = fed[0].new_empty(len(mean_norms), self.size)
        rows = all_rows.split([sent for _, sent in cuts])
        for v, at, row in zip(values, chosen, rows, strict=True):
            gather_chunks(v, at, row)
        all_rows *= up
        all_errors = torch.zeros_like(all_rows)
        errors = all_errors.split([sent for _, sent in cuts])
        codec = _CODEC[self.values]
        yield [
            AllReduce(
                _sent(row, c), "avg", _sent(error, c) if c.residual is not None else None,
                codec=codec, of=c,
            )
            for row, error, c in zip(rows, errors, contexts, strict=True)
        ]  # fmt: skip
        all_rows *= down
        all_errors *= down

        columns = zip(contexts, fed, values, orders, norms, chosen, rows, errors, strict=True)
        for c, f, v, order, norm, at, row, error in columns:
            if c.residual is not None:
                scatter_chunks(error, at, v)
                if order is not None:
                    f[order] = v
                keep_residual(c, norm.isfinite().all(), f)
            average = c.gradient if order is None else torch.empty_like(c.gradient)
            average.copy_((norm * 0).sum())  # zero, or NaN
            scatter_chunks(stored(row, average.dtype), at, average)
            if order is not None:
                c.gradient[order] = average
        return averages

    def _order(self, c: Context) -> torch.Tensor | None:
        """The step's permutation of a parameter's values, equal on all ranks; None: none."""
        if not self.permuted:
            return None
        return torch.randperm(c.gradient.numel(), generator=c.generator()).to(c.gradient.device)

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        numel = math.prod(shape)
        chunks, sent = self.cut(numel)
        return _NORM_BITS // 8 * chunks + self.width * min(sent * self.size, numel)

    def __str__(self) -> str:
        how = f"bits={self.bits:g}, chunk={self.size}"
        how += f", values={self.values}" if self.values != "fp16" else ""
        return f"topkc({how}{', permuted' if self.permuted else ''})"


def _sent(rows: torch.Tensor, c: Context) -> torch.Tensor:
    """The rows as one vector, without the padding of the last chunk if every chunk is sent."""
    return rows.view(-1)[: c.gradient.numel()]


def _scales(norms: torch.Tensor, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(s, 1 / s) per chunk, [chunks, 1]: s is the power of two for which world_size * norm * s is
    from 2^14 to 2^15, within fp32's range; NaN for a norm that is not finite.

    A norm is below 2^(exponent - 126), with its exponent as bf16 stores it.
    """
    exponent = (norms.view(torch.int16).int() >> 7) & 0xFF
    ranks = (world_size - 1).bit_length()  # 2^ranks >= world_size
    scale = (127 + 15 - ranks - (exponent - 126)).clamp(1, 253)
    up, down = ((e << 23).view(torch.float32) for e in (scale, 254 - scale))
    return torch.where(exponent < 255, up, torch.nan)[:, None], down[:, None]
