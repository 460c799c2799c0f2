"""Selections, samples, rotations, kept codes and tables, in small unusual codecs."""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from codec_calls import SUMS, call, differing, fixed, gradient, round_trip
from gradwire.codecs import TopK
from gradwire.lang import ROW, Codec, Payload, Value, kernels
from gradwire.lang.emit.c import source
from gradwire.lang.forms import FORMS
from gradwire.lang.ops import (
    abs,
    bf16,
    clamp,
    concat,
    count,
    filter,
    fp16,
    fp32,
    gather,
    int32,
    inverse,
    keep,
    lookup,
    map,
    random,
    reduce,
    rotate,
    scatter,
    share,
    sort,
    table,
    topk,
    trit,
    uint,
    where,
)
from products import EXHAUSTIVE

LEVELS = (-1.0, -0.3, 0.0, 0.2, 0.9)


@dataclass(frozen=True)
class Rotated(Codec):
    """A transform in a fold, and a block size that is not a power of two."""

    block: int = 100

    def encode(self, g: Value) -> Payload:
        x = rotate(g.blocks(self.block))
        low = fp32(reduce(min, x))
        step = fp32((reduce(max, x) - low) / 15)
        code = map(lambda v: (v - low) * inverse(step) + 0.5, x)
        return concat(low=low, step=step, code=uint(4, code))

    def decode(self, low: Value, step: Value, code: Value) -> Value:
        return rotate(low + step * code, inverse=True)


@dataclass(frozen=True)
class Kept(Codec):
    """Trits that most blocks omit."""

    def encode(self, g: Value) -> Payload:
        x = g.blocks(32)
        scale = fp32(reduce(max, abs(g)))
        code = trit(x * inverse(scale) + 1.5)
        kept = uint(1, where(count(code != 1) > 0, 1, 0))
        return concat(scale=scale, kept=kept, code=keep(code, kept))

    def decode(self, scale: Value, kept: Value, code: Value) -> Value:
        return where(kept > 0, scale * (code - 1.0), 0.0)


@dataclass(frozen=True)
class Sampled(Codec):
    """A threshold from a sample: of values in encode, of a sum in reduce_encode."""

    def encode(self, g: Value) -> Payload:
        size = abs(g)
        threshold = sort(size, every=10)[share(0.02, 2)]
        chosen = topk(size, share(0.01), among=size >= threshold)
        return concat(chosen=chosen, value=fp16(gather(g, chosen)))

    def decode(self, chosen: Value, value: Value) -> Value:
        return scatter(value, chosen)


@dataclass(frozen=True)
class Mixed(Codec):
    """Entries as codes scaled per block, and a block size that is not a power of two."""

    def encode(self, g: Value) -> Payload:
        x = g.blocks(300)
        top = bf16(reduce(max, abs(x)))
        chosen = filter(abs(g) >= top * 0.5, share(0.3))
        code = clamp((g * inverse(top) + 1.0) * 4.0, 0, 7)
        return concat(top=top, chosen=chosen, code=uint(3, gather(code, chosen)))

    def decode(self, top: Value, chosen: Value, code: Value) -> Value:
        return scatter((code / 4.0 - 1.0) * top, chosen)


@dataclass(frozen=True)
class Dithered(Codec):
    """Entries as codes whose random numbers are redrawn."""

    def encode(self, g: Value) -> Payload:
        x = g.blocks(200)
        top = fp32(reduce(max, abs(x)))
        chosen = topk(abs(g), share(0.1))
        code = (g * inverse(top) + 1.0) * 7.0 + random()
        return concat(top=top, chosen=chosen, code=uint(4, gather(code, chosen)))

    def decode(self, top: Value, chosen: Value, code: Value) -> Value:
        return scatter(((code + (0.5 - gather(random(), chosen))) / 7.0 - 1.0) * top, chosen)


@dataclass(frozen=True)
class Tabled(Codec):
    """Levels that are passed to kernels."""

    levels: tuple[float, ...] = LEVELS

    def encode(self, g: Value) -> Payload:
        x = g.blocks(64)
        levels = table(self.levels)
        scale = fp32(reduce(max, abs(x)))
        unit = x * inverse(scale)
        middles = [(a + b) * 0.5 for a, b in pairwise(levels)]
        above = [where(unit > middle, 1, 0) for middle in middles]
        return concat(scale=scale, code=uint(3, builtins.sum(above[1:], start=above[0])))

    def decode(self, scale: Value, code: Value) -> Value:
        return scale * lookup(table(self.levels), code)


