"""Random tensors of every dtype, and checks of a collective's results on them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

import gradwire as gw
from gradwire.collectives import Item
from gradwire.engine import Communicator
from gradwire.lang import Codec, rng
from gradwire.partition import Spec

_calls: Counter[str] = Counter()

SIZES = [0, 1, 15, 17, 1000]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
EVERY_DTYPE = [*FLOATS, torch.float64, *WHOLE, torch.bool, *COMPLEX]
DTYPES = {
    "sum": [*FLOATS, torch.float64, *WHOLE],
    "avg": [*FLOATS, torch.float64],
    "min": [*FLOATS, torch.float64, *WHOLE, torch.bool],
    "max": [*FLOATS, torch.float64, *WHOLE, torch.bool],
}


def generator() -> torch.Generator:
    """A generator with a seed of its own for each test and call, the same in every run."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0].split("@")[0]
    seed = crc32(f"{test} {_calls[test]}".encode())
    _calls[test] += 1
    return torch.Generator().manual_seed(seed)


def values(numel: int, dtype: torch.dtype, made: torch.Generator) -> torch.Tensor:
    """Random values; integers cover the dtype's whole range."""
    if dtype in WHOLE:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        if dtype is torch.int64:
            return torch.randint(low, high, (numel,), generator=made)
        return torch.randint(low, high + 1, (numel,), generator=made).to(dtype)
    if dtype is torch.bool:
        return torch.randint(2, (numel,), generator=made).bool()
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(numel, dtype=wide, generator=made).to(dtype)


def check_reduced(op: str, given: Sequence[torch.Tensor], found: torch.Tensor, where: str) -> None:
    """Compare `found` with a float64 sum, an integer sum modulo the dtype's range, or torch's
    minimum or maximum; floats may err by one rounding per rank, relative to the sum of absolute
    values."""
    dtype, ranks = found.dtype, len(given)
    if op in ("min", "max"):
        reduce = torch.minimum if op == "min" else torch.maximum
        expected = given[0]
        for other in given[1:]:
            expected = reduce(expected, other)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=where)
        return
    if not dtype.is_floating_point:
        total = torch.stack(list(given)).sum(0, dtype=torch.int64).to(dtype)
        assert torch.equal(found, total), where
        return
    wide = torch.stack([x.double() for x in given])
    share = 1 / ranks if op == "avg" else 1
    error = (found.double() - wide.sum(0) * share).abs()
    allowed = (ranks + 1) * torch.finfo(dtype).eps / 2 * wide.abs().sum(0) * share
    assert bool((error <= allowed).all()), f"{where}: {float((error - allowed).max())} too far"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are equal bit for bit: equal NaNs count as equal, -0 and +0 do not."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    raw, raw_other = (x.contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(raw, raw_other)


def name_of(spec: Spec | torch.Tensor) -> str:
    numel = spec.numel if isinstance(spec, Spec) else spec.numel()
    return f"{numel} x {spec.dtype}"


def keys(spec: Spec, comm: Communicator) -> rng.Keys:
    return rng.parameter_keys(0, spec.name, comm.rank)


def items_of(
    comm: Communicator,
    specs: Sequence[Spec],
    tensors: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor | None] | None = None,
    step: int = 0,
) -> list[Item]:
    """A collective's, in place."""
    parts = zip(specs, tensors, residuals or [None] * len(specs), strict=True)
    return [Item(t, keys(spec, comm), step, residual) for spec, t, residual in parts]


def specs_of(tensors: Sequence[torch.Tensor], codecs: Sequence[Codec], **how: bool) -> list[Spec]:
    """One spec per tensor and codec."""
    return [
        Spec(f"p{i}", t.numel(), t.dtype, codec, rotation=i, **how)
        for i, (t, codec) in enumerate(zip(tensors, codecs, strict=True))
    ]


def call(
    verb: str, values: torch.Tensor, ranks: int, codec: Any, **how: Any
) -> tuple[torch.Tensor, Any]:
    """A public function on 1-D values: its result, and a future of it if that was asked for. The
    last rank broadcasts."""
    result = values
    if verb == "all_reduce":
        return result, gw.all_reduce(values, codec, **how)
    if verb == "broadcast":
        return result, gw.broadcast(values, ranks - 1, codec, **how)
    if verb == "all_gather":
        result = values.new_empty(ranks * values.numel())
        return result, gw.all_gather(result, values, codec, **how)
    result = values.new_empty(values.numel() // ranks)
    return result, gw.reduce_scatter(result, values, codec, **how)


def check_group(comm: Communicator) -> None:
    """Check that the group works."""
    x = torch.full((3,), comm.rank + 1)
    gw.all_reduce(x, None, group=comm)
    assert x.tolist() == [sum(range(1, comm.world_size + 1))] * 3
