"""What holds of every policy, what each decides on hand-made tables, and what they refuse."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from controllers.random_tables import KINDS, random_layers
from gradwire.aggregators import THC, Dense, PowerSGD
from gradwire.codecs import QSGD
from gradwire.controllers import (
    Accordion,
    AccordionLGreco,
    Bayes,
    Bits,
    Budget,
    Density,
    KMeans,
    Layer,
    LGreco,
    Linear,
    Mixture,
    Policy,
    Rank,
    Uniform,
    critical,
    losses,
    registry,
    segments,
    tables,
    time_weights,
)
from gradwire.controllers.error import METRICS
from gradwire.controllers.flexible import Candidate, search
from gradwire.controllers.kmeans import clustered
from gradwire.controllers.layer import plan_cost, plan_error
from gradwire.controllers.targets import Target
from gradwire.errors import ConfigError

POLICIES = [Uniform(), Linear(), KMeans(), LGreco(), LGreco(bins=50)]


def layer(
    name: str, nbytes: Sequence[int], errors: Sequence[float], reference: int = 0, **more: float
) -> Layer:
    methods = tuple(PowerSGD(rank=1 + i) for i in range(len(nbytes)))
    given = {"norm": 1.0, "top_norm": 1.0, **more}
    numel = int(given.pop("numel", 100))
    return Layer(name, numel, methods, np.array(nbytes), np.array(errors), reference, **given)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_budget_uniform_and_determinism(policy: Policy) -> None:
    cases = list(product(KINDS, METRICS, (0.9, 1.0, 2.0)))
    for seed, (kind, metric, alpha) in enumerate(cases * 2):
        layers = random_layers(400 + seed, 1 + 3 * (seed % 13), 2 + seed % 12, kind)
        budget = Budget.of(layers, alpha, metric)
        found = policy.propose(layers, budget)
        uniform = [one.reference for one in layers]
        assert found.choices == policy.propose(layers, budget).choices
        assert found.error == plan_error(layers, found.choices, metric)
        assert "\n" not in found.line
        if policy.bounded and not found.fallback:
            assert found.error <= budget.error
        if alpha >= 1:
            assert plan_cost(layers, found.choices) <= plan_cost(layers, uniform)
            assert found.error <= budget.error


@pytest.mark.parametrize("policy", POLICIES[1:], ids=repr)
def test_bad_tables_and_budgets_give_the_uniform_plan(policy: Policy) -> None:
    layers = [layer("a", [1, 2, 3], [3, 2, 1], 1), layer("b", [1, 2, 3], [3, 2, 1], 1)]
    for broken, said in (
        ({"errors": np.array([math.nan, 1.0, 0.5])}, "not finite"),
        ({"errors": np.array([math.inf, 1.0, 0.5])}, "not finite"),
        ({"errors": np.array([-1.0, 1.0, 0.5])}, "negative"),
        ({"nbytes": np.array([-1, 1, 1])}, "negative"),
    ):
        found = policy.propose([replace(layers[0], **broken), layers[1]], Budget(4.0))
        assert found.choices == (1, 1)
        assert said in found.fallback
        assert said in found.line
        assert "layer a" in found.line
        assert "\n" not in found.line
    for budget in (1.9, -1.0, math.nan, math.inf):
        found = policy.propose(layers, Budget(budget))
        assert found.choices == (1, 1)
        assert found.fallback in found.line
        assert "budget" in found.fallback or "the least error is 2" in found.fallback
    # All choices of a layer without a gradient look free; that of the next steps is not known.
    layers[0] = replace(layers[0], errors=np.zeros(3))
    found = policy.propose(layers, Budget(3.0))
    assert found.choices == (1, 0)
    assert "1 without a gradient" in found.line


def test_rows_of_one_layer_have_their_own_methods() -> None:
    one = layer("a", [1, 2], [2, 1])
    rows = [replace(one, rows=(0, 2)), replace(one, rows=(2, 4))]
    assert list(LGreco().propose(rows, Budget(4.0)).methods) == ["a[0:2]", "a[2:4]"]


def test_weights_of_bytes_decide() -> None:
    """Of two equal layers the one whose bytes cost more gets fewer."""
    for first in (0.1, 10.0):
        layers = [
            layer("a", [100, 10], [0, 1], weight=first),
            layer("b", [100, 10], [0, 1], weight=1.0),
        ]
        found = LGreco().propose(layers, Budget(1.0))
        assert found.choices == ((1, 0) if first > 1 else (0, 1))


def test_linear_gives_more_to_layers_of_more_norm_per_value() -> None:
    layers = [
        layer(str(i), [1, 2, 3, 4, 5], [5, 4, 3, 2, 1], 2, norm=norm, numel=100)
        for i, norm in enumerate([3.0, 1.0, 5.0, 4.0, 2.0])
    ]
    found = Linear().propose(layers, Budget.of(layers))
    order = np.argsort([one.norm for one in layers])
    assert (np.diff(np.array(found.choices)[order]) >= 0).all()


def test_kmeans_gives_large_insensitive_layers_less() -> None:
    small = [layer(f"s{i}", [10, 20, 40], [4.0, 2.0, 1.0], 1, numel=10) for i in range(3)]
    large = [
        layer(f"l{i}", [1000, 2000, 4000], [0.4, 0.2, 0.1], 1, top_norm=0.1, numel=1000)
        for i in range(3)
    ]
    layers = [*small, *large]
    found = KMeans().propose(layers, Budget.of(layers))
    assert max(found.choices[3:]) < min(found.choices[:3])


def test_clusters_are_those_of_far_groups() -> None:
    points = np.concatenate([np.zeros((5, 2)), np.ones((4, 2)), np.full((3, 2), 9.0)])
    centroids, members = clustered(points, 3, 0)
    assert sorted(np.bincount(members)) == [3, 4, 5]
    assert sorted(centroids[:, 0]) == [0, 1, 9]
    _, members = clustered(np.zeros((4, 2)), 3, 0)  # fewer distinct points than clusters
    assert len(members) == 4


def test_bayes_keeps_to_the_budget_and_repeats() -> None:
    pytest.importorskip("optuna")
    layers = random_layers(1, 6, 5, "monotone")
    budget = Budget.of(layers)
    found = Bayes(trials=40).propose(layers, budget)
    assert found.error <= budget.error
    assert found.nbytes <= found.reference_nbytes
    assert Bayes(trials=40).propose(layers, budget).choices == found.choices


def test_critical_regimes() -> None:
    before = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 0.0, "f": 1.0}
    now = {"a": 1.49, "b": 1.5, "c": 0.5, "d": 0.51, "e": 0.0, "f": math.nan, "new": 1.0}
    assert critical(before, now, eta=0.5) == {"b", "c", "e", "f", "new"}
    assert critical(before, now, eta=0.5, decayed=True) == set(now)
    assert critical({}, now) == set(now)


def test_accordion_alternates_and_its_lgreco_keeps_to_its_error() -> None:
    low, high = PowerSGD(rank=4), PowerSGD(rank=2)
    table = [4, 8, 12, 16, 20, 24], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    layers = [layer(str(i), *table, 3, norm=1.0 + i) for i in range(4)]
    fixed = Layer("bias", 4, (Dense(),), np.array([8]), np.array([0.0]), 0, 1.0, 1.0)
    layers.append(fixed)
    first = Accordion(low, high)
    unused = Budget(0.0)
    assert first.propose(layers, unused).choices == (3, 3, 3, 3, 0)
    second = first.after(layers)
    later = [replace(one, norm=one.norm * (3.0 if i == 2 else 1.1)) for i, one in enumerate(layers)]
    found = second.propose(later, unused)
    assert found.choices == (1, 1, 3, 1, 0)
    assert second.after(later, decayed=True).propose(later, unused).choices == (3, 3, 3, 3, 0)
    both = AccordionLGreco(first).after(layers).propose(later, unused)
    assert both.error <= found.error
    assert both.nbytes <= found.nbytes
    still = [replace(later[0], errors=np.zeros(6)), *later[1:]]
    assert AccordionLGreco(second).propose(still, unused).choices[0] == 3


def test_policies_by_name() -> None:
    assert registry.get("lgreco:bins=500") == LGreco(bins=500)
    assert registry.get("uniform") == Uniform()
    budget = "qsgd:bits=4:block=64"
    assert registry.get(f"lgreco:bins=5:budget={budget}") == LGreco(bins=5, budget=budget)
    assert registry.get(f"accordion-lgreco:budget={budget}") == AccordionLGreco(budget=budget)
    assert registry.family("qsgd:bits=3:block=64") == Bits(bits=3, block=64)
    assert registry.family("topk") == Density(0.01)
    assert registry.family("topk:per_decade=10") == Density(0.01, per_decade=10)
    assert registry.family("powersgd:rank=2") == Rank(2)
    assert registry.get("accordion:eta=0.2:share=0.25") == Accordion(eta=0.2, share=0.25)
    assert registry.get("accordion-lgreco") == AccordionLGreco()


def test_accordion_has_levels_around_the_reference_and_a_memory_that_json_keeps() -> None:
    sizes, errors = [4, 8, 12, 16, 20, 24], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    layers = [layer(str(i), sizes, errors, 3, norm=1.0 + i) for i in range(3)]
    unused = Budget(0.0)
    for first in (Accordion(), AccordionLGreco()):
        assert first.propose(layers, unused).error <= 9.0
        kept = json.loads(json.dumps(first.after(layers).memory()))
        again = type(first)().remembering(kept)
        assert again == first.after(layers)
        assert again.propose(layers, unused).nbytes <= 3 * 8
    assert Accordion().propose(layers, unused).choices == (3, 3, 3)
    assert Accordion(share=0.25).after(layers).propose(layers, unused).choices == (0, 0, 0)


def test_a_policy_cannot_write_to_the_tables() -> None:
    class Writes(LGreco):
        def choose(self, layers: Sequence[Layer], budget: Budget) -> Sequence[int]:
            for one in layers:
                one.errors[:] = 0.0
            return [0] * len(layers)

    for errors in ([2.0, 1.0], [0.0, 0.0]):
        one = layer("a", [1, 2], errors)
        with pytest.raises(ValueError, match="read-only"):
            Writes().propose([one], Budget(4.0))
        assert list(one.errors) == errors
        one.errors[0] = 3.0  # those of the caller stay as they are


def test_a_larger_plan_has_more_bytes_than_uniform() -> None:
    class Most(Uniform):
        def choose(self, layers: Sequence[Layer], budget: Budget) -> Sequence[int]:
            return [len(one.methods) - 1 for one in layers]

    found = Most().propose([layer("a", [100, 194], [2, 1])], Budget(4.0))
    assert "194 bytes per step, 1.940 times more than uniform" in found.line


class Gives(Uniform):
    """Chooses what it is told to."""

    now: Any = None

    def choose(self, layers: Any, budget: Budget) -> Any:
        return Gives.now


def chosen(now: Any) -> tuple[int, ...]:
    Gives.now = now
    return Gives().propose(PAIR, Budget(4.0)).choices


PAIR = [layer(name, [1, 2], [2, 1]) for name in "ab"]
MADE = tables([("a", torch.ones(8, 8))], Rank(1))
KNOWN = [Candidate(0.1, 0.1, 1.0), Candidate(0.01, 0.1, 1.0)]
GIVES = "^policy uniform: choose gave"

REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("unknown policy 'x': use one of uniform, linear", lambda: registry.get("x")),
    ("'kmeans' has no option 'k': use one of clusters", lambda: registry.get("kmeans:k=3")),
    ("it takes none", lambda: registry.get("linear:k=3")),
    *(
        ("give a whole number", partial(registry.get, name))
        for name in ("bayes:trials=0", "bayes:seed=-1", "kmeans:clusters=0", "kmeans:seed=x")
    ),
    ("'accordion' has no option 'low': use one of eta,", lambda: registry.get("accordion:low=3")),
    ("share=2", lambda: registry.get("accordion-lgreco:share=2")),
    ("eta=0", lambda: Accordion(Dense(), Dense(), eta=0)),
    ("Accordion: low=.*: give an Aggregator", lambda: Accordion(low="qsgd:bits=8")),  # type: ignore[arg-type]
    ("Accordion: high=.*: give an Aggregator", lambda: Accordion(high=5)),  # type: ignore[arg-type]
    ("Accordion: low=.*: give an Aggregator", lambda: Accordion(low=QSGD(bits=8))),  # type: ignore[arg-type]
    *(("LGreco: ", partial(LGreco, bins=bins)) for bins in (0, 1.5)),
    *(("LGreco: ", partial(LGreco, gap=gap)) for gap in (-1, math.nan)),
    ("at least one layer", lambda: LGreco().propose([], Budget(1.0))),
    ("two layers are a", lambda: LGreco().propose(PAIR[:1] * 2, Budget(1.0))),
    # Choices that are none: -1 is not taken for the last one, nor 0.7 for the first.
    (f"{GIVES} 1 choices for 2 layers", lambda: chosen([0])),
    (f"{GIVES} 3 choices for 2 layers", lambda: chosen([0, 1, 1])),
    (f"{GIVES} layer b the choice 2: give 0 to 1", lambda: chosen([0, 2])),
    (f"{GIVES} layer a the choice -1: give 0 to 1", lambda: chosen([-1, 0])),
    (rf"{GIVES} \[0.7, 0\]: give the index of a method per layer", lambda: chosen([0.7, 0])),
    (f"{GIVES} 'ab'", lambda: chosen("ab")),
    (f"{GIVES} 3: give the index", lambda: chosen(3)),
    # families and tables
    ("Bits: choices", lambda: Bits(bits=9)),
    ("choices from 5", lambda: Bits(bits=4, least=5)),
    ("bits", lambda: Bits(most=9)),
    ("density", lambda: Density(0)),
    ("Density: choices", lambda: Density(0.1, most=0.05)),
    ("step=0", lambda: Density(step=0)),
    ("per_decade=0", lambda: Density(per_decade=0)),
    ("exclude each other", lambda: Density(per_decade=2, step=0.1)),
    ("rank", lambda: Rank(0)),
    ("Rank: choices from 0", lambda: Rank(4, least=0)),
    ("families", lambda: Mixture(())),
    ("metric='l1': use one of l2, squared", lambda: Budget(1.0, "l1")),
    ("alpha=0", lambda: Budget.of(MADE, 0)),
    ("its error is unknown", lambda: losses.losses(torch.ones(8, 9), [THC()])),
    ("give 1 or more", lambda: segments((2, 2), 0)),
    # weights of bytes
    ("a span per sample", lambda: time_weights(np.ones((5, 2)), [1.0] * 4)),
    ("a span per sample", lambda: time_weights(np.ones(5), [1.0] * 5)),
    ("not finite", lambda: time_weights(np.full((5, 2), np.nan), [1.0] * 5)),
    ("do not tell 2 buckets apart", lambda: time_weights(np.ones((5, 2)), [1.0] * 5)),
    ("do not tell", lambda: time_weights(np.eye(2), [1.0] * 2)),
    # Flexible, and packages that are missing
    *(
        (said, partial(search, given, 8, 1e8, 1e-3, 8e-9))
        for said, given in (
            ("two candidate densities", KNOWN[:1]),
            ("must be above 0", [*KNOWN, Candidate(0.05, 0.1, 0.0)]),
            (r'pip install "gradwire\[adapt\]"', KNOWN),
        )
    ),
    (r"gradwire\[adapt\]", lambda: Bayes().propose(MADE, Budget(1e9))),
]


def test_each_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pymoo.optimize", "optuna"):
        monkeypatch.setitem(sys.modules, package, None)
    for said, call in REFUSED:
        with pytest.raises(ConfigError, match=said):
            call()
    for given in (np.array([1, 0]), (True, False)):
        assert chosen(given) == (1, 0)


def test_a_state_without_a_rank_is_of_the_former_default() -> None:
    target = Target("gradients", {"a": (64, 64)}, PowerSGD(4), Rank(4))
    for text, rank in (("powersgd", 2), ("powersgd:rank=2", 2), ("powersgd:rank=8", 8)):
        assert target.named({"a": text}) == {"a": PowerSGD(rank)}
