"""L2 norms of what methods lose of a gradient: one pass over it for all choices of a family.

    qsgd, dithered  the error of a value is uniform in half a step to either side, so a block of n
    and randomshift values has n step^2 / 12; the blocks' ranges give the steps of all bits
    topk            one selection of the largest density's values, sorted: what is left out, and
                    what rounding to the stored dtype takes from what is kept
    PowerSGD        the singular values beyond the rank: what warm starts converge to. Large
                    matrices: from five steps of subspace iteration
    cast            rounding
    other codecs    the codec itself encodes and decodes the gradient

All in float64. The error of a stochastic codec is the root of the expected square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from gradwire import lang
from gradwire.aggregators import Aggregator, Compressed, Dense, PowerSGD
from gradwire.codecs import QSGD, Cast, RandomShift, TopK
from gradwire.errors import ConfigError

_WHOLE = 2048  # the shorter side up to which all singular values are computed
_STEPS = 5  # of subspace iteration
_TOP = 0.01  # the share of values in `top_norm`


def losses(gradient: torch.Tensor, methods: Sequence[Aggregator]) -> np.ndarray:
    """The error of each method: float64[methods].

    Args:
        gradient: floating, in the parameter's shape, of any memory format and device.

    Raises:
        ConfigError: a method is neither dense, nor a codec, nor PowerSGD.
    """
    values = gradient.detach().float().cpu().contiguous()
    if not values.numel():
        return np.zeros(len(methods))
    if not values.isfinite().all():
        return np.full(len(methods), math.nan)
    codecs = [m.codec if isinstance(m, Compressed) else None for m in methods]
    sparse = [codec for codec in codecs if isinstance(codec, TopK)]
    ranks = [m.rank for m in methods if isinstance(m, PowerSGD) and m.shrinks(values.shape)]
    kept = dict(zip(sparse, _topk(values.view(-1), sparse), strict=True))
    low = _lowrank(values.view(len(values), -1), ranks) if ranks else {}
    grids: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    found = np.empty(len(methods))
    for i, (method, codec) in enumerate(zip(methods, codecs, strict=True)):
        if isinstance(codec, TopK):
            found[i] = kept[codec]
        elif (of := _lattice(codec)) is not None:
            top, block, metadata = of
            if (block, metadata) not in grids:
                grids[block, metadata] = _ranges(values.view(-1), block, metadata)
            found[i] = _dithered(grids[block, metadata], top, metadata)
        elif codec is not None:
            found[i] = _encoded(values.view(-1), codec)
        elif isinstance(method, PowerSGD):
            found[i] = low.get(method.rank, 0.0)
        elif isinstance(method, Dense):
            found[i] = 0.0 if method.dtype is None else _cast(values.view(-1), method.dtype)
        else:
            raise ConfigError(f"{method}: its error is unknown: use a codec, powersgd or dense")
    return found


def norms(gradient: torch.Tensor) -> tuple[float, float]:
    """(the L2 norm, that of the largest hundredth of the values)."""
    values = gradient.detach().float().cpu().reshape(-1)
    if not values.numel():
        return 0.0, 0.0
    top = values.abs().topk(max(1, int(_TOP * values.numel()))).values
    return float(values.double().norm()), float(top.double().norm())


def _lattice(codec: lang.Codec | None) -> tuple[int, int, str] | None:
    """(steps from the lowest to the highest value of a block, block, metadata) of a codec whose
    errors are uniform within half a step; None: they are not."""
    if isinstance(codec, QSGD) and (codec.scale, codec.rounding) == ("minmax", "dithered"):
        return codec.top, codec.block, codec.metadata
    if isinstance(codec, RandomShift):
        return 2**codec.bits - 1, codec.block, "fp32"
    return None


def _ranges(
    values: torch.Tensor, block: int, metadata: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(lowest, highest, number) of the values of each block; lows as the codec stores them."""
    whole = len(values) // block * block
    parts = [values[:whole].view(-1, block), values[whole:].view(1, -1)]
    parts = [part for part in parts if part.numel()]
    low = torch.cat([part.amin(1) for part in parts]).double()
    high = torch.cat([part.amax(1) for part in parts]).double()
    counts = torch.cat([torch.full((len(p),), p.shape[1], dtype=torch.float64) for p in parts])
    return _stored(low, metadata, up=False), high, counts


