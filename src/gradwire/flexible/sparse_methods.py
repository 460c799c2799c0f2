"""Top-k of a density by one of three collectives, as a handle's plan has it; and what it costs.

all_gather    lwtopk: every rank's own positions
art_ring      artopk, whose all-reduces run by the algorithm "ring"
art_tree      artopk by "tree"

All select over the same values, so that a gain that is measured with one holds for the others: by
layer, or over the whole model. (Of a bucket artopk selects by bucket, and lwtopk by layer.)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from gradwire.aggregators import Aggregator, ARTopK, Dense, LWTopK, selection
from gradwire.errors import ConfigError
from gradwire.planner import Plan

ALGORITHMS = {"all_gather": None, "art_ring": "ring", "art_tree": "tree"}
_TIMED = 3


def base_of(plan: Plan) -> ARTopK | LWTopK:
    """The one method of a plan.

    Raises:
        ConfigError: there are several, or another one.
    """
    found = {p.inner for p in plan.parameters if not isinstance(p.inner, Dense)}
    (base,) = found if len(found) == 1 else (None,)
    if not isinstance(base, ARTopK | LWTopK):
        named = ", ".join(sorted(map(str, found))) or "nothing that is compressed"
        raise ConfigError(
            f"Flexible: the handle has {named}: attach with one codec, artopk or lwtopk"
        )
    return base


def method_of(base: ARTopK | LWTopK, density: float, collective: str) -> Aggregator:
    """Top-k of a density by a collective, with the other options of `base`."""
    if collective == "all_gather":
        return LWTopK(density, base.values, "model" if base.scope == "model" else "layer")
    if isinstance(base, ARTopK):
        return replace(base, density=density)
    return ARTopK(density, scope=base.scope, values=base.values)


def selected_from(base: ARTopK | LWTopK, numels: Sequence[int]) -> list[int]:
    """How many values each selection of a rank is over, of parameters of these sizes."""
    return [sum(numels)] if base.scope == "model" else list(numels)


def selection_seconds(numels: Iterable[int], density: float, device: torch.device) -> float:
    """Seconds that selecting from vectors of these lengths takes in all: a median for each."""
    generator = torch.Generator(device).manual_seed(0)
    seconds = 0.0
    for numel in numels:
        values = torch.randn(numel, dtype=torch.float32, device=device, generator=generator)
        times = []
        for _ in range(_TIMED):
            begun = time.perf_counter()
            selection.pack(values, density)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begun)
        seconds += statistics.median(times)
    return seconds
