"""One kernel call on one row, with its memory; and the codecs, dtypes and sizes that laws cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gradwire import codecs
from gradwire.codecs import Codec
from gradwire.lang import ROW, kernels, rng

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SENTINEL = 0xA5

# every path through every codec
CODECS: list[Codec] = [
    codecs.Identity(),
    codecs.Cast("fp16"),
    codecs.Cast("bf16"),
    codecs.Float8(block=100),
    codecs.QSGD(),
    codecs.QSGD(bits=7, scale="max", metadata="fp32"),
    codecs.QSGD(bits=5, scale="l2", rounding="nearest", block=100),
    codecs.QSGD(rounding="stochastic"),
    codecs.QSGD(bits=6, scale="l2", rounding="stochastic", metadata="fp32", block=50),
    codecs.TernGrad(),
    codecs.TernGrad("ternary"),
    codecs.OneBit(block=100),
    codecs.OneBit(block=None),
    codecs.TBQ(threshold=0.01),
    codecs.ThreeLC(),
    codecs.TopK(density=0.05),
    codecs.DGC(density=0.02),
    codecs.GradDrop(density=0.05),
    codecs.HardThreshold(threshold=0.02, density=0.1),
    codecs.AdaComp(block=100, density=0.1),
    codecs.RandomK(density=0.1, values="fp32", unbiased=True),
    codecs.RandomShift(bits=5, block=100),
    codecs.LearnedLevels(bits=3, block=64, levels=(0.0, 0.2, 0.35, 0.45, 0.5, 0.6, 0.75, 0.99)),
    codecs.LearnedLevels(bits=2, rounding="stochastic", levels=(0.0, 0.4, 0.6, 1.0)),
    codecs.Rotated(bits=6, block=96),
    codecs.Saturating(),
]
# codecs that every target interprets
UNFUSED: list[Codec] = [codecs.Rotated("full", block=100), codecs.LowRank(rank=2, columns=50)]
# every code width, and codecs that compile slowly: one dtype is enough for these
WIDTHS: list[Codec] = [
    *(codecs.QSGD(bits=b, block=7 if b % 2 else 64, metadata="fp32") for b in range(1, 9)),
    *(codecs.Saturating(bits=b) for b in (2, 3, 8)),
    codecs.MSTopK(density=0.1, values="fp32"),
]


def ragged_sizes(block: int) -> list[int]:
    """Sizes at which other codecs are known to fail, and around the C target's groups of blocks."""
    around = [block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1]
    return sorted({0, 1, 15, 16, 17, *around, 4096 - 1, 4096 + block + 3})


@dataclass
class Result:
    """The memory after a call."""

    values: torch.Tensor
    residual: torch.Tensor
    payload: torch.Tensor


