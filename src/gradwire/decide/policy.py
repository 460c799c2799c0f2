"""A policy at work on a handle: it changes methods per parameter while training runs, off its path.

    1. over a window of passes, averaged gradients are summed as they arrive: each by one rank
       (DDP), or each rank's shard of it (FSDP2). Of weights, each rank copies its shards
    2. in the background ranks decide together (decide/tables.py)
    3. every rank requests the choices as an update of its plan, and all adopt it at the same pass

Between decisions, checks look for a plan that has gone stale (controllers/replan.py). Within the
budget the uniform plan is what `attach` was given. If a step fails on one rank, that round ends on
all, with a line in the log, and the plan stays.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from gradwire.aggregators import Aggregator
from gradwire.aggregators import registry as aggregators
from gradwire.controllers import Policy
from gradwire.controllers.replan import Replan
from gradwire.controllers.targets import GRADIENTS, Methods, Target, targets_of, with_methods
from gradwire.decide.scripts import (
    DecidingRank,
    Make,
    NextWindow,
    Passes,
    Runner,
    Running,
    Script,
    Tell,
    Use,
)
from gradwire.decide.tables import Decider, Ruling, Window, reason
from gradwire.decide.weighing import AFTER, Names, priorities, weighed
from gradwire.errors import ConfigError
from gradwire.planner import Plan, Rules

log = logging.getLogger("gradwire")


class Subject(Protocol):
    """What a policy needs of the module that it works on.

    Attributes:
        runner: of its scripts.
    """

    runner: Runner

    @property
    def place(self) -> DecidingRank:
        """This rank among those that decide."""
        ...

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        ...

    @property
    def newest(self) -> Plan:
        """The plan requested last."""
        ...

    def remade(self, plan: Plan, rules: Rules) -> Plan:
        """`plan` with other rules; raises ConfigError if there is none."""
        ...

    def rewrite(self, change: Make) -> None:
        """Change all plans, that in force too, between two passes."""
        ...

    def shard(self, name: str) -> torch.Tensor:
        """This rank's part of a weight."""
        ...

    def bucket_names(self) -> Names:
        """Of the parameters of each bucket, in the order of sending."""
        ...

    def decided(self, row: Mapping[str, Any]) -> None:
        """Note a decision."""
        ...


@dataclass
class EndedWindow:
    """What a round decides on.

    Attributes:
        values: by target; None: dropped, since another window ended before its round began.
        check: whether a check comes first.
    """

    values: dict[str, Window] | None
    check: bool


