"""The positions of the largest values, selected by compiled kernels and packed into bytes.

The bytes are the payload of the codec `Positions`: per block of B values how many are selected, in
two bytes, and each position in its block, in log2 B bits (lang/layout.py). They depend on values,
their number does not, so any collective that moves or adds bytes carries them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value, encode, layout
from gradwire.lang.layout import COUNT_NBYTES, RUN, element_nbytes, planes
from gradwire.lang.ops import abs, concat, fp32, map, scatter, share, topk


@dataclass(frozen=True)
class Positions(Codec):
    """Where the k = max(1, floor(density * n)) values of the largest magnitude are; of equal ones,
    the first. NaN and infinities are largest. Decodes to 1 there and 0 elsewhere."""

    density: float

    def __post_init__(self) -> None:
        checks.number(self, "density", above=0, most=1)

    def encode(self, g: Value) -> Payload:
        return concat(chosen=topk(map(abs, g), share(self.density)))

    def decode(self, chosen: Value) -> Value:
        return scatter(fp32(1.0), chosen)


def count(density: float, numel: int) -> int:
    """The number of positions."""
    return layout(Positions(density)).capacity(numel) if numel else 0


def packed_nbytes(density: float, numel: int) -> int:
    """The size of packed positions."""
    return layout(Positions(density)).nbytes(numel) if numel else 0


def pack(values: torch.Tensor, density: float) -> torch.Tensor:
    """The packed positions of the largest of `values`: uint8[packed_nbytes] on their device."""
    if not values.numel():
        return values.new_empty(0, dtype=torch.uint8)
    return encode(Positions(density), values)


def unpack(packed: torch.Tensor, density: float, numel: int) -> torch.Tensor:
    """The positions, int64[count], ascending; of zeros, any. The host does not wait for the
    device."""
    if not numel:
        return packed.new_empty(0, dtype=torch.int64)
    made = layout(Positions(density))
    blocks, k = made.blocks(numel), made.capacity(numel)
    end = COUNT_NBYTES * blocks
    low, high = packed[:end].view(-1, COUNT_NBYTES).long().unbind(1)
    counts = low + 256 * high
    counts[-1] += k - counts.sum()  # 0, unless nothing was sent, as in a rehearsal
    first = torch.arange(blocks, dtype=torch.int64, device=packed.device) * made.block
    return first.repeat_interleave(counts, output_size=k) + _codes(packed[end:], k, made.position)


def _codes(packed: torch.Tensor, k: int, dtype: str) -> torch.Tensor:
    """k codes, in runs."""
    size, left = element_nbytes(dtype, RUN), k % RUN
    whole = k // RUN * size
    runs = [_unpacked(packed[:whole].view(-1, size), RUN, dtype)]
    if left:
        runs.append(_unpacked(packed[whole:].view(1, -1), left, dtype))
    return torch.cat(runs)


def _unpacked(runs: torch.Tensor, m: int, dtype: str) -> torch.Tensor:
    """The codes of runs of m codes each, uint8[number, bytes]."""
    codes = torch.zeros(len(runs), m, dtype=torch.int64, device=runs.device)
    at = 0
    for width, low in planes(int(dtype.removeprefix("uint"))):
        nbytes = -(-m * width // 8)
        plane = runs[:, at : at + nbytes].long()
        parts = [plane >> shift & (1 << width) - 1 for shift in range(0, 8, width)]
        codes |= torch.cat(parts, 1)[:, :m] << low
        at += nbytes
    return codes.view(-1)
