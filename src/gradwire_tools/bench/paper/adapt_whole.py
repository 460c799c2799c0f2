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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from gradwire import lang
from gradwire.codecs import AdaComp, HardThreshold, TopK
from gradwire.controllers import Budget, Layer
from gradwire.controllers.error import terms, total
from gradwire.lang.layout import layout
from gradwire_tools.bench.adapt.record import Named

GLOBAL_TOPK, THRESHOLD, ADACOMP = "global-topk", "threshold", "adacomp"
NAMES = (GLOBAL_TOPK, THRESHOLD, ADACOMP)
BINS = tuple(2**i for i in range(4, 16))

_STEPS = 2**40  # of the range of the threshold's logarithm: fp32's resolution
_HALF_MOST = 65504.0

Sent = tuple[int, np.ndarray]  # bytes of payloads, without headers; L2 norms of all layers' errors


@dataclass(frozen=True, eq=False)
class Allocation:
    """What a method sends and loses, per rank and step.

    Attributes:
        nbytes: of its payloads, without headers.
        errors: float64[layers], L2 norms.
        seconds: that the search took, given what it decides on.
        fallback: why the uniform plan stands in its place; else empty.
        bits_by_layer: payload bits per value, of the layers that have a choice; None if there is no
            plan.
    """

    nbytes: int
    errors: np.ndarray
    seconds: float
    fallback: str = ""
    bits_by_layer: dict[str, float] | None = None


class Whole:
    """The matrices of one averaged gradient, ready for every budget.

    Args:
        named: all parameters, with finite values.
        layers: their tables, of a topk family.
    """

    def __init__(self, named: Named, layers: Sequence[Layer]) -> None:
        self._matrices = [i for i, (_, gradient) in enumerate(named) if gradient.dim() > 1]
        self._values = [named[i][1].reshape(-1) for i in self._matrices]
        self._sorted = [_sorted(values) for values in self._values]
        self._errors = np.array([one.errors[one.reference] for one in layers])
        nbytes = [int(one.nbytes[one.reference]) for one in layers]
        self._uniform = sum(nbytes)
        self._flat = self._uniform - sum(nbytes[i] for i in self._matrices)

    def outcome(self, name: str, budget: Budget) -> Allocation:
        """What one of `NAMES` sends within a budget."""
        begun = time.perf_counter()
        found = self._adacomp(budget) if name == ADACOMP else self._largest(name, budget)
        seconds = time.perf_counter() - begun
        if found is None:
            never = f"{name} never keeps to the budget"
            return Allocation(self._uniform, self._errors, seconds, never)
        return Allocation(*found, seconds)

    def _adacomp(self, budget: Budget) -> Sent | None:
        within = [one for one in self._by_bin if _error(one[1], budget) <= budget.error]
        return min(within, key=lambda one: one[0], default=None)

    @cached_property
    def _by_bin(self) -> list[Sent]:
        found = []
        for size in BINS:
            codec = AdaComp(block=size, density=1.0)
            errors, sent = self._errors.copy(), self._flat
            for i, values in zip(self._matrices, self._values, strict=True):
                back = lang.decode(codec, lang.encode(codec, values), len(values))
                errors[i] = float((values - back).double().norm())
                sent += _used(codec, len(values), int(back.count_nonzero()))
            found.append((sent, errors))
        return found

    def _largest(self, name: str, budget: Budget) -> Sent | None:
        """With the largest threshold that keeps to the budget, by halving the range of its
        logarithm."""
        top = max((float(v.abs().max()) for v in self._values if len(v)), default=0.0)
        low, high = math.log(1e-37), math.log(max(2 * top, 2e-37))

        def at(step: int) -> float:
            return math.exp(low + (high - low) * step / _STEPS)

        def exceeds(step: int) -> bool:
            return _error(self._kept(at(step))[1], budget) > budget.error

        kept = bisect_left(range(_STEPS), True, key=exceeds)
        if not kept:
            return None
        threshold = at(kept - 1)
        counts, errors = self._kept(threshold)
        numels = [len(values) for values in self._values]
        if name == GLOBAL_TOPK:
            n, k = sum(numels), sum(counts)
            return self._flat + _used(TopK(density=_room(k, n)), n, k), errors
        sent = self._flat
        for n, k in zip(numels, counts, strict=True):
            sent += _used(HardThreshold(threshold=threshold, density=_room(k, n)), n, k)
        return sent, errors

    def _kept(self, threshold: float) -> tuple[list[int], np.ndarray]:
        """(values sent of each matrix, errors of all layers)."""
        errors, counts = self._errors.copy(), []
        for i, (negative, left) in zip(self._matrices, self._sorted, strict=True):
            count = int(torch.searchsorted(negative, -threshold, right=True))
            counts.append(count)
            errors[i] = math.sqrt(float(left[count]))
        return counts, errors


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
