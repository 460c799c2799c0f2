"""Windows of a policy's decisions and checks, options of what adapts, and what a byte counts."""

from __future__ import annotations

import torch

import gradwire as gw
from gradwire.aggregators import Compressed, PowerSGD
from gradwire.planner import Rules, make_plan
from rooms.decide import CHECKS, MOST, priorities, targets_of, together

SCHEDULES = [
    gw.Replan(),
    gw.Replan(every=50, first=30, average=10),
    gw.Replan(every=10, average=10),
    gw.Replan(every=7, first=3, average=2, stale=3),
    gw.Replan(every=3, average=1),
    gw.Replan(every=500, first=100, stale=None),
]


def test_each_window_has_its_passes_and_no_other() -> None:
    for replan in SCHEDULES:
        passes = range(1, replan.begins + 3 * replan.every + 1)
        decisions = [n for n in passes if replan.decides(n)]
        assert decisions == [replan.begins + i * replan.every for i in range(4)], replan
        checks = [n for n in passes if replan.checks(n)]
        assert not set(checks) & set(decisions), replan
        assert all(n > replan.begins for n in checks), replan
        windows = [range(n - replan.average + 1, n + 1) for n in decisions]
        windows += [range(n - replan.check_passes + 1, n + 1) for n in checks]
        expected = sorted(n for window in windows for n in window)
        # so no two overlap
        assert expected == [n for n in passes if replan.sums(n)], replan


def test_a_policys_budget_is_the_codec() -> None:
    model = torch.nn.Linear(64, 64)
    for policy in (gw.controllers.LGreco(budget="qsgd:bits=5"), "lgreco:budget=qsgd:bits=5"):
        handle = gw.attach(model, policy=policy)  # type: ignore[arg-type]
        assert handle.plan.rules == gw.attach(model, "qsgd:bits=5").plan.rules


def test_error_feedback_leaves_out_what_it_does_not_suit() -> None:
    """2 bits in blocks of 1024 may lose more than they encode, and residuals would grow."""
    named = [("w", torch.zeros(64, 64))]
    for feedback, mixed, least in ((False, False, 2), (True, False, 4), (True, True, 4)):
        rules = Rules().changed({}, codec="qsgd:bits=4:block=1024", error_feedback=feedback)
        target = targets_of(make_plan(named, rules, 2), mixed)["gradients"]
        methods = target.family.methods((64, 64))
        codecs = [m.codec for m in methods if isinstance(m, Compressed)]
        assert min(codec.bits for codec in codecs if isinstance(codec, gw.QSGD)) == least
        assert target.reference in methods
        assert not feedback or all(method.contracts for method in methods)
        assert any(isinstance(method, PowerSGD) for method in methods) == mixed
    rules = Rules().changed({}, codec="qsgd:bits=2:block=1024", error_feedback=True)
    target = targets_of(make_plan(named, rules, 2))["gradients"]
    assert target.reference in target.family.methods((64, 64)), "what the user has chosen stays"


def test_a_period_has_checks_that_sum_as_much_as_a_decision() -> None:
    replan = gw.Replan()
    period = range(replan.begins + 1, replan.begins + replan.every + 1)
    assert sum(replan.checks(n) for n in period) == CHECKS - 1
    assert sum(replan.sums(n) for n in period) == 2 * replan.average
    never = gw.Replan(stale=None)
    assert sum(never.sums(n) for n in period) == never.average


def test_the_last_bucket_counts_most() -> None:
    assert priorities([["c", "b"], ["a"]]) == {"c": 1.0, "b": 1.0, "a": 2.0}


def test_neighbouring_buckets_are_taken_together() -> None:
    wanted = dict.fromkeys("abcd")
    assert together([["d", "x"], ["y"], ["c", "b"], ["a"]], wanted) == [["d"], ["c", "b"], ["a"]]
    many = [[str(number)] for number in range(100)]
    found = together(many, dict.fromkeys(map(str, range(100))))
    assert len(found) == MOST
    assert [name for names in found for name in names] == [str(number) for number in range(100)]
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert together([["x"]], wanted) == []
