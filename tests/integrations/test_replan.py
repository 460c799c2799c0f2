"""The windows of a policy's decisions and checks."""

from __future__ import annotations

import gradwire as gw
from gradwire.integrations.replan import CHECKS

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


def test_a_period_has_checks_that_sum_as_much_as_a_decision() -> None:
    replan = gw.Replan()
    period = range(replan.begins + 1, replan.begins + replan.every + 1)
    assert sum(replan.checks(n) for n in period) == CHECKS - 1
    assert sum(replan.sums(n) for n in period) == 2 * replan.average
    never = gw.Replan(stale=None)
    assert sum(never.sums(n) for n in period) == never.average
