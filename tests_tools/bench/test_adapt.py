"""`bench adapt`: its rows, and the bars that adaptive plans reach on seeded tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.controllers import Bits, Budget, Density, Layer, Rank
from gradwire.controllers.error import METRICS
from gradwire.controllers.losses import losses
from gradwire.errors import ConfigError
from gradwire_tools.bench.paper import adapt, adapt_whole
from gradwire_tools.bench.paper.adapt_tables import seeded_layers
from gradwire_tools.report import page
from products import EXHAUSTIVE

Row = dict[str, Any]

NAMED = [
    "policy", "family", "task", "ratio", "uniform_ratio", "error", "budget", "error_metric",
    "solve_seconds",
]  # fmt: skip
FAST = ("uniform", "linear", "kmeans", "lgreco", "accordion", "accordion-lgreco")


def test_rows_of_a_recording(
    recorded: tuple[Path, list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapt_whole, "BINS", (16, 64))
    config = adapt.Config(policies=(*FAST, *adapt_whole.NAMES), models=())
    rows = list(adapt.run([recorded[0]], config))
    assert {row["family"] for row in rows} == {"bits", "topk", "rank", "mixed"}
    plans = [row for row in rows if row["policy"] in FAST]
    assert {row["policy"] for row in plans if row["at"] == 0} == set(FAST[:4])
    assert {row["policy"] for row in plans if row["at"] == 3} == set(FAST)
    for row in rows:
        assert row.keys() >= set(NAMED)
        assert row["task"] == "gpt"
        assert row["of_uniform"] == row["ratio"] / row["uniform_ratio"]
        assert row["error"] == row[f"error_{row['error_metric']}"]
        assert row["global_error"] ** 2 == pytest.approx(row["error_squared"])
        if row["policy"] == "uniform" and row["reference"] == "qsgd:bits=4":
            assert set(row["bits_by_layer"].values()) == {4.25}  # vectors have no choice
        if row["budget"] is not None:
            assert row["error"] <= row["budget"]
            assert row["of_uniform"] >= 1 or row not in plans
    assert page.render(plans).count("How many bits does each layer get?") >= 2  # by both metrics
    by = {(r["at"], r["family"], r["reference"], r["error_metric"], r["policy"]): r for r in rows}
    for key, row in by.items():
        if key[-1] == "accordion":
            both = by[(*key[:-1], "accordion-lgreco")]
            assert both["error"] <= row["error"]
            assert both["ratio"] >= row["ratio"]
    # Methods without a plan stand beside those of the family topk.
    others = [row for row in rows if row not in plans]
    assert {(row["policy"], row["error_metric"], row["at"]) for row in others} == {
        (name, metric, at) for name in adapt_whole.NAMES for metric in METRICS for at in (0, 3)
    }
    for row in others:
        assert row.keys() == plans[0].keys()
        assert (row["family"], row["bits_by_layer"]) == ("topk", None)


@EXHAUSTIVE
@pytest.mark.parametrize("model", adapt.MODELS)
def test_bars_on_seeded_tables(model: str) -> None:
    """At sigma 2 and equal error: 1.2 for bits, 2.5 for topk, 1.5 for rank; never more than 1 %
    below a heuristic; mixed at least as good as each family."""
    config = adapt.Config(policies=FAST, models=(model,), sigmas=(2.0,), metrics=("l2",))
    rows = list(adapt.run(config=config))
    of = {(r["family"], r["reference"], r["policy"]): r["of_uniform"] for r in rows}
    for family, bar in (("bits", 1.2), ("topk", 2.5), ("rank", 1.5)):
        (best,) = [v for (f, _, p), v in of.items() if f == family and p == "lgreco"]
        assert best >= bar
    for (family, reference, policy), gain in of.items():
        assert of[family, reference, "lgreco"] >= 0.99 * gain, (family, policy)
        if family != "mixed":
            assert of["mixed", reference, "lgreco"] >= 0.999 * of[family, reference, "lgreco"]


def test_seeded_tables_are_close_to_tables_of_such_gradients() -> None:
    """Laplace values, singular values of 1 / i: the formulas give what is measured."""
    draw = np.random.default_rng(1)
    values = torch.from_numpy(draw.laplace(size=(3072, 768))).float()
    for family in (Bits(blocks=(64, 1024)), Density(0.01)):
        layers = seeded_layers("bert-base", 1.0, family, seed=3)
        one: Layer = next(x for x in layers if x.numel == values.numel())
        measured = losses(values, one.methods) / float(values.norm())
        assert one.errors / one.norm == pytest.approx(measured, rel=0.02)
    left, right = (
        torch.linalg.qr(torch.from_numpy(draw.normal(size=(n, 96)))).Q for n in (300, 96)
    )
    matrix = left / torch.arange(1, 97) @ right.T
    (layer,) = seeded_layers("300x96", 0.0, Rank(4), seed=0)
    measured = losses(matrix, layer.methods) / float(matrix.norm())
    assert layer.errors == pytest.approx(measured, rel=1e-3)
    # Seeds repeat.
    one, same, other = (
        Budget.of(seeded_layers("resnet50", 1.0, Bits(), seed)).error for seed in (1, 1, 2)
    )
    assert one == same != other


def test_rows_say_where_optuna_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    given: Row = {"models": ("resnet50",), "sigmas": (1.0,), "families": ("bits",)}
    rows = list(adapt.run(config=adapt.Config(**given)))
    missing = [row for row in rows if row["policy"] == "bayes"]
    assert [row["ratio"] for row in missing] == [None, None]
    assert all("gradwire[adapt]" in row["fallback"] for row in missing)
    assert missing[0].keys() == rows[0].keys()
    with pytest.raises(ConfigError, match=r"gradwire\[adapt\]"):
        list(adapt.run(config=adapt.Config(**given, policies=("bayes",))))
