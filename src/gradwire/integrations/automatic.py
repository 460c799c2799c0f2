"""Automatic mode at work: measured links and kernels propose settings, and measured passes decide.

    1. attach: ranks measure their links, and rank 0 its kernels; gradients are sent in 16 bits
    2. after a few passes, rank 0 plans (integrations/auto.py), with the time that backward takes
    3. if several settings are expected to be close, each is in force for some passes, twice; the
       slowest rank's median pass counts. A less exact codec must save `MARGIN`
    4. a policy may then choose bits per parameter (integrations/adaptation.py)
    5. the links are watched; if they have changed, again from 2

All of it runs in the background. Ranks take each step at the same pass, and learn from each other
what they decide by. If a step fails, the plan in force stays, and one line says so.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradwire.engine import Owner
from gradwire.errors import ConfigError
from gradwire.integrations.auto import HALF_PRECISION, Auto, WantedSetting, costs, plan
from gradwire.integrations.serial import Serial
from gradwire.integrations.switch import Switch
from gradwire.integrations.turns import PlanTurns
from gradwire.planner import Plan, Rules
from gradwire.planner.choice import MARGIN
from gradwire.planner.link_watch import LinkWatch
from gradwire.planner.links import Links, exchanged, measure_links
from gradwire.planner.rules import exactly
from gradwire.sim import Curves

log = logging.getLogger("gradwire")

_FIRST = 4  # passes before the first plan; DDP rebuilds its buckets after the first
_TURNS = 2


class Automatic:
    """Automatic mode of one handle.

    Args:
        owner, switch: of the handle.
        named: (name, shape) of every parameter.
        remade: a plan with other rules.
        backward: seconds in which gradients were computed so far, summed over passes.
        start, stop: a policy, as a pass begins.

    Attributes:
        history: what was decided, in order: pass, line.
        setting: what was decided last.
        serial: where decisions run.
    """

    def __init__(
        self,
        auto: Auto,
        owner: Owner,
        switch: Switch,
        named: Sequence[tuple[str, tuple[int, ...]]],
        remade: Callable[[Plan, Rules], Plan],
        backward: Callable[[], float],
        start: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        self.history: list[dict[str, Any]] = []
        self.setting = HALF_PRECISION
        self.passes = 0
        self._auto, self._owner, self._switch, self._named = auto, owner, switch, list(named)
        self._remade, self._backward = remade, backward
        self._start_policy, self._stop_policy = start, stop
        self._given = switch.plan  # rules and options of the user's
        self._comm = owner.comm
        self.serial = Serial(owner.comm.workers)
        self._lock = threading.Lock()
        self._began: float | None = None  # when the running pass did
        self._turns: PlanTurns | None = None
        self._wanted: list[WantedSetting] = []
        self._settling: int | None = None  # the version that ends a trial
        self._settled = False
        self._messages = 0
        self._closed = False
        self._links = measure_links(self._comm, auto.seconds)
        self._costs: Curves | Exception | None = None  # of rank 0's machine
        if self._comm.rank == 0:
            try:
                self._costs = costs(auto)
            except Exception as error:  # said where it matters
                self._costs = error
        self._told(None)  # nobody trains meanwhile
        self._base: Links | None = None  # of the watch, as the plan was made
        self._watch = LinkWatch(self._comm, self._links, auto.share)

    def close(self) -> None:
        """Decide no more: the handle is detached."""
        self._closed = True
        self._watch.close()

    # ---- passes

    def begin(self) -> None:
        """Called as a pass begins, on the same pass on all ranks."""
        now, version = time.perf_counter(), self._switch.plan.version
        with self._lock:
            self.passes += 1
            began, self._began = self._began, now
            if self._turns is not None and began is not None:
                self._turns.passed(version, now - began)
            if self._settling is not None and version >= self._settling:
                self._settling, self._settled = None, True
                self._start_policy()
            elif self._settled and self.passes % self._auto.watch == 0:
                self._submit(self._look)
            if self.passes == _FIRST:
                self._submit(self._plan)

    def _submit(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._closed:
                return
            try:
                work()
            except Exception as error:  # alike on all ranks, or the group is broken
                self._closed = True
                self._note(f"automatic mode has ended, the plan stays: {error}", logging.WARNING)

        self.serial.submit(guarded)

    # ---- in the background

    def _plan(self) -> None:
        passes = max(self.passes - 1, 1)
        told: dict[str, Any] = {}
        if self._comm.rank == 0:
            machines = self._comm.topology.machines
            measured = self._named, self._links, machines, self._backward() / passes
            try:
                if not isinstance(self._costs, Curves):
                    raise ConfigError(f"no costs of kernels: {self._costs}")
                coalesces = bool(self._given.coalesce_bytes)
                wanted, line = plan(self._auto, self._costs, *measured, coalesces)
                told = {"wanted": [one.told() for one in wanted], "line": line}
            except Exception as error:  # rather than none: the reference
                line = f"{HALF_PRECISION}, since nothing can be planned: {error}"
                told = {"wanted": [HALF_PRECISION.told()], "line": line}
        told, *_ = self._told(told)
        self._wanted = [WantedSetting.read(one) for one in told["wanted"]]
        self._note(told["line"])
        if len(self._wanted) == 1:
            self._settle(0, "no other setting is close")
            return

        def ask(number: int) -> int:
            return self._ask(self._wanted[number])

        of = self._auto.trial, ask, self._submit, self._timed
        self._turns = PlanTurns(len(self._wanted), _TURNS, *of)
        self._turns.next()

    def _timed(self, seconds: list[list[float]]) -> None:
        self._turns = None
        medians = list(map(statistics.median, seconds))
        slowest = [max(of) for of in zip(*self._told(medians), strict=True)]
        exact = sorted(range(len(slowest)), key=lambda n: self._wanted[n].rank)
        best = exact[0]
        for number in exact[1:]:
            if slowest[number] < (1 - MARGIN) * slowest[best]:
                best = number
        pairs = zip(self._wanted, slowest, strict=True)
        self._settle(best, "tried: " + "; ".join(f"{s}: {1e3 * t:.4g} ms" for s, t in pairs))

    def _settle(self, number: int, why: str) -> None:
        chosen = self._wanted[number]
        with self._lock:
            self._settled = False
            self._settling = self._ask(chosen)
        self.setting, self._base = chosen, None
        level = logging.INFO if chosen.rank > HALF_PRECISION.rank else logging.WARNING
        what = "" if level == logging.INFO else "compression does not pay here; "
        self._note(f"{what}in use from now on: {chosen} ({why})", level)

    def _look(self) -> None:
        """Compare the links with those of the plan."""
        newest = self._watch.newest if self._comm.rank == 0 else None
        (text, *_) = self._told(None if newest is None else newest.text())
        if text is None:
            return
        links = Links.read(text)
        if self._base is None:
            self._base = links
        elif links.changed(self._base, self._auto.changed):
            before, after = (
                f"{one.worst_alpha * 1e3:.3g} ms and {8e-6 / max(one.worst_beta, 1e-15):.4g} Mbit/s"
                for one in (self._base, links)
            )
            self._note(f"the links have changed from {before} to {after}")
            self._links, self._settled = links, False
            self._stop_policy()
            self._plan()

    def _ask(self, wanted: WantedSetting) -> int:
        """Request a plan of this setting; its version."""
        base = self._given
        small = tuple(exactly(name) for name in wanted.exclude)
        method = None if wanted.method == "none" else wanted.method
        rules = base.rules.changed(codec=method, exclude=(*base.rules.exclude, *small))

        def made(before: Plan) -> Plan:
            options = wanted.options(base.options)
            new = replace(before, version=before.version + 1, options=options)
            return self._remade(replace(new, coalesce_bytes=wanted.coalesce_bytes), rules)

        return self._switch.ask(made).version

    def _told(self, mine: Any) -> list[Any]:
        """What all ranks tell, in rank order."""
        self._messages += 1
        key = f"{self._owner.key}/auto {self._messages}"
        return [json.loads(text) for text in exchanged(self._comm, key, json.dumps(mine))]

    def _note(self, line: str, level: int = logging.INFO) -> None:
        self.history.append({"pass": self.passes, "line": line})
        if self._comm.rank == 0:
            log.log(level, "pass %d: auto: %s", self.passes, line)


def without_plan(states: Sequence[Mapping[str, Any]], plan: Plan) -> list[Mapping[str, Any]]:
    """Saved states as of the plan in force, whatever plan was in force when they were saved: what
    automatic mode chooses has no state, and it begins anew."""
    now = {p.name: {key: p.facts()[key] for key in ("codec", "feedback")} for p in plan.parameters}

    def fitted(name: str, facts: Any) -> Any:
        return {**facts, **now[name]} if isinstance(facts, Mapping) and name in now else facts

    return [
        {**one, "parameters": {name: fitted(name, f) for name, f in one["parameters"].items()}}
        if isinstance(one.get("parameters"), Mapping)
        else one
        for one in states
    ]


def refuse_changes(automatic: Automatic | None) -> None:
    """Raise ConfigError for an update by the user where automatic mode makes them."""
    if automatic is not None:
        raise ConfigError(
            'update: "auto" changes this handle\'s plan: detach, and attach with a codec'
        )