class Adaptation:
    """A policy at work.

    Args:
        policy, replan: what decides, and when. A policy without a budget of error decides only as
            each period ends.
        before: of the same policy, which this one carries on, from pass `passes`.

    Attributes:
        running: whether averages of the running pass are summed.
        passes: so far, without those of a trial of weights and before it.
        history: of the decisions, in order: pass; of ("gradients", "weights"); early (a check found
            the plan stale); line (what was decided, and why); changed (how many parameters have
            another method than before); planned_error, error, uniform_error, budget (see
            `tables.Ruling`; not where a round failed); seconds (from the window's end).

    Raises:
        ConfigError: there is no choice around the plan's methods.
    """

    def __init__(
        self,
        policy: Policy,
        replan: Replan,
        on: Subject,
        before: Adaptation | None = None,
        passes: int = 0,
    ) -> None:
        if not policy.bounded:
            replan = replace(replan, stale=None)
        self.policy, self.replan, self._on = policy, replan, on
        self.running = False
        self.history: list[dict[str, Any]] = [] if before is None else before.history
        self.passes = passes
        # the plan in force may be a chosen one
        targets = before._targets if before else targets_of(on.plan, replan.mixed)
        self._targets: dict[str, Target] = targets
        # None: no trial has ended
        self._weights: dict[str, float] | None = None if before is None else before._weights
        of = on.place, on.runner.check
        self._deciders = {k: Decider(policy, replan, t, *of) for k, t in self._targets.items()}
        for kind, decider in self._deciders.items():
            if before is not None:
                decider.carry_on(before._deciders[kind])
        named = self._targets[GRADIENTS].shapes if GRADIENTS in self._targets else ()
        self._summed = {name for i, name in enumerate(named) if on.place.sums(i)}
        self._sums: dict[str, torch.Tensor] = {}
        self._count = 0  # passes of the running window so far
        self._lock = threading.Lock()
        self._waiting: EndedWindow | None = None  # the newest, until its round begins
        self._rounds = 0
        self._script: Running | None = None

    # ---- passes

    def ended(self) -> EndedWindow | None:
        """The window that ends with the running pass, all of whose averages are known."""
        decides = self.replan.decides(self.passes)
        if not self._count or not (decides or self.replan.checks(self.passes)):
            return None
        ended = EndedWindow({kind: self._window(kind) for kind in self._targets}, not decides)
        self._sums, self._count = {}, 0
        with self._lock:
            if self._waiting is not None:
                self._waiting.values = None
            self._waiting = ended
        return ended

    def begin(self) -> None:
        """A pass begins."""
        self.running = False
        if not self._weighs:
            self.passes += 1
            self.running = self.replan.sums(self.passes)
        self._count += self.running

    @property
    def _weighs(self) -> bool:
        """Whether a trial of weights is to come, or runs."""
        return self.replan.weigh == "time" and self._weights is None and GRADIENTS in self._targets

    def _window(self, kind: str) -> Window:
        if kind == GRADIENTS:
            values = {name: summed.div_(self._count) for name, summed in self._sums.items()}
        else:
            values = {
                name: self._on.shard(name).to(torch.float32, copy=True).view(-1)
                for name in self._targets[kind].shapes
            }
        return Window(self.passes, values, self._targets[kind].methods(self._on.plan))

    def add(self, name: str, average: torch.Tensor) -> None:
        """Note an average, or this rank's shard of it; the tensor is only read."""
        if not self.running or name not in self._summed:
            return
        known = self._sums.get(name)
        if known is None:
            self._sums[name] = average.detach().to(torch.float32, copy=True).view(-1)
        else:
            known += average.detach().view(-1)

    # ---- its script

    def start(self) -> None:
        """Decide from now on."""
        self._script = self._on.runner.start(self._decides())

    def stop(self) -> None:
        """Decide no more; called by a script."""
        assert self._script is not None
        self._on.runner.stop(self._script)

    def _decides(self) -> Script:
        try:
            if self._weighs:
                yield from self._weigh()
            while True:
                ended = yield NextWindow()
                yield from self._round(ended.window)
        except Exception as error:  # this rank cannot know what others do
            why = f"{reason(error)}; the policy ends"
            self._failed(self.passes, next(iter(self._targets)), why, time.perf_counter())
            self.running = False

    def _weigh(self) -> Script:
        """Learn what bytes cost before the first decision."""
        target = self._targets[GRADIENTS]

        def changed(methods: Mapping[str, Aggregator]) -> Make:
            return partial(self._changed, {GRADIENTS: methods})

        yield Passes(AFTER)
        try:
            weights, line = yield from weighed(target, self._on.bucket_names(), changed)
        except ConfigError as error:  # alike on all ranks
            weights, line = {}, f"weigh=time: bytes count alike, since {error}"
        uniform = dict.fromkeys(target.shapes, target.reference)
        self._note(self.passes, GRADIENTS, line, 0, time.perf_counter())
        yield Use(changed(uniform), then=partial(setattr, self, "_weights", weights))

    def _weights_of(self, kind: str) -> dict[str, float]:
        """What a byte of each parameter counts, where not 1."""
        if kind != GRADIENTS or self.replan.weigh == "bytes":
            return {}
        if self.replan.weigh == "priority":
            return priorities(self._on.bucket_names())
        return self._weights or {}

    def _round(self, ended: EndedWindow) -> Script:
        """Decide on a window, unless a rank has dropped it."""
        with self._lock:
            windows, ended.values = ended.values, None
            if self._waiting is ended:
                self._waiting = None
        self._rounds += 1
        key = f"round {self._rounds}"
        every = yield Tell(f"{key}/begins", windows is not None)
        if windows is None or not all(every):
            return
        begun = time.perf_counter()
        rulings: dict[str, tuple[float | None, Ruling]] = {}
        failed: dict[str, str] = {}
        for kind, window in windows.items():
            decider = self._deciders[kind]
            try:
                grown = None
                if ended.check:
                    grown = yield from decider.grown(key, window)
                    if not self._is_stale(window, kind, grown):
                        continue
                rulings[kind] = (
                    grown,
                    (yield from decider.decide(key, window, self._weights_of(kind))),
                )
            except Exception as error:
                failed[kind] = reason(error)
        # A ruling may have come too late for a rank.
        every = yield Tell(f"{key}/ends", failed)
        failed = {kind: why for one in reversed(every) for kind, why in one.items()}
        changed: dict[str, dict[str, Aggregator]] = {}
        for kind, window in windows.items():
            if kind in failed:
                self._failed(window.number, kind, failed[kind], begun)
            if kind in failed or kind not in rulings:
                continue
            grown, ruling = rulings[kind]
            # Earlier updates are prepared, or refused on all ranks: plans are equal here.
            before = self._targets[kind].methods(self._on.newest)
            chosen = self._targets[kind].chosen(ruling.choices)
            changed[kind] = {name: m for name, m in chosen.items() if m != before[name]}
            self._decided(window, kind, grown, ruling, len(changed[kind]), begun)
        if any(changed.values()):
            try:
                yield Use(partial(self._changed, changed))
            except ConfigError as error:  # alike on all ranks
                kind = next(kind for kind, methods in changed.items() if methods)
                self._failed(windows[kind].number, kind, reason(error), begun)

    def _changed(self, methods: Methods, before: Plan) -> Plan:
        return self._with(methods, replace(before, version=before.version + 1))

    def _with(self, methods: Methods, plan: Plan) -> Plan:
        return self._on.remade(*with_methods(plan, methods))

    def _is_stale(self, window: Window, kind: str, grown: float | None) -> bool:
        assert self.replan.stale is not None
        if grown is not None and self._on.place.first:
            said = "pass %d: %s: the plan's error over uniform's is %.3f times what was planned"
            log.debug(said, window.number, kind, grown)
        return grown is not None and grown >= self.replan.stale

    # ---- history

    def _decided(
        self,
        window: Window,
        kind: str,
        grown: float | None,
        ruling: Ruling,
        changed: int,
        begun: float,
    ) -> None:
        line = ruling.line
        if grown is not None:
            line = f"early, as the plan's error grew by {grown:.2f} against uniform's: {line}"
        errors: dict[str, Any] = {}
        for name in ("planned_error", "error", "uniform_error", "budget"):
            value = getattr(ruling, name)
            errors[name] = value if value is not None and math.isfinite(value) else None
        self._note(window.number, kind, line, changed, begun, grown is not None, **errors)

    def _failed(self, number: int, kind: str, why: str, begun: float) -> None:
        line = f"policy {self.policy.name}: the plan stays: {why}"
        self._note(number, kind, line, 0, begun, level=logging.WARNING)

    def _note(
        self,
        number: int,
        kind: str,
        line: str,
        changed: int,
        begun: float,
        early: bool = False,
        level: int = logging.INFO,
        **more: Any,
    ) -> None:
        if self._on.runner.closed:
            return
        seconds = time.perf_counter() - begun
        row = {"pass": number, "of": kind, "line": line, "changed": changed, "seconds": seconds}
        row |= {"early": early, **more}
        with self._lock:
            self.history.append(row)
        self._on.decided({"by": self.policy.name, **row})
        if self._on.place.first:
            said = "pass %d: %s: %s; %d parameters change"
            log.log(level, said, number, kind, line, changed)

    # ---- state

    def state(self) -> dict[str, Any]:
        """To be saved: passes so far; methods of the plan in force other than the uniform plan's;
        and, on rank 0, what the policy remembers. What is summed of a window is not."""
        found: dict[str, Any] = {"passes": self.passes, "byte_weights": self._weights}
        found["methods"] = {}
        for kind, target in self._targets.items():
            methods = target.methods(self._on.plan)
            other = {n: m for n, m in methods.items() if m != target.reference}
            found["methods"][kind] = {n: aggregators.text(m, bits=True) for n, m in other.items()}
            found[kind] = self._deciders[kind].state(methods)
        return found

    def loading(self, saved: Mapping[str, Any] | None) -> tuple[Plan, Callable[[], None]] | None:
        """Check what a saved job has of the policy, once decisions have ended. All ranks call it
        between two passes.

        Returns:
            The plan in force once it is loaded, with the methods of then; and what loads it. None:
            it has nothing of a policy.

        Raises:
            ConfigError: it is something else.
        """
        if saved is None:
            return None
        self._on.runner.wait()
        try:
            passes, weights = saved["passes"], saved.get("byte_weights")
            if type(passes) is not int or passes < 0:
                raise ValueError(f"passes={passes!r:.60}")
            weights = None if weights is None else {n: float(w) for n, w in weights.items()}
            methods = {k: of.named(saved["methods"][k]) for k, of in self._targets.items()}
            loads = [
                decider.loading(saved.get(kind, {}), methods[kind])
                for kind, decider in self._deciders.items()
            ]
            plan = self._with(methods, self._on.plan)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"load_state_dict: the state has {saved!r:.60} for 'policy' ({error}): it is not a "
                "result of Handle.state_dict with this policy"
            ) from None

        def load() -> None:
            self.passes, self._sums, self._count, self.running = passes, {}, 0, False
            self._waiting, self._weights = None, weights
            for load_decider in loads:
                load_decider()
            self._on.rewrite(partial(self._with, methods))
            if self._script is not None:
                self.stop()
                self.start()

        return plan, load
