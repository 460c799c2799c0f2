"""Plans: the rules in their order, and clear errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradwire import QSGD, ConfigError, TernGrad
from gradwire.aggregators import Compressed, Dense, ErrorFeedback
from gradwire.planner import Plan, Rules, make_plan


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4))


def plan_of(module: nn.Module | None = None, **arguments: Any) -> Plan:
    world_size = arguments.pop("world_size", 4)
    options = arguments.pop("codec_options", {})
    rules = Rules().changed(options, **{"codec": "qsgd", **arguments})
    return make_plan((module or model()).named_parameters(), rules, world_size)


def chosen(plan: Plan) -> dict[str, Any]:
    return {p.name: p.codec for p in plan.parameters}


def test_parameters_of_one_dimension_are_uncompressed() -> None:
    q = QSGD()
    expected = {"0.weight": q, "0.bias": None, "1.weight": None, "1.bias": None}
    assert chosen(plan_of()) == {**expected, "2.weight": q, "2.bias": None}


def test_patterns_override_in_order() -> None:
    found = chosen(
        plan_of(include=["*.bias"], exclude=["1.*", "2.*"], codecs={"2.weight": TernGrad()})
    )
    assert found["0.bias"] == QSGD()
    assert found["1.bias"] is None
    assert found["2.weight"] == TernGrad()
    assert found["2.bias"] is None


def test_patterns_match_every_name_of_a_tied_parameter() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    named = [("embed.weight", weight), ("head.weight", weight)]

    def found(**arguments: Any) -> dict[str, Any]:
        return chosen(make_plan(named, Rules().changed(codec="qsgd", **arguments), 2))

    assert found() == {"embed.weight": QSGD()}
    assert found(exclude=["head.*"]) == {"embed.weight": None}
    assert found(codecs={"head.*": "terngrad"}) == {"embed.weight": TernGrad()}


def test_a_single_rank_keeps_no_residual() -> None:
    assert any(p.feedback for p in plan_of(error_feedback=True, world_size=2).parameters)
    assert not any(p.feedback for p in plan_of(error_feedback=True, world_size=1).parameters)


def test_aggregators_follow_the_plan() -> None:
    made = {p.name: p.aggregator for p in plan_of(error_feedback=True).parameters}
    assert isinstance(made["0.weight"], ErrorFeedback)
    assert isinstance(made["0.bias"], Dense)
    made = {p.name: p.aggregator for p in plan_of().parameters}
    assert type(made["0.weight"]) is Compressed


def test_rotations_spread_remainders() -> None:
    module = nn.ParameterList([nn.Parameter(torch.zeros(10)) for _ in range(8)])
    assert [p.rotation for p in plan_of(module).parameters] == [0, 1, 2, 3, 1, 2, 3, 0]


def mixed() -> nn.Module:
    double, pairs = nn.Linear(3, 3).double(), nn.Linear(3, 4, dtype=torch.complex64)
    return nn.Sequential(nn.Linear(3, 3), double, pairs)


def test_other_dtypes_are_uncompressed() -> None:
    plan = plan_of(mixed(), error_feedback=True, exclude=["1.weight"], include=["0.*"])
    how = {p.name: p.how for p in plan.parameters}
    assert how["0.weight"] == how["0.bias"] == str(QSGD())
    others = {name for name, text in how.items() if text == "dense"}
    assert others == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert not any(p.feedback for p in plan.parameters if p.how == "dense")
    assert "1.weight: 9 x torch.float64, dense" in plan.describe()
    assert all(p.how == "dense" for p in plan_of(nn.Linear(3, 3).double()).parameters)


MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("bits", {"codec_options": {"bits": 0}}),
    ("bogus", {"codec_options": {"bogus": 1}}),
    ("decoder", {"include": ["decoder.*"]}),
    ("decoder", {"codecs": {"decoder.*": "qsgd"}}),
    (r"exclude=\[1\]: give a list", {"exclude": [1]}),
    (r"codecs=.*which are strings", {"codecs": {3: "qsgd"}}),
    ("no parameter", {"module": nn.Identity()}),
    (
        r"include.*'1\.\*'.*1\.weight.*float64.*exclude=\['1\.weight'\]",
        {"module": mixed(), "include": ["1.*"]},
    ),
    (
        r"codecs.*'2\.bias'.*complex64.*\{'2\.bias': None",
        {"module": mixed(), "codecs": {"2.bias": "identity"}},
    ),
]


def test_mistakes_are_named() -> None:
    for match, arguments in MISTAKES:
        with pytest.raises(ConfigError, match=match):
            plan_of(**arguments)


def test_the_remedies_for_other_dtypes_work() -> None:
    plan_of(mixed(), include=["*"], exclude=["[12].*"])
    plan_of(mixed(), codecs={"[12].*": None, "*": "qsgd"})
    plan_of(mixed(), codec=None, include=["*"])