def _dithered(
    grid: tuple[torch.Tensor, torch.Tensor, torch.Tensor], top: int, metadata: str
) -> float:
    low, high, counts = grid
    step = 2 * _stored((high - low) / 2 / top, metadata, up=True)
    return math.sqrt(float((counts * step * step).sum()) / 12)


def _stored(values: torch.Tensor, metadata: str, up: bool) -> torch.Tensor:
    """Rounded outward, as the codec stores a grid's numbers."""
    if metadata == "fp32":
        return values.float().double()
    near = values.bfloat16()
    wrong = near.double() < values if up else near.double() > values
    toward = torch.full_like(near, math.inf if up else -math.inf)
    return torch.where(wrong, torch.nextafter(near, toward), near).double()


def _topk(values: torch.Tensor, codecs: Sequence[TopK]) -> list[float]:
    if not codecs:
        return []
    counts = [max(1, math.floor(codec.density * len(values))) for codec in codecs]
    size = values.abs()
    total = float(values.double().square().sum())
    largest = size.topk(max(counts), sorted=True).values
    kept = largest.double().square().cumsum(0)
    lost = {}
    for dtype in {codec.values for codec in codecs}:
        rounding = torch.zeros_like(kept)
        if dtype == "fp16":
            rounding = (largest - largest.clamp(max=65504.0).half().float()).double().square()
        lost[dtype] = rounding.cumsum(0)
    return [
        math.sqrt(max(0.0, total - float(kept[k - 1])) + float(lost[codec.values][k - 1]))
        for codec, k in zip(codecs, counts, strict=True)
    ]


def _lowrank(matrix: torch.Tensor, ranks: Sequence[int]) -> dict[int, float]:
    """By rank, the norm of what the best approximation of that rank leaves."""
    a = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    total = float(a.double().square().sum())
    if a.shape[1] <= _WHOLE:
        squares = torch.linalg.eigvalsh((a.T @ a).double() if len(a) > 65536 else _gram(a))
    else:
        squares = _subspace(a, max(ranks))
    kept = squares.clamp(min=0.0).flip(0).cumsum(0)
    return {r: math.sqrt(max(0.0, total - float(kept[min(r, len(kept)) - 1]))) for r in ranks}


def _gram(a: torch.Tensor) -> torch.Tensor:
    wide = a.double()
    product: torch.Tensor = wide.T @ wide
    return product


def _subspace(a: torch.Tensor, rank: int) -> torch.Tensor:
    """Squares of the largest singular values, ascending, by subspace iteration from a fixed seed;
    somewhat too small, so errors are somewhat too large."""
    generator = torch.Generator().manual_seed(0)
    width = min(a.shape[1], rank + max(8, rank // 4))
    q = torch.randn(a.shape[1], width, generator=generator, dtype=torch.float32)
    for _ in range(_STEPS):
        q = torch.linalg.qr(a.T @ (a @ q)).Q
    squares: torch.Tensor = torch.linalg.svdvals((a @ q).double()).square().flip(0)
    return squares


def _cast(values: torch.Tensor, dtype: torch.dtype) -> float:
    most = torch.finfo(dtype).max
    return float((values - values.clamp(-most, most).to(dtype).float()).double().norm())


def _encoded(values: torch.Tensor, codec: lang.Codec) -> float:
    if isinstance(codec, Cast):
        return _cast(values, torch.float16 if codec.dtype == "fp16" else torch.bfloat16)
    payload = lang.encode(codec, values)
    sent = lang.decode(codec, payload, len(values))
    return float((values - sent).double().norm())