@dataclass(frozen=True)
class Whole(Codec):
    """32-bit integers in every scope."""

    def encode(self, g: Value) -> Payload:
        x = g.blocks(50)
        chosen = filter(abs(g) >= 0.5, share(0.5))
        return concat(
            total=int32(reduce(sum, abs(g)) * 1e6),
            top=int32(reduce(max, x) * 1e9),
            each=int32(x * 1e3),
            chosen=chosen,
            value=int32(gather(g * 1e5, chosen)),
        )

    def decode(self, chosen: Value, value: Value, **fields: Value) -> Value:
        return scatter(value * 1e-5 + fields["total"] * 0.0, chosen)


CODECS = [
    TopK(),
    TopK(0.3, "fp32"),
    Rotated(),
    Kept(),
    Sampled(),
    Mixed(),
    Tabled(),
    Whole(),
    Dithered(),
]


# dtype, values, threads; threads share the largest rows, see emit/c_rows.py
SINGLE = [(torch.float32, 1, 1), (torch.float32, 1025, 2), (torch.float32, 70000, 3)]
HALF = [(torch.bfloat16, 5000, 3), (torch.float16, 70000, 2)]
MOST = ("encode_ef", "decode_sum", "reduce_encode")  # together they have every part of the others


def strays(codec: Codec, forms: Sequence[str]) -> list[str]:
    """The forms that write beyond their workspace."""
    made, found = kernels(codec, torch.float32, "c"), []
    values, residual = gradient(90_000), torch.zeros(90_000)
    rows = np.zeros(2, ROW)
    payload = torch.zeros(made.layout.nbytes(90_000), dtype=torch.uint8)
    rows["values"], rows["residual"] = values.data_ptr(), residual.data_ptr()
    rows["payload"], rows["source"] = payload.data_ptr(), payload.data_ptr()
    rows["numel"] = [90_000, 0]
    for threads in (1, 3):
        needed = made.workspace_nbytes(rows["numel"], threads)
        workspace = torch.full((needed + 64,), 0xA5, dtype=torch.uint8)
        for form in forms:
            ranks = 2 if form in SUMS else 1
            made.run(
                form, rows, threads=threads, workspace=workspace, ranks=ranks,
                distances=np.zeros(ranks, dtype="i8"),
            )  # fmt: skip
            if not bool((workspace[needed:] == 0xA5).all()):
                found.append(f"{form} with {threads} threads writes beyond its workspace")
    return found


@pytest.mark.parametrize(
    "codec", [CODECS[0], pytest.param(CODECS[1], marks=EXHAUSTIVE), *CODECS[2:]], ids=repr
)
def test_c_equals_eager_and_allocates_nothing(codec: Codec, pytestconfig: pytest.Config) -> None:
    exhaustive = pytestconfig.getoption("exhaustive")
    forms, half = (FORMS, HALF) if exhaustive else (MOST, [])
    # the workspace first: payloads that encode has to write precede those that decode reads
    faults = strays(codec, ["encode", *forms])
    for dtype, n, threads in [*SINGLE, *half]:
        faults += differing(codec, forms, [fixed(n, dtype)], threads)
    assert not faults
    assert not {"malloc", "calloc", "realloc", "alloca"} & set(re.findall(r"\w+", source(codec)))


def test_half_precision() -> None:
    faults = differing(CODECS[5], MOST[:1], [fixed(5000, torch.bfloat16)], 3)
    assert faults + differing(CODECS[4], MOST[2:], [fixed(70000, torch.float16)], 2) == []


def test_topk_equals_a_sort() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(17))
    values[values == 0] = 0.5  # below, values that are not 0 count as selected
    values[::7] = values[3]  # ties
    rows = [(values, density) for density in (0.001, 0.01, 0.1, 1.0)]
    rows += [(torch.arange(90_000.0), 0.01), (-torch.arange(90_000.0).flip(0), 0.01)]
    for values, density in rows:
        k = max(1, int(density * values.numel()))
        order = torch.argsort(values.abs(), descending=True, stable=True)[:k]
        for threads in (1, 2):
            decoded = round_trip(TopK(density, "fp32"), values, threads=threads)
            assert torch.equal(decoded.nonzero().flatten(), order.sort().values), density
            assert torch.equal(decoded[order], values[order]), density


def test_many_small_rows_are_selected_independently() -> None:
    made = kernels(TopK(0.1), torch.float32, "c")
    rows = [gradient(n, seed=n) for n in (1, 9, 10, 999, 0, 3000)]
    alone = [call(TopK(0.1), "encode", row).payload for row in rows]
    payloads = [torch.zeros_like(p) for p in alone]
    arguments = np.zeros(len(rows), ROW)
    arguments["values"] = [row.data_ptr() for row in rows]
    arguments["payload"] = [p.data_ptr() for p in payloads]
    arguments["numel"] = [row.numel() for row in rows]
    arguments["key"] = 7
    made.run("encode", arguments, threads=2)
    for a, b in zip(payloads, alone, strict=True):
        assert torch.equal(a, b)
