"""The largest values of each chunk, in two bits, averaged over those who send them (SparseLoCo,
2508.15706); or of its cosine transform (DeMo, 2411.19870).

Of each chunk of 4096 values a rank sends the k = 64 of largest magnitude:

    positions   in the order of the chunk (Elias, Fano): log2(chunk / k) low bits each; and of the
                high bits, for each value of them, as many ones as have it and a zero
    values      of a parameter in 2^bits bins around their mean, 6 standard deviations wide
                together, each of which stands for the mean of its values (fp32); or bf16

Payload bytes per chunk and rank, with the defaults: 48 + 16 of positions, 16 of values; and 20 per
parameter: 10 bits per value that is kept, .156 bits per value. The payload goes to N - 1 ranks.
With transform="dct" the coefficients of squares, as `dct` cuts a parameter, stand for its values:
they are selected, sent and averaged. What is decoded is added in the order of ranks, so all ranks
have the same bits.

A rank's values are scaled to the median of all ranks' norms where they exceed it (`clip`). Each
value of the average is divided by the number of its senders, or of all ranks (`mean`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from gradwire.aggregators.dct import coefficients, values_of
from gradwire.aggregators.local import keep_residual, with_residual
from gradwire.aggregators.protocol import Aggregator, Context, Steps
from gradwire.codecs import checks
from gradwire.collectives import AllGather
from gradwire.errors import ConfigError

MEANS, TRANSFORMS = ("senders", "ranks"), ("none", "dct")
_AS_THEY_ARE = 16  # bits of a value, bf16
_WIDE = 6.0  # standard deviations

Sent = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # places, each once; values; their norm


@dataclass(frozen=True)
class SparseLoCo(Aggregator):
    """The largest values of each chunk, by all-gather, with error feedback.

    Args:
        keep: values per chunk.
        chunk: values, a power of two.
        bits: per value that is kept: 1 to 4, of bins, or 16, bf16.
        mean: over the "senders" of each value, as in the paper, or over all "ranks".
        clip: whether contributions are scaled to the median norm.
        transform: "none", or "dct": coefficients are kept in place of values, of squares of
            sqrt(chunk) x sqrt(chunk) values.
    """

    keep: int = 64
    chunk: int = 4096
    bits: int = 2
    mean: str = "senders"
    clip: bool = True
    transform: str = "none"

    feeds_back = True
    needs_feedback = True

    def __post_init__(self) -> None:
        checks.integer(self, "chunk", 8, 65536)
        if self.chunk & (self.chunk - 1):
            near = 1 << round(math.log2(self.chunk))
            raise ConfigError(f"SparseLoCo: chunk={self.chunk} must be a power of two, as {near}")
        checks.integer(self, "keep", 1, self.chunk // 2, given="chunk")
        checks.one_of(self, "bits", (1, 2, 3, 4, _AS_THEY_ARE))
        checks.one_of(self, "mean", MEANS)
        checks.one_of(self, "clip", (False, True))
        checks.one_of(self, "transform", TRANSFORMS)
        if self.transform == "dct" and self._side**2 != self.chunk:
            which = f'must be a square for transform="dct", as {max(16, self.chunk // 2)}'
            raise ConfigError(f"SparseLoCo: chunk={self.chunk} {which}")

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        given_all, contexts = contexts, [c for c in contexts if c.gradient.numel()]
        fed = [with_residual(c) for c in contexts]
        chunks = [self._chunks(f, c) for f, c in zip(fed, contexts, strict=True)]
        given = [self._encoded(rows) for rows in chunks]
        received = yield [AllGather(g, of=c) for g, c in zip(given, contexts, strict=True)]
        averages = {}
        for c, f, rows, found in zip(contexts, fed, chunks, received, strict=True):
            sent = [self._decoded(one, len(rows)) for one in found.view(c.world_size, -1)]
            average = self._values(self._mean(sent, rows), c)
            if c.residual is not None:
                places, values, _ = sent[c.rank]
                own = rows.new_zeros(rows.numel()).index_add_(0, places, values)
                keep_residual(c, average.isfinite().all(), f - self._values(own, c))
            averages[id(c)] = average
        return [averages.get(id(c), c.gradient) for c in given_all]

    def _chunks(self, values: torch.Tensor, c: Context) -> torch.Tensor:
        """(chunks, chunk): of which the largest are sent."""
        if self.transform == "dct":
            return coefficients(values, c.shape, self._side)
        padded: torch.Tensor = pad(values, (0, -len(values) % self.chunk))
        return padded.view(-1, self.chunk)

    def _values(self, found: torch.Tensor, c: Context) -> torch.Tensor:
        """The parameter's values of what chunks have."""
        if self.transform == "dct":
            return values_of(found, c.shape, self._side)
        return found[: c.gradient.numel()]

    def _mean(self, sent: Sequence[Sent], like: torch.Tensor) -> torch.Tensor:
        """The average of what ranks sent."""
        norms = torch.stack([norm for *_, norm in sent])
        most = norms.median() if self.clip else norms.max()
        total = torch.zeros_like(like.view(-1))
        senders = torch.zeros_like(total)
        for places, values, norm in sent:
            scale = (most / norm).nan_to_num(1.0).clamp(max=1.0)
            total.index_add_(0, places, values * scale)
            senders.index_add_(0, places, torch.ones_like(values))
        return total.div_(senders.clamp_(min=1.0) if self.mean == "senders" else len(sent))

    # ---- payloads

    @property
    def _side(self) -> int:
        return math.isqrt(self.chunk)

    @property
    def _low(self) -> int:
        """Low bits of a position."""
        return (self.chunk // self.keep).bit_length() - 1

    @property
    def _high(self) -> int:
        """Bits for the high parts of a chunk's positions."""
        return self.keep + (self.chunk >> self._low)

    def _encoded(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8: the bins' means and the norm of what they make, low bits, high bits and codes."""
        few = len(rows) if rows.is_cuda else 16  # which stay in a cache of the CPU
        most = [some.abs().topk(self.keep, dim=1, sorted=False) for some in rows.split(few)]
        at = torch.cat([found.indices for found in most]).sort(dim=1).values
        kept = rows.gather(1, at)
        marks = torch.zeros(len(rows), self._high, dtype=torch.bool, device=rows.device)
        rank = _upto(self.keep, rows.device)
        marks.scatter_(1, (at >> self._low) + rank, True)
        means, codes, made = self._coded(kept)
        # The norm travels: ranks with other numbers of threads would add squares in another order.
        head = torch.cat([means, made.norm().view(1)])
        parts = head.view(torch.uint8), _packed(at, self._low), _packed(marks, 1)
        return torch.cat([*parts, _packed(codes, self.bits)])

    def _coded(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What each bin stands for, the code of each value, its bin, and what that makes; of bf16
        there are no bins."""
        if self.bits == _AS_THEY_ARE:
            made = kept.bfloat16()
            return kept.new_empty(0), made.view(torch.int16), made.float()
        many = 1 << self.bits
        middle, deviation = kept.mean(), kept.std(correction=0)
        place = (kept - middle) / (deviation * (_WIDE / many)) + many / 2
        bins = place.nan_to_num(0.0).clamp(0, many - 1).long()
        sums = kept.new_zeros(many).index_add_(0, bins.view(-1), kept.view(-1))
        means = sums / torch.bincount(bins.view(-1), minlength=many).clamp(min=1)
        return means, bins, means[bins]

    def _decoded(self, payload: torch.Tensor, chunks: int) -> Sent:
        """Of a payload of so many chunks."""
        head, low, high, codes = payload.split(self._sizes(chunks))
        marks = _unpacked(high, 1, (chunks, self._high)).bool()
        rank = _upto(self.keep, payload.device)
        # The places of ones, ascending; of another payload than `_encoded` made, any places.
        ones = marks.sort(dim=1, descending=True, stable=True).indices[:, : self.keep]
        upper = (ones - rank).clamp(0, (self.chunk >> self._low) - 1)
        at = (upper << self._low) | _unpacked(low, self._low, (chunks, self.keep))
        at += _upto(chunks, payload.device)[:, None] * self.chunk
        numbers = head.clone().view(torch.float32)
        found = _unpacked(codes, self.bits, (chunks, self.keep))
        if self.bits == _AS_THEY_ARE:
            values = found.to(torch.int16).view(torch.bfloat16).float()
        else:
            values = numbers[found]
        return at.view(-1), values.view(-1), numbers[-1]

    def _sizes(self, chunks: int) -> list[int]:
        """Bytes of the parts of a payload."""
        bits = (self._low * self.keep, self._high, self.bits * self.keep)
        numbers = 1 if self.bits == _AS_THEY_ARE else (1 << self.bits) + 1
        return [4 * numbers, *(-(-chunks * each // 8) for each in bits)]

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return sum(self._sizes(-(-math.prod(shape) // self.chunk)))

    def recorded(self) -> str:
        of = f"keep={self.keep}, chunk={self.chunk}, bits={self.bits}"
        of += f", mean={self.mean}, clip={self.clip}"
        return f"sparseloco({of}{', dct' if self.transform == 'dct' else ''})"


def _upto(number: int, device: torch.device) -> torch.Tensor:
    return torch.arange(number, dtype=torch.int64, device=device)


def _packed(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """The lowest bits of numbers, one after the other, the lowest first."""
    bits = (numbers.reshape(-1, 1).long() >> _upto(width, numbers.device) & 1).view(-1)
    bits = pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (bits << _upto(8, bits.device)).sum(1).to(torch.uint8)


def _unpacked(packed: torch.Tensor, width: int, shape: tuple[int, int]) -> torch.Tensor:
    """Numbers of this shape, as `_packed` stored them."""
    bits = (packed[:, None] >> _upto(8, packed.device) & 1).view(-1)
    bits = bits[: math.prod(shape) * width].view(-1, width).long()
    return (bits << _upto(width, bits.device)).sum(1).view(shape)
