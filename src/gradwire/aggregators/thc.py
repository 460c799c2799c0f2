"""THC (UTIL 3.2): sums of rotated, stochastically rounded values, as integers that saturate.

Per parameter of n values, in chunks of 2^l, of N ranks:

    1. rotate each chunk (randomised Hadamard transform; all ranks draw the same signs); its range
       is its largest magnitude; all-reduce the ranges, as bf16 rounded up: their maximum
    2. round each value to one of the 2 L + 1 points from -range to range, at random, so that its
       mean is the value: a whole number from -L to L, L = 2^(code - 1) - 1
    3. all-reduce these numbers in `bits` bits: sums beyond S = 2^(bits - 1) - 1 saturate, in the
       order in which the algorithm adds them (once with sra, at every hop with ring)
    4. average = sum * range / (L N), rotated back

Two rounds per scope. payload bytes = bits n / 8 (each block of 1024 values in whole bytes)
+ 2 ceil(n / chunk).

A rotation spreads large values over their chunk, so that the range is narrow, and rotated values
are about normal, so few sums saturate. N L <= S means that none can: the average is then unbiased.
As N grows, give more bits (UTIL 3.2.2). What saturates is lost without error feedback, which keeps
it, and the error of rounding with it.

rotation="partial" rotates chunks, which fit L1 (UTIL's shared memory). "full" rotates the whole
parameter: chunks, then across chunks, in groups of a power of two of them; ranges are still per
chunk. "none" rotates nothing.

A non-finite value makes its chunk's range non-finite, so the average of that chunk on all ranks,
and the residual stays as it was. Values above 1e38 / chunk may overflow where they are rotated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.aggregators.local import keep_residual, run_local, step_keys, with_residual
from gradwire.aggregators.local_codecs import Ends, Restored, Rounded, Turned
from gradwire.aggregators.protocol import Aggregator, Context, Steps
from gradwire.codecs import Saturating, checks
from gradwire.collectives import AllReduce
from gradwire.errors import ConfigError
from gradwire.lang import Codec, layout

_ROTATIONS = ("partial", "full", "none")


@dataclass(frozen=True)
class THC(Aggregator):
    """Integer sums of rotated values. Unbiased where nothing saturates; error feedback is optional.

    Args:
        bits: of a sum on the wire, 2 to 8.
        code: bits of a rank's own numbers, 2 to `bits`.
        rotation: "partial", "full" or "none".
        chunk: values that share a range, and are rotated together: a power of two, 2 to 65536.
        saturate: whether sums may saturate. If not, `bits` must suffice for all ranks' largest
            numbers: N (2^(code - 1) - 1) <= 2^(bits - 1) - 1, which `check_ranks` checks.

    Metrics:
        saturated_share: the share of the parameter's sums that are at an end of the range: what
            saturated, and sums that are just as large; 0 where none can saturate.
    """

    bits: int = 4
    code: int = 4
    rotation: str = "partial"
    chunk: int = 1024
    saturate: bool = True

    feeds_back = True

    def __post_init__(self) -> None:
        checks.integer(self, "bits", 2, 8)
        checks.integer(self, "code", 2, self.bits, given="bits")
        checks.one_of(self, "rotation", _ROTATIONS)
        checks.integer(self, "chunk", 2, 65536)
        if self.chunk & (self.chunk - 1):
            near = 1 << round(math.log2(self.chunk))
            raise ConfigError(f"THC: chunk={self.chunk} must be a power of two, such as {near}")
        checks.one_of(self, "saturate", (False, True))

    @property
    def most(self) -> int:
        """L: the largest number of a rank."""
        return int(2 ** (self.code - 1)) - 1

    @property
    def wire(self) -> Saturating:
        """The codec of the sums."""
        return Saturating(self.bits)

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        """Whether L is large enough for a chunk's worst values. A rotation of n values makes the
        squared range at most 2 ln(2 n) + 2 of their mean square, on average, whatever they are."""
        if self.rotation == "none":
            return self.chunk <= 8 * self.most**2
        return math.log(2 * self.chunk) + 1 <= 2 * self.most**2

    @property
    def encoders(self) -> tuple[Codec, ...]:
        return (Rounded(self.chunk, self.most, self.rotation == "partial"), self.wire)

    def saturates(self, world_size: int) -> bool:
        """Whether a sum of so many ranks' numbers can saturate."""
        return world_size * self.most > self.wire.most

    def check_ranks(self, world_size: int) -> None:
        if self.saturate or not self.saturates(world_size):
            return
        needed = next((b for b in range(3, 9) if world_size * self.most < 2 ** (b - 1)), None)
        code = next(
            (q for q in range(self.code, 1, -1) if world_size * (2 ** (q - 1) - 1) < 128), 0
        )
        if needed is not None:
            mend = f"give bits={needed}"
        elif code:
            mend = f"8 bits suffice for code={code}"
        else:
            mend = "at most 127 ranks can do without"
        raise ConfigError(
            f"THC: bits={self.bits} with code={self.code}: the sum of {world_size} ranks' numbers, "
            f"each up to {self.most}, may be {world_size * self.most}, and {self.bits} bits hold "
            f"up to {self.wire.most}: {mend}, or saturate=True"
        )

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        given, contexts = contexts, [c for c in contexts if c.gradient.numel()]
        if not contexts:
            return [c.gradient for c in given]
        ranks, feedback = contexts[0].world_size, contexts[0].residual is not None
        self.check_ranks(ranks)
        fed = [with_residual(c) for c in contexts]
        signs, own = step_keys(contexts, shared=True), step_keys(contexts, shared=False)
        rotated, sums = [[Numbers(f, self.chunk) for f in fed] for _ in range(2)]

        self._rotate(fed, rotated, signs)
        yield [AllReduce(x.ranges, "max", of=c) for x, c in zip(rotated, contexts, strict=True)]

        codec = Rounded(self.chunk, self.most, self.rotation == "partial")
        numbers = [s.numbers for s in sums]
        run_local(codec, "decode", numbers, [x.memory for x in rotated], own)
        mine = [n.clone() for n in numbers if feedback]
        errors = [Numbers(f, self.chunk) for f in fed if feedback]
        for error in errors:
            error.numbers.zero_()
        residuals: list[torch.Tensor | None] = [error.numbers for error in errors]
        residuals = residuals or [None] * len(sums)
        yield [
            AllReduce(n, "sum", residual, codec=self.wire, of=c)
            for n, residual, c in zip(numbers, residuals, contexts, strict=True)
        ]
        self._measure(contexts, numbers)
        for x, s in zip(rotated, sums, strict=True):
            s.ranges.copy_(x.ranges)
        if feedback:
            for x, error, number in zip(rotated, errors, mine, strict=True):
                error.numbers.sub_(number)  # minus what this rank has sent
                error.ranges.copy_(x.ranges)
            self._restore("decode_add", fed, errors, signs)
            for x, f, c in zip(rotated, fed, contexts, strict=True):
                keep_residual(c, x.ranges.isfinite().all(), f)
        self._restore("decode", fed, sums, signs, 1 / ranks)
        averages = {id(c): f for c, f in zip(contexts, fed, strict=True)}
        return [averages.get(id(c), c.gradient) for c in given]

    def _rotate(
        self, values: Sequence[torch.Tensor], into: Sequence[Numbers], signs: np.ndarray
    ) -> None:
        """Rotated values, and the ranges of their chunks."""
        if self.rotation == "full":
            turned = [torch.empty_like(v) for v in values]
            run_local(Turned(self.chunk), "encode", values, turned, signs)
            for t in turned:
                rotate_across(t, self.chunk)
            values = turned
        codec = Rounded(self.chunk, self.most, self.rotation == "partial")
        run_local(codec, "encode", values, [x.memory for x in into], signs)

    def _restore(
        self,
        form: str,
        values: Sequence[torch.Tensor],
        numbers: Sequence[Numbers],
        signs: np.ndarray,
        factor: float = 1.0,
    ) -> None:
        """Whole numbers and ranges as values: `decode` times the factor, or `decode_add`."""
        memory = [x.memory for x in numbers]
        codec = Restored(self.chunk, self.most, self.rotation == "partial")
        if self.rotation != "full":
            return run_local(codec, form, values, memory, signs, factor)
        turned = [torch.empty_like(v) for v in values]
        run_local(codec, "decode", turned, memory, None, factor)
        for t in turned:
            rotate_across(t, self.chunk)
        return run_local(Turned(self.chunk), form, values, turned, signs)

    def _measure(self, contexts: Sequence[Context], sums: Sequence[torch.Tensor]) -> None:
        """Write the metrics."""
        ends = torch.zeros(len(sums), dtype=torch.float32, device=sums[0].device)
        if self.saturates(contexts[0].world_size):
            run_local(Ends(self.wire.most), "encode", sums, ends.split(1))
        for c, s, share in zip(contexts, sums, ends.split(1), strict=True):
            c.metrics["saturated_share"] = share / s.numel()

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        numel = math.prod(shape)
        return layout(self.wire).nbytes(numel) + 2 * -(-numel // self.chunk)

    def recorded(self) -> str:
        wide = "" if self.saturate else ", never saturating"
        how = f"bits={self.bits}, code={self.code}, rotation={self.rotation}, chunk={self.chunk}"
        return f"thc({how}{wide})"


class Numbers:
    """fp32 numbers and the bf16 ranges of their chunks, uninitialised, in the memory that
    `Rounded` and `Restored` call a payload.

    Args:
        like: a vector of as many values, on the same device.
        chunk: values per chunk.
    """

    def __init__(self, like: torch.Tensor, chunk: int) -> None:
        end = 4 * like.numel()
        nbytes = end + 2 * -(-like.numel() // chunk)
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        self.numbers = self.memory[:end].view(torch.float32)
        self.ranges = self.memory[end:].view(torch.bfloat16)


def rotate_across(values: torch.Tensor, chunk: int) -> None:
    """The Hadamard transform across whole chunks, in place and its own inverse: in groups of a
    power of two of them, the largest first. With chunks that are rotated it is the transform of
    each group."""
    whole, begin = values.numel() // chunk, 0
    while begin < whole:
        group = 1 << ((whole - begin).bit_length() - 1)
        part = values[begin * chunk : (begin + group) * chunk]
        distance = chunk
        while distance < part.numel():
            low, high = part.view(-1, 2, distance).unbind(1)
            difference = low - high
            low += high
            high.copy_(difference)
            distance *= 2
        part *= 1 / math.sqrt(group)
        begin += group
