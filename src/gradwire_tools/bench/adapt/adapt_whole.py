"""Sparse methods with one option for the whole model, as `bench adapt` compares them with policies.

They adapt to layers without a plan, since the values themselves decide how many a layer sends:

    global-topk  the largest values of all matrices as one tensor ("topk:scope=model")
    threshold    the values that reach an absolute threshold ("hardthreshold"; Rethink-GS)
    adacomp      the values near the maximum of their bin, with one bin size ("adacomp"), in a first
                 step, without residuals

Each gets the option with which it sends the least within the budget: a threshold, or a bin size
of `BINS`; and a payload with room for what is sent. On one gradient, a global k and a threshold
choose the same values, and differ only in the bytes for positions, whose blocks follow from the
density of the tensor; over steps they differ. All need the gradients' values, so seeded tables have
no rows of them. Parameters of fewer than two dimensions go as bf16, as in every plan.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire import lang
from gradwire.codecs import AdaComp, HardThreshold, TopK
from gradwire.controllers import Budget, Layer
from gradwire.controllers.error import terms, total
from gradwire.lang.layout import layout
from gradwire_tools.bench.adapt.adapt_tables import Named

GLOBAL_TOPK, THRESHOLD, ADACOMP = "global-topk", "threshold", "adacomp"
NAMES = (GLOBAL_TOPK, THRESHOLD, ADACOMP)
BINS = tuple(2**i for i in range(4, 16))

_STEPS = 2**40  # of the range of the threshold's logarithm: fp32's resolution
_HALF_MOST = 65504.0


@dataclass(frozen=True, eq=False)
class Unplanned:
    """What a method sends and loses.

    Attributes:
        nbytes: of its payloads, per rank and step, without headers.
        errors: float64[layers], L2 norms.
        seconds: that the search for its option took, given the layers' values in order.
        fallback: why the uniform plan stands in its place; else empty.
    """

    nbytes: int
    errors: np.ndarray
    seconds: float
    fallback: str = ""


class Whole:
    """The matrices of one averaged gradient, ready for every budget.

    Args:
        named: all parameters, with finite values.
        layers: their tables, of a topk family.
    """

    def __init__(self, named: Named, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._matrices = [i for i, (_, gradient) in enumerate(named) if gradient.dim() > 1]
        self._values = {i: named[i][1].reshape(-1) for i in self._matrices}
        self._sorted = {i: _sorted(values) for i, values in self._values.items()}
        self._uniform = np.array([one.errors[one.reference] for one in layers])
        self._adacomp: list[tuple[int, np.ndarray]] | None = None

    def outcome(self, name: str, budget: Budget) -> Unplanned:
        """What one of `NAMES` sends within a budget."""
        begun = time.perf_counter()
        found = self._find(name, budget)
        seconds = time.perf_counter() - begun
        if found is not None:
            return Unplanned(*found, seconds)
        uniform = sum(int(one.nbytes[one.reference]) for one in self._layers)
        return Unplanned(uniform, self._uniform, seconds, f"{name} never keeps to the budget")

    def _find(self, name: str, budget: Budget) -> tuple[int, np.ndarray] | None:
        if name == ADACOMP:
            if self._adacomp is None:
                self._adacomp = [self._encoded(AdaComp(block=size, density=1.0)) for size in BINS]
            within = [one for one in self._adacomp if _error(one[1], budget) <= budget.error]
            return min(within, key=lambda one: one[0], default=None)
        threshold = self._largest(lambda t: _error(self._kept(t)[1], budget) <= budget.error)
        if threshold is None:
            return None
        counts, errors = self._kept(threshold)
        numels = [self._layers[i].numel for i in self._matrices]
        if name == THRESHOLD:
            sent = 0
            for n, k in zip(numels, counts, strict=True):
                sent += _used(HardThreshold(threshold=threshold, density=_room(k, n)), n, k)
        else:
            n, k = sum(numels), sum(counts)
            sent = _used(TopK(density=_room(k, n)), n, k)
        return sent + self._flat_nbytes(), errors

    def _largest(self, keeps: Callable[[float], bool]) -> float | None:
        """The largest threshold that keeps to the budget, by halving the range of its logarithm."""
        top = max((float(v.abs().max()) for v in self._values.values() if len(v)), default=0.0)
        low, high = math.log(1e-37), math.log(max(2 * top, 2e-37))

        def at(step: int) -> float:
            return math.exp(low + (high - low) * step / _STEPS)

        kept = bisect_left(range(_STEPS), True, key=lambda step: not keeps(at(step)))
        return at(kept - 1) if kept else None

    def _kept(self, threshold: float) -> tuple[list[int], np.ndarray]:
        """(values sent of each matrix, errors of all layers)."""
        errors, counts = self._uniform.copy(), []
        for i in self._matrices:
            negative, left = self._sorted[i]
            count = int(torch.searchsorted(negative, -threshold, right=True))
            counts.append(count)
            errors[i] = math.sqrt(float(left[count]))
        return counts, errors

    def _encoded(self, codec: AdaComp) -> tuple[int, np.ndarray]:
        errors, sent = self._uniform.copy(), self._flat_nbytes()
        for i, values in self._values.items():
            back = lang.decode(codec, lang.encode(codec, values), len(values))
            errors[i] = float((values - back).double().norm())
            sent += _used(codec, len(values), int(back.count_nonzero()))
        return sent, errors

    def _flat_nbytes(self) -> int:
        flat = set(range(len(self._layers))) - set(self._matrices)
        return sum(int(self._layers[i].nbytes[0]) for i in flat)


def _sorted(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32[n], magnitudes times -1, ascending; float64[n + 1], squared L2 norms of what is lost if
    the first k are sent, with the rounding of sent values to fp16)."""
    size = values.abs().sort(descending=True).values
    rounded = (size - size.clamp(max=_HALF_MOST).half().float()).double().square()
    # From the smallest up, so that what is left never suffers from cancellation.
    tail = size.double().square().flip(0).cumsum(0).flip(0)
    zero = torch.zeros(1, dtype=torch.float64)
    return -size, torch.cat([tail, zero]) + torch.cat([zero, rounded.cumsum(0)])


def _error(errors: np.ndarray, budget: Budget) -> float:
    return total(terms(errors, budget.metric))


def _room(entries: int, numel: int) -> float:
    """A density with room for so many entries: a power of two, at most 1."""
    return float(min(1.0, 2.0 ** math.ceil(math.log2(max(1, entries) / numel))))


def _used(codec: lang.Codec, numel: int, entries: int) -> int:
    """Bytes of a payload with so many entries."""
    made = layout(codec)
    return int(made.used_nbytes(made.offsets(numel)[-1], entries))
