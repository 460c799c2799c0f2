"""Automatic mode at work: measured links and kernels propose settings, and measured passes decide.

    1. attach: ranks measure their links, and rank 0 its kernels; gradients are sent in 16 bits
    2. after a few passes, rank 0 plans (integrations/auto.py), with the time that backward takes on
       the slowest rank
    3. what is expected to be close to the best, the best without compression, and the best's codec
       with default options are each in force for some passes, twice; the slowest rank's median
       pass counts. A codec must save `choice.MARGIN` beside all that is more exact
    4. a policy may then choose bits per parameter (integrations/adaptation.py)
    5. links and passes are watched; if they have changed in two looks, again from 2

All of it runs in the background. Ranks take each step at the same pass, and learn from each other
what they decide by. For that, what a pass reads changes only in passes, and what a decision reads
only in decisions: a pass tells the background by submitting work, which runs in the order of
passes; the background tells passes by the version of a plan, which all ranks adopt at the same one.
If a step fails, the plan in force stays, and one line says so.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradwire.engine import Owner
from gradwire.errors import ConfigError
from gradwire.integrations.auto import HALF_PRECISION, Auto, WantedSetting, costs, plan
from gradwire.integrations.serial import Serial
from gradwire.integrations.switch import Switch
from gradwire.integrations.turns import PlanTurns
from gradwire.planner import Plan, Rules
from gradwire.planner.link_watch import LinkWatch
from gradwire.planner.links import Links, exchanged, measure_links
from gradwire.planner.rules import exactly
from gradwire_tools.sim import Curves
from gradwire_tools.sim.choice import worth

log = logging.getLogger("gradwire")

LOOKS = 2  # in succession that must see a change
_FIRST = 4  # passes before the first plan; DDP rebuilds its buckets after the first
_TURNS = 2
_REMEMBERED, _FEWEST = 20, 5  # passes, and those that make a median


class Automatic:
    """Automatic mode of one handle.

    Args:
        owner, switch: of the handle.
        named: see gradwire.integrations.auto.sent.
        remade: a plan with other rules.
        spent: seconds so far, summed over passes: in which gradients were computed, and in which
            training then waited for averages.
        start, stop: a policy, as a pass begins.
        record: is given each row of the history.

    Attributes:
        history: what was decided, in order: pass; line; and where settings were tried, tried: of
            each its setting, the seconds of a pass, those expected (None: unknown), and whether it
            is used from now on.
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
        spent: Callable[[], tuple[float, float]],
        start: Callable[[], None],
        stop: Callable[[], None],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        self.history: list[dict[str, Any]] = []
        self.setting = HALF_PRECISION
        self.passes = 0
        self._auto, self._owner, self._switch, self._named = auto, owner, switch, list(named)
        self._remade, self._record = remade, record
        self._start_policy, self._stop_policy = start, stop
        self._given = switch.plan  # rules and options of the user's
        self._comm = owner.comm
        self.serial = Serial(owner.comm.workers)
        self._lock = threading.Lock()
        self._pace = Pace(spent)
        self._turns: PlanTurns | None = None
        self._wanted: list[WantedSetting] = []
        # What begins with a version of the plan, in the order of versions.
        self._coming: deque[tuple[int, Callable[[], None]]] = deque()
        self._settled = False  # of passes, as is whether a policy is at work
        self._messages = 0
        self._closed = False
        self._links = Links.of(self._comm.world_size, [])
        self._unknown = ""  # why the links are not known
        try:
            self._links = measure_links(self._comm, auto.seconds)
        except ConfigError as error:  # a figure that makes no sense: alike on all ranks
            self._unknown = f"the links cannot be measured: {error}"
        self._costs: Curves | Exception | None = None  # of rank 0's machine
        if self._comm.rank == 0:
            try:
                self._costs = costs(auto)
            except Exception as error:  # said where it matters
                self._costs = error
        self._told(None)  # nobody trains meanwhile
        self._base: Links | None = None  # of the watch, as the plan was made
        self._usual: tuple[int, float] | None = None  # seconds of a pass with this version
        self._changes = 0  # successive looks that saw a change
        self._watch = LinkWatch(self._comm, self._links, auto.share)

    def close(self) -> None:
        """Decide no more: the handle is detached."""
        self._closed = True
        self.serial.close()

    def join(self) -> None:
        """After `close`: wait for the background, for some seconds at most."""
        self._watch.close()
        self.serial.join()

    # ---- passes

    def begin(self) -> None:
        """Called as a pass begins, on the same pass on all ranks."""
        version = self._switch.plan.version
        with self._lock:
            self.passes += 1
            took, turns = self._pace.passed(version), self._turns
            if turns is not None and took is not None:
                turns.passed(version, took)
            if self._settled and self._auto.watch and self.passes % self._auto.watch == 0:
                self._submit(self._look)
            while self._coming and self._coming[0][0] <= version:
                self._coming.popleft()[1]()
            if self.passes == _FIRST:
                self._submit(self._plan)

    def _use(self, chosen: WantedSetting) -> None:
        """The plan that was settled on is in force."""
        self._settled = True
        if chosen.compresses:
            try:
                self._start_policy()
            except ConfigError as error:
                self._note(f"no policy chooses bits: {error}")

    def _begin_anew(self) -> None:
        """All ranks have seen a change."""
        self._settled = False
        self._stop_policy()
        self._submit(self._plan)

    def _submit(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._closed:
                return
            try:
                work()
            except Exception as error:  # alike on all ranks, or the group is broken
                self.serial.check()
                self._closed = True
                line = f"automatic mode has ended, the plan stays: {error}"
                self._note(line, logging.WARNING, said_by_all=True)

        self.serial.submit(guarded)

    # ---- in the background

    def _plan(self) -> None:
        told: dict[str, Any] = {}
        backward, rest = max(self._told(self._pace.usual()), key=sum)  # of the slowest rank
        if self._comm.rank == 0:
            machines = self._comm.topology.machines
            measured = self._named, self._links, machines, backward
            try:
                if self._unknown:
                    raise ConfigError(self._unknown)
                if not isinstance(self._costs, Curves):
                    raise ConfigError(f"no costs of kernels: {self._costs}")
                coalesces = bool(self._given.coalesce_bytes)
                wanted, line = plan(
                    self._auto, self._costs, *measured, coalesces, self.serial.check
                )
                told = {"wanted": [one.told() for one in wanted], "line": line, "rest": rest}
            except Exception as error:  # rather than none: the reference
                line = f"nothing can be planned: {error}"
                told = {"wanted": [HALF_PRECISION.told()], "line": line, "failed": True}
        told, *_ = self._told(told)
        self._wanted = [WantedSetting.read(one) for one in told["wanted"]]
        self._rest: float | None = told.get("rest")
        self._note(told["line"])
        if "failed" in told:
            self._settle(0, told["line"], planned=False)
            return
        if len(self._wanted) == 1 or not self._auto.trial:
            why = "as planned" if len(self._wanted) > 1 else "no other setting is close"
            self._settle(0, f"{why}: {told['line']}")
            return

        def ask(number: int) -> int:
            return self._ask(self._wanted[number])

        of = self._auto.trial, ask, self._submit, self._timed
        self._turns = PlanTurns(len(self._wanted), _TURNS, *of)
        self._turns.next()

    def _timed(self, seconds: list[list[float]]) -> None:
        medians = list(map(statistics.median, seconds))
        slowest = [max(of) for of in zip(*self._told(medians), strict=True)]
        best = best_of([one.rank for one in self._wanted], slowest)
        tried = [
            {
                "setting": str(of), "seconds": took, "expected_seconds": self._expected(of),
                "used": number == best,
            }
            for number, (of, took) in enumerate(zip(self._wanted, slowest, strict=True))
        ]  # fmt: skip
        self._settle(best, "tried: " + "; ".join(map(_tried, tried)), tried=tried)

    def _expected(self, wanted: WantedSetting) -> float | None:
        """Seconds of a pass, with what is neither backward nor communication."""
        if self._rest is None or wanted.seconds is None:
            return None
        return self._rest + wanted.seconds

    def _settle(self, number: int, why: str, planned: bool = True, **more: Any) -> None:
        chosen = self._wanted[number]
        self._with(lambda: self._ask(chosen), partial(self._use, chosen))
        self.setting, self._base, self._usual, self._changes = chosen, None, None, 0
        level = logging.INFO if chosen.compresses else logging.WARNING
        what = "compression does not pay here; " if planned and level != logging.INFO else ""
        self._note(f"{what}in use from now on: {chosen} ({why})", level, **more)

    def _look(self) -> None:
        """Compare links and passes with those of the plan."""
        if self._changes >= LOOKS:  # a plan is made anew from the next adoption on
            return
        newest = self._watch.newest if self._comm.rank == 0 else None
        mine = None if newest is None else newest.text(), self._pace.of_version()
        every = self._told(mine)
        texts, paces = zip(*every, strict=True)
        said = [] if texts[0] is None else self._links_changed(Links.read(texts[0]))
        if None not in paces and len({version for version, _ in paces}) == 1:
            said += self._pace_changed(*max(paces))
        self._changes = self._changes + 1 if said else 0
        if self._changes < LOOKS:
            return
        self._note("; ".join(said))
        same = partial(self._switch.ask, lambda plan: replace(plan, version=plan.version + 1))
        self._with(lambda: same().version, self._begin_anew)

    def _links_changed(self, links: Links) -> list[str]:
        """What to say of them, if they have."""
        if self._base is None:
            self._base = links
        if not links.changed(self._base, self._auto.changed):
            return []
        before, after = (
            f"{one.worst_alpha * 1e3:.3g} ms and {8e-6 / max(one.worst_beta, 1e-15):.4g} Mbit/s"
            for one in (self._base, links)
        )
        self._links, self._unknown = links, ""
        return [f"the links have changed from {before} to {after}"]

    def _pace_changed(self, version: int, pace: float) -> list[str]:
        """What to say of the slowest rank's passes, if they have changed under the same plan."""
        if self._usual is None or self._usual[0] != version:
            self._usual = version, pace
        usual = self._usual[1]
        if max(pace, usual) <= (1 + self._auto.changed) * min(pace, usual):
            return []
        return [f"passes take {1e3 * pace:.4g} ms, no longer {1e3 * usual:.4g}"]

    def _ask(self, wanted: WantedSetting) -> int:
        """Request a plan of this setting; its version."""
        base = self._given
        small = tuple(exactly(name) for name in wanted.exclude)
        method = None if wanted.method == "none" else wanted.method
        rules = base.rules.changed(codec=method, exclude=(*base.rules.exclude, *small))

        def made(before: Plan) -> Plan:
            new = replace(before, version=before.version + 1, options=wanted.options(base.options))
            together = wanted.coalesce_bytes
            together = base.coalesce_bytes if together is None else together
            return self._remade(replace(new, coalesce_bytes=together), rules)

        return self._switch.ask(made).version

    def _with(self, ask: Callable[[], int], then: Callable[[], None]) -> None:
        """Request a plan, and do something at the first pass that sees it in force."""
        with self._lock:  # no pass sees it before `then` is known
            self._coming.append((ask(), then))

    def _told(self, mine: Any) -> list[Any]:
        """What all ranks tell, in rank order."""
        self._messages += 1
        key = f"{self._owner.key}/auto {self._messages}"
        every = exchanged(self._comm, key, json.dumps(mine), self.serial.check)
        return [json.loads(text) for text in every]

    def _note(
        self, line: str, level: int = logging.INFO, said_by_all: bool = False, **more: Any
    ) -> None:
        row = {"pass": self.passes, "line": line, **more}
        self.history.append(row)
        self._record({"by": "auto", **row})
        if self._comm.rank == 0 or said_by_all:
            rank = f"rank {self._comm.ranks[self._comm.rank]}: " if said_by_all else ""
            log.log(level, "%spass %d: auto: %s", rank, self.passes, line)


class Pace:
    """What the last passes took.

    Args:
        spent: see `Automatic`.
    """

    def __init__(self, spent: Callable[[], tuple[float, float]]) -> None:
        self._spent = spent
        self._began: tuple[float, float, float] | None = None
        # version of the plan, seconds, of it in backward, and of it neither there nor in waiting
        self._passes: deque[tuple[int, float, float, float]] = deque(maxlen=_REMEMBERED)

    def passed(self, version: int) -> float | None:
        """A pass begins, so one has ended, with this plan: its seconds; None at the first."""
        now = (time.perf_counter(), *self._spent())
        before, self._began = self._began, now
        if before is None:
            return None
        took, backward, waited = (b - a for a, b in zip(before, now, strict=True))
        self._passes.append((version, took, backward, took - backward - waited))
        return took

    def usual(self) -> tuple[float, float]:
        """Medians: seconds of a backward, and of what is neither backward nor communication."""
        passes = list(self._passes)
        if not passes:
            return 0.0, 0.0
        rest = statistics.median(of[3] for of in passes)
        return statistics.median(of[2] for of in passes), max(rest, 0.0)

    def of_version(self) -> tuple[int, float] | None:
        """The version of the newest plan and the median of its passes; None: there are too few."""
        passes = list(self._passes)
        took = [of[1] for of in passes if of[0] == passes[-1][0]]
        return (passes[-1][0], statistics.median(took)) if len(took) >= _FEWEST else None


def best_of(ranks: Sequence[int], seconds: Sequence[float]) -> int:
    """Which of several settings to use: the fastest of a codec (`ranks`: how exact it is), if it is
    worth it beside the fastest of each more exact one."""
    fastest: dict[int, int] = {}
    for number in sorted(range(len(seconds)), key=seconds.__getitem__):
        fastest.setdefault(ranks[number], number)
    exact = [fastest[rank] for rank in sorted(fastest)]
    return exact[worth([seconds[number] for number in exact])]


def _tried(of: Mapping[str, Any]) -> str:
    expected = of["expected_seconds"]
    wanted = "" if expected is None else f", {1e3 * expected:.4g} expected"
    return f"{of['setting']}: {1e3 * of['seconds']:.4g} ms{wanted}"


def refuse_changes(automatic: Automatic | None) -> None:
    """Raise ConfigError for an update by the user where automatic mode makes them."""
    if automatic is not None:
        raise ConfigError(
            'update: "auto" changes this handle\'s plan: detach, and attach with a codec'
        )
