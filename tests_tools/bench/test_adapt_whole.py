"""Sparse methods with one option for the whole model: they send what their codecs send, and the
least within the budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire import lang
from gradwire.codecs import AdaComp, TopK
from gradwire.controllers import Budget, Density, Layer
from gradwire.controllers.error import METRICS
from gradwire.controllers.layer import plan_error
from gradwire_tools.bench.adapt.recording import Named
from gradwire_tools.bench.paper import adapt_whole
from gradwire_tools.bench.paper.adapt_tables import recorded_layers
from gradwire_tools.bench.paper.adapt_whole import ADACOMP, GLOBAL_TOPK, NAMES, THRESHOLD, Whole

BINS = (16, 64)  # each is a codec to compile


@pytest.fixture(scope="module")
def named() -> Named:
    draw = torch.Generator().manual_seed(0)
    scales = {"large": ((90, 40), 1.0), "small": ((30, 20), 0.01), "odd": ((7, 3, 5), 0.1)}
    found = [
        (name, scale * torch.randn(shape, generator=draw).pow(3))
        for name, (shape, scale) in scales.items()
    ]
    return [*found, ("bias", torch.randn(50, generator=draw))]


@pytest.fixture(scope="module")
def layers(named: Named) -> list[Layer]:
    return recorded_layers(named, Density(0.05))


def uniform_bytes(layers: list[Layer]) -> int:
    return sum(int(one.nbytes[one.reference]) for one in layers)


@pytest.mark.parametrize("metric", METRICS)
def test_a_global_topk_sends_the_largest_values(
    named: Named, layers: list[Layer], metric: str
) -> None:
    """The codec, on all matrices as one tensor, errs as much; with one value less, it errs more."""
    budget = Budget.of(layers, 1.0, metric)
    found = Whole(named, layers).outcome(GLOBAL_TOPK, budget)
    matrices = [gradient.reshape(-1) for _, gradient in named[:3]]
    values = torch.cat(matrices)

    def errors(count: int) -> np.ndarray:
        codec = TopK(density=(count + 0.5) / len(values))
        payload = lang.encode(codec, values, target="eager")
        sent = lang.decode(codec, payload, len(values), target="eager")
        lost = (values - sent).split([len(part) for part in matrices])
        return np.array([float(part.double().norm()) for part in lost])

    def error(count: int) -> float:
        each = errors(count) if metric == "l2" else errors(count) ** 2
        return float(each.sum()) + layers[3].errors[0] ** (1 if metric == "l2" else 2)

    least = int((found.nbytes - layers[3].nbytes[0]) / 4)
    count = next(k for k in range(least, len(values)) if error(k) <= budget.error * (1 + 1e-9))
    assert count > least
    assert found.errors[:3] == pytest.approx(errors(count), rel=1e-5)
    assert found.errors[3] == layers[3].errors[0]
    assert found.nbytes - layers[3].nbytes[0] == pytest.approx(count * (2 + 1.5), rel=0.15)
    assert found.nbytes < uniform_bytes(layers)
    assert not found.fallback


def test_a_threshold_chooses_the_same_values(named: Named, layers: list[Layer]) -> None:
    for metric in METRICS:
        whole, budget = Whole(named, layers), Budget.of(layers, 0.8, metric)
        one, other = (whole.outcome(name, budget) for name in (GLOBAL_TOPK, THRESHOLD))
        assert (one.errors == other.errors).all()
        assert one.nbytes == pytest.approx(other.nbytes, rel=0.2)


def test_adacomp_takes_the_bin_that_sends_least(
    named: Named, layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapt_whole, "BINS", BINS)
    whole = Whole(named, layers)

    def sent(size: int) -> tuple[float, int]:
        error, nbytes = float(layers[3].errors[0]), int(layers[3].nbytes[0])
        for _, gradient in named[:3]:
            values, codec = gradient.reshape(-1), AdaComp(block=size, density=1.0)
            back = lang.decode(codec, lang.encode(codec, values), len(values))
            error += float((values - back).double().norm())
            nbytes += int(2.5 * int(back.count_nonzero()))
        return error, nbytes

    by_bin = {size: sent(size) for size in BINS}
    within = [nbytes for error, nbytes in by_bin.values() if error <= by_bin[64][0]]
    found = whole.outcome(ADACOMP, Budget(by_bin[64][0] * (1 + 1e-9)))
    assert float(found.errors.sum()) <= by_bin[64][0] * (1 + 1e-9)
    assert found.nbytes <= 1.5 * min(within)
    assert not found.fallback


def test_a_budget_that_cannot_be_kept_leaves_the_uniform_plan(
    named: Named, layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapt_whole, "BINS", BINS)
    reference = [one.reference for one in layers]
    for name in NAMES:
        found = Whole(named, layers).outcome(name, Budget(0.0))
        assert found.fallback == f"{name} never keeps to the budget"
        assert found.nbytes == uniform_bytes(layers)
        assert float(found.errors.sum()) == pytest.approx(plan_error(layers, reference, "l2"))