def call(
    codec: Codec,
    form: str,
    values: torch.Tensor,
    *,
    target: str = "c",
    payload: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    peers: list[torch.Tensor] | None = None,
    rank: int = 0,
    factor: float = 1.0,
    threads: int = 1,
    key: int = 7,
    shared: int = 11,
    start: int = 0,
    origins: Sequence[int] | None = None,
    aligned: int = 1,
) -> Result:
    """Run a form on copies of the given tensors; nothing beside them, and no peer's payload, may
    change.

    `origins`: of the peers' payloads, by default 0, 1, ...; `key_of` gives the keys to encode them.
    `rank`: -1 for a sum without own values. `aligned`: the alignment of payloads, in bytes.
    """
    made = kernels(codec, values.dtype, target)
    size, width = made.layout.nbytes(values.numel()), values.itemsize
    # a sentinel on either side shows a write outside
    own = torch.full((values.nbytes + 2 * width,), SENTINEL, dtype=torch.uint8)
    sent = torch.full((size + 2 * aligned,), SENTINEL, dtype=torch.uint8)
    result = Result(
        own[width:-width].view(values.dtype),  # aligned to one value only
        torch.zeros(values.numel()) if residual is None else residual.clone(),
        sent[aligned:-aligned],
    )
    result.values.copy_(values)
    if payload is not None:
        result.payload.copy_(payload)
    peers = peers or []
    # peers' payloads may have any addresses: here in reverse, at unequal distances
    room = -(-size // aligned)
    places = np.array([(room + k) * k * aligned for k in reversed(range(len(peers)))], dtype="i8")
    sources = torch.zeros((room + len(peers)) * len(peers) * aligned, dtype=torch.uint8)
    for place, peer in zip(places.tolist(), peers, strict=True):
        sources[place : place + size] = peer
    before = sources.clone()
    rows = table(
        [result.values], [result.payload], residual=result.residual.data_ptr(),
        source=sources.data_ptr() + int(places[0] if peers else 0), start=start, key=key,
        shared=shared,
    )  # fmt: skip
    behind = np.array(range(len(peers)) if origins is None else origins, dtype="i8")
    made.run(
        form, rows, ranks=len(peers) + (rank >= 0), rank=rank, factor=factor, threads=threads,
        distances=np.concatenate([places - places[:1], behind]),
    )  # fmt: skip
    for memory, beside in ((own, width), (sent, aligned)):
        assert (memory[:beside] == SENTINEL).all()
        assert (memory[-beside:] == SENTINEL).all()
    assert torch.equal(sources, before)
    return result


def round_trip(codec: Codec, values: torch.Tensor, key: int = 7, **how: Any) -> torch.Tensor:
    """What is decoded, into memory with other values; see `call` for the arguments."""
    payload = call(codec, "encode", values, key=key, **how).payload
    memory = torch.full_like(values, 9.0)
    return call(codec, "decode", memory, payload=payload, key=key, **how).values


def table(
    values: Sequence[torch.Tensor], payloads: Sequence[torch.Tensor], **columns: Any
) -> np.ndarray:
    """The rows of a call; `columns`: further ones, a number for each row or one for all."""
    rows = np.zeros(len(payloads), ROW)
    rows["values"], rows["payload"] = ([t.data_ptr() for t in of] for of in (values, payloads))
    rows["numel"] = [t.numel() for t in values]
    for name, column in columns.items():
        rows[name] = column
    return rows


def drawn(codec: Codec, values: torch.Tensor, draws: int, key: int = 0) -> torch.Tensor:
    """float32[draws, n]: what n values decode to on target c with the keys from `key` on."""
    made, n = kernels(codec, torch.float32, "c"), len(values)
    size = made.layout.nbytes(n)
    payloads = torch.zeros(draws, size, dtype=torch.uint8)
    decoded, keys = torch.zeros(draws, n), np.arange(draws, dtype="u8")
    rows = np.zeros(draws, ROW)
    rows["payload"], rows["values"] = payloads.data_ptr() + keys * size, values.data_ptr()
    rows["numel"], rows["key"], rows["shared"] = n, keys + np.uint64(key), keys + np.uint64(2**40)
    made.run("encode", rows)
    rows["values"] = decoded.data_ptr() + keys * n * 4
    made.run("decode", rows)
    return decoded


def key_of(origin: int, shared: int = 11) -> int:
    """The key with which the payload of an origin is encoded, if its codec redraws."""
    return int(rng.origin_keys(np.uint64(shared), origin)[0])


def gradient(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values over six orders of magnitude, with exact zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(numel, generator=generator)
    scale = 10 ** (torch.rand(numel, generator=generator) * 6 - 5)
    kept = torch.rand(numel, generator=generator) > 0.05
    return (size * scale * kept).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are equal bit for bit; all NaNs count as equal."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    a_nan, b_nan = torch.isnan(a), torch.isnan(b)
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a_nan, b_nan) and torch.equal(a.view(bits)[~a_nan], b.view(bits)[~b_nan])


# ---- target c and the interpreter

SUMS = ("decode_sum", "reduce_encode", "reduce_encode_ef")  # forms that read payloads of peers


@lru_cache(maxsize=256)
def fixed(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """What `gradient` makes, once; `call` copies it."""
    return gradient(n, dtype, seed)


@lru_cache(maxsize=64)
def payloads(codec: Codec, dtype: torch.dtype, n: int) -> list[torch.Tensor]:
    """Valid payloads of n values: of the caller, and of the origins 2 and 3."""
    given = [(1, {"key": 1}), *((s, {"key": key_of(s), "start": 640}) for s in (2, 3))]
    return [
        call(codec, "encode", fixed(n, dtype, s), target="eager", **how).payload for s, how in given
    ]


def run(
    codec: Codec, form: str, values: torch.Tensor, target: str, threads: int = 1, start: int = 640
) -> Result:
    """Run a form with payloads, peers and residuals that do not depend on the target."""
    n = values.numel()
    payload, *peers = payloads(codec, values.dtype, n)
    summed = form in SUMS
    return call(
        codec, form, values, target=target, payload=payload, residual=fixed(n, seed=4),
        peers=peers * summed, rank=int(summed), factor=1 / 3, threads=threads, start=start,
        origins=(2, 3) * summed,
    )  # fmt: skip


def unequal(a: Result, b: Result) -> str:
    """The parts that differ."""
    parts = ("payload", "values", "residual")
    return ", ".join(part for part in parts if not same(getattr(a, part), getattr(b, part)))


def differing(
    codec: Codec, forms: Iterable[str], given: Iterable[torch.Tensor], threads: int = 1, **how: int
) -> list[str]:
    """The forms in which target c writes other bytes than the interpreter, of given values."""
    return [
        f"{codec!r}: {form} of {len(values)} x {values.dtype} with {threads} threads: {found}"
        for values in given
        for form in forms
        if (
            found := unequal(
                run(codec, form, values, "c", threads, **how),
                run(codec, form, values, "eager", **how),
            )
        )
    ]
