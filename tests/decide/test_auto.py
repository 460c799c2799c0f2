"""Automatic mode on logs of passes: what it tries, what it uses, and when it tries again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from played import Module

import gradwire as gw
from gradwire.planner import Plan
from ranks import refuses
from rooms.decide import UNTIMED, Automatic, worth

QUICK = gw.Auto(trial=2, watch=6, policy=gw.Replan(every=4, average=2, share=1.0))
TRIAL = 4 + 2 * 3 * (UNTIMED + 2) + 4  # passes at most, until its best candidate is in force


def pace(**seconds: float) -> Callable[[Plan], float]:
    """Of a plan, by the first word of its codec."""
    return lambda plan: next(
        took
        for name, took in seconds.items()
        if plan.parameters[0].how.lower().startswith(name.lower())
    )


def automatic(module: Module, auto: gw.Auto = QUICK) -> Automatic:
    found = Automatic(auto, module)
    module.runner.start(found.script())
    return found


def lines(mode: Automatic) -> list[str]:
    return [row["line"] for row in mode.history]


@pytest.mark.parametrize(
    ("dense", "cast", "qsgd", "best"),
    [
        (1.0, 2.0, 3.0, "none"),
        (1.0, 0.96, 0.97, "none"),  # too little
        (1.0, 0.9, 0.87, "bf16"),
        (1.0, 0.9, 0.8, "qsgd:bits=4"),
        (1.0, 1.2, 0.9, "qsgd:bits=4"),
    ],
)
def test_the_fastest_is_used_if_it_is_worth_its_loss(
    dense: float, cast: float, qsgd: float, best: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = Module(pace(dense=dense, Cast=cast, QSGD=qsgd))
    mode = automatic(module)
    module.train(TRIAL)
    assert mode.setting == best
    assert module.weight.how.startswith({"none": "dense", "bf16": "Cast"}.get(best, "QSGD"))
    (row,) = mode.history
    assert [(one["setting"], one["used"]) for one in row["tried"]] == [
        (setting, setting == best) for setting in ("none", "bf16", "qsgd:bits=4")
    ]
    assert [one["seconds"] for one in row["tried"]] == pytest.approx([dense, cast, qsgd])
    said = f"in use from now on: {best} (tried: none: {1e3 * dense:.4g} ms; bf16: "
    pays = best.startswith("qsgd")
    assert row["line"].startswith(said if pays else f"compression does not pay here; {said}")
    assert (caplog.records != []) == (not pays)
    assert (module.adaptation is not None) == pays, "a policy chooses bits where there is a choice"
    assert {one["by"] for one in module.decisions} == {"auto"}


def test_the_slowest_rank_counts() -> None:
    """Here 4 bits are fastest, and on the other rank they are slowest."""

    def told(key: str, mine: Any) -> list[Any]:
        return [mine, [1.0, 1.0, 5.0]] if key.endswith("tried") else [mine, mine]

    module = Module(pace(dense=3.0, Cast=2.0, QSGD=1.0), told)
    mode = automatic(module)
    module.train(TRIAL)
    assert mode.setting == "bf16"
    assert [one["seconds"] for one in mode.history[0]["tried"]] == [3.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("given", "best", "said"),
    [
        ({"methods": ("powersgd:rank=2",), "codecs": (), "policy": None}, "powersgd:rank=2", 0),
        ({"codecs": ("onebit",)}, "onebit", 1),  # which has no choices
    ],
)
def test_other_candidates_are_tried(given: dict[str, Any], best: str, said: int) -> None:
    module = Module(pace(dense=3.0, Cast=3.0, PowerSGD=1.0, OneBit=1.0))
    mode = automatic(module, gw.Auto(trial=1, **given))
    module.train(TRIAL)
    assert mode.setting == best
    assert module.adaptation is None
    assert sum(line.startswith("no policy chooses bits: ") for line in lines(mode)) == said


def test_a_changed_pace_that_two_looks_see_makes_a_new_trial() -> None:
    slow = {"by": 1.0}
    found = pace(dense=3.0, Cast=3.0, QSGD=1.0)
    module = Module(lambda plan: slow["by"] * found(plan))
    mode = automatic(module, gw.Auto(trial=1, watch=20, policy=None))
    module.train(TRIAL + 20)
    slow["by"] = 1.5
    module.train(20)
    slow["by"] = 1.0
    module.train(60)
    assert len(mode.history) == 1, "one look is not enough"
    slow["by"] = 1.5
    module.train(45)
    assert lines(mode)[1] == "passes take 1500 ms, no longer 1000"
    module.train(TRIAL)
    assert mode.history[2]["tried"][2]["seconds"] == 1.5
    assert len(mode.history) == 3


def test_a_policy_ends_where_a_new_trial_begins() -> None:
    """It changes plans meanwhile; each has its own usual pace."""
    slow = {"by": 1.0}
    found = pace(dense=3.0, Cast=3.0, QSGD=1.0)
    module = Module(lambda plan: slow["by"] * found(plan))
    mode = automatic(module)
    module.train(TRIAL + 30)
    policy = module.adaptation
    assert policy is not None
    assert policy.history
    slow["by"] = 9.0
    module.train(30)
    assert len(mode.history) > 1
    assert module.adaptation is not policy
    decided = len(policy.history)
    module.train(30)
    assert len(policy.history) == decided


def test_without_a_watch_what_was_decided_stays() -> None:
    slow = {"by": 1.0}
    found = pace(dense=3.0, Cast=3.0, QSGD=1.0)
    module = Module(lambda plan: slow["by"] * found(plan))
    mode = automatic(module, gw.Auto(trial=1, watch=0, policy=None))
    module.train(TRIAL)
    slow["by"] = 9.0
    module.train(100)
    assert len(mode.history) == 1


def test_every_rank_says_that_automatic_mode_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    def refused(plan: Plan) -> Exception:
        return gw.ConfigError("one of the test's")

    module = Module(refuses=refused)
    mode = automatic(module)
    module.train(8)
    assert lines(mode) == ["automatic mode has ended, bf16 stays: one of the test's"]
    said = f"rank 0: pass 4: auto: {lines(mode)[0]}"
    assert [one.getMessage() for one in caplog.records] == [said]
    assert module.weight.how.startswith("Cast")


def test_a_trial_that_fails_goes_back_to_what_was_decided_before() -> None:
    """Here the second plan of the trial is refused, after the first was in force."""
    module = Module(refuses=lambda plan: gw.ConfigError("no") if plan.version == 2 else None)
    mode = automatic(module)
    module.train(20)
    assert lines(mode) == ["automatic mode has ended, bf16 stays: no"]
    assert module.plan.version == 3
    assert module.weight.how.startswith("Cast")


def test_the_margin_counts_beside_all_that_is_more_exact() -> None:
    """Not only beside the best so far."""
    for expected, *seconds in (
        (0, 1.00),
        (1, 1.00, 0.94),
        (0, 1.00, 0.96, 0.94),  # less than 1.00 by more than 5 %, but not than 0.96
        (2, 1.00, 0.96, 0.90),
        (1, 1.00, 0.90, 0.86),
        (3, 1.00, 1.20, 0.96, 0.90),
    ):
        assert worth(seconds) == expected


def test_what_automatic_mode_does_not_take_is_named() -> None:
    for said, given in (
        ("trial=0", {"trial": 0}),
        ("watch=-1", {"watch": -1}),
        ("changed=0", {"changed": 0}),
        ("zip", {"codecs": ["zip"]}),
        ("codecs='qsgd': give several names", {"codecs": "qsgd"}),
        ("codecs=None: give several names", {"codecs": None}),
        ("codecs=(5,): give several names", {"codecs": (5,)}),
        ("methods='powersgd': give several", {"methods": "powersgd"}),
        ("zip", {"methods": ["zip"]}),
        ("'none' would be tried twice", {"methods": ["none"]}),
        ("'topk' would be tried twice", {"codecs": ["topk"], "methods": ["topk"]}),
        ("lgrecco", {"policy": "lgrecco"}),
        ("policy=5: give a policy", {"policy": 5}),
        ("leave the policy's budget out", {"policy": "lgreco:budget=qsgd:bits=4"}),
        ("write policy=gw.Replan(", {"replan": gw.Replan()}),
        ("policy has mixed=True", {"policy": gw.Replan(mixed=True)}),
    ):
        refuses(said, lambda given=given: gw.Auto(**given))  # type: ignore[arg-type]
