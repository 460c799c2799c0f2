"""A policy at work on a handle: it changes methods per parameter while training runs, off its path.

    1. over a window of passes, averaged gradients are summed as they arrive: each by one rank
       (DDP), or each rank's shard of it (FSDP2). Of weights, each rank copies its shards
    2. in the background ranks decide together (integrations/deciding.py)
    3. every rank requests the choices as an update of its plan, and all adopt it at the same pass
       (integrations/switch.py)

Between decisions, checks look for a plan that has gone stale (integrations/replan.py). Within the
budget the uniform plan is what `attach` was given. If a step fails on one rank, that round ends on
all, with a line in the log, and the plan stays.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gradwire.aggregators import Aggregator
from gradwire.aggregators import registry as aggregators
from gradwire.controllers import Policy
from gradwire.engine import Owner
from gradwire.errors import ConfigError
from gradwire.integrations.choices import GRADIENTS, Methods, Target, targets_of, with_methods
from gradwire.integrations.deciding import Decider, Deciders, Ruling, Window, reason
from gradwire.integrations.replan import Replan
from gradwire.integrations.serial import Serial
from gradwire.integrations.state import of_job
from gradwire.integrations.switch import Switch, Update
from gradwire.integrations.weighing import AFTER, BucketTrial, Names, priorities
from gradwire.planner import Plan, Rules

log = logging.getLogger("gradwire")

State = Mapping[str, Any]
_POLL_S = 0.2


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
        owner: of the handle.
        switch: its plans.
        remade: a plan with other rules.
        adopt: makes the parameters run as the plan in force says.
        shards: of FSDP2: this rank's shard of a weight, by name. None: each rank has whole averages
            (DDP).
        buckets: of DDP: names of the parameters of each, in the order of sending.
        serial: where decisions run, one after the other; a queue of its own unless given.
        name: of its messages; another for each policy that a handle has had.
        ranks: that decide; those of the owner unless given.
        record: is given each row of the history.
        before: of the same policy, which this one carries on, from pass `passes`.

    Attributes:
        running: whether averages of the running pass are summed.
        passes: so far, without those of a trial of weights.
        history: of the decisions, in order: pass; of ("gradients", "weights"); early (a check found
            the plan stale); line (what was decided, and why); changed (how many parameters have
            another method than before); planned_error, error, uniform_error, budget (see
            `deciding.Ruling`; not where a round failed); seconds (from the window's end).

    Raises:
        ConfigError: there is no choice around the plan's methods.
    """

    def __init__(
        self,
        policy: Policy,
        replan: Replan,
        owner: Owner,
        switch: Switch,
        remade: Callable[[Plan, Rules], Plan],
        adopt: Callable[[], None],
        shards: Callable[[str], torch.Tensor] | None = None,
        buckets: Callable[[], Names] | None = None,
        serial: Serial | None = None,
        name: str = "policy",
        ranks: Deciders | None = None,
        record: Callable[[dict[str, Any]], None] = lambda _: None,
        before: Adaptation | None = None,
        passes: int = 0,
    ) -> None:
        if not policy.bounded:
            replan = replace(replan, stale=None)
        self.policy, self.replan = policy, replan
        self.running = False
        self.history: list[dict[str, Any]] = [] if before is None else before.history
        self.passes = passes
        # the plan in force may be a chosen one
        targets = before._targets if before else targets_of(switch.plan, replan.mixed)
        self._targets: dict[str, Target] = targets
        self._owner, self._switch = owner, switch
        self._remade, self._adopt, self._shards, self._buckets = remade, adopt, shards, buckets
        self._name, self._record = f"{owner.key}/{name}", record
        self._trial: BucketTrial | None = None
        self._trials = 0
        # None: no trial has ended
        self._weights: dict[str, float] | None = None if before is None else before._weights
        pieces = shards is not None
        self._ranks = ranks or Deciders(owner.comm)
        self._serial = serial or Serial(owner.comm.workers)
        of = self._ranks, self._name, pieces, self._go_on
        self._deciders = {k: Decider(policy, replan, t, *of) for k, t in self._targets.items()}
        for kind, decider in self._deciders.items():
            if before is not None:
                decider.carry_on(before._deciders[kind])
        named = self._targets[GRADIENTS].shapes if GRADIENTS in self._targets else ()
        here = owner.comm.rank, owner.comm.world_size
        self._summed = {n for i, n in enumerate(named) if pieces or i % here[1] == here[0]}
        self._sums: dict[str, torch.Tensor] = {}
        self._count = 0  # passes of the running window so far
        self._lock = threading.Lock()
        self._waiting: EndedWindow | None = None  # the newest, until its round begins
        self._rounds = 0
        self._closed = threading.Event()

    # ---- passes

    def begin(self, span: float | None = None) -> None:
        """Called as a pass begins, when all averages of the one before are known.

        Args:
            span: of the pass before: seconds from its first bucket's readiness to its last average.
        """
        if self._tries(span):
            self.running = False
            return
        decides = self.replan.decides(self.passes)
        if self._count and (decides or self.replan.checks(self.passes)):
            ended = EndedWindow({kind: self._window(kind) for kind in self._targets}, not decides)
            self._sums, self._count = {}, 0
            with self._lock:
                if self._waiting is not None:
                    self._waiting.values = None
                self._waiting = ended
            self._serial.submit(partial(self._round, ended))
        self.passes += 1
        self.running = not self._closed.is_set() and self.replan.sums(self.passes)
        self._count += self.running

    def _tries(self, span: float | None) -> bool:
        """Whether the running pass belongs to a trial of weights; the same on all ranks."""
        if self._trial is not None:
            if not self._trial.passed(self._switch.plan.version, span):
                return not self._closed.is_set()
            self._trial = None
        wanted = self.replan.weigh == "time" and self._weights is None
        if self._closed.is_set():
            return False
        if not wanted or self.passes != AFTER or GRADIENTS not in self._targets:
            return False
        assert self._buckets is not None  # attach refuses it elsewhere
        self._trials += 1  # another, once a state from before the first is loaded
        key = f"{self._name}/trial {self._trials}"
        self._trial = BucketTrial(
            self._targets[GRADIENTS], self._owner, key, self._switch, self._remade,
            self._buckets, self._serial, self._weighed,
        )  # fmt: skip
        return True

    def _weighed(self, weights: dict[str, float], line: str) -> None:
        self._weights = weights
        self._note(self.passes, GRADIENTS, line, 0, time.perf_counter(), early=False)

    def _weights_of(self, kind: str) -> dict[str, float]:
        """What a byte of each parameter counts, where not 1."""
        if kind != GRADIENTS or self.replan.weigh == "bytes":
            return {}
        if self.replan.weigh == "priority" and self._buckets is not None:
            return priorities(self._buckets())
        return self._weights or {}

    def _window(self, kind: str) -> Window:
        if kind == GRADIENTS:
            values = {name: summed.div_(self._count) for name, summed in self._sums.items()}
        else:
            assert self._shards is not None
            names = self._targets[kind].shapes
            values = {n: self._shards(n).to(torch.float32, copy=True).view(-1) for n in names}
        return Window(self.passes, values, self._targets[kind].methods(self._switch.plan))

    def add(self, name: str, average: torch.Tensor) -> None:
        """Note an average, or this rank's shard of it; the tensor is only read."""
        if not self.running or name not in self._summed:
            return
        known = self._sums.get(name)
        if known is None:
            self._sums[name] = average.detach().to(torch.float32, copy=True).view(-1)
        else:
            known += average.detach().view(-1)

    def close(self) -> None:
        """Decide no more: the handle is detached. A running round ends after the parameter that it
        is at, and is waited for."""
        self._closed.set()
        self.running = False
        self._sums, self._count = {}, 0
        self._serial.close()

    def join(self) -> None:
        """After `close`: wait for the background, for some seconds at most."""
        self._serial.join()

    # ---- in the background

    def _go_on(self) -> None:
        """Raise Detached if the handle is, TransportError if the group is broken or closed."""
        self._serial.check()
        self._owner.comm.check()

    def _round(self, ended: EndedWindow) -> None:
        """Decide on a window, unless a rank has dropped it. All ranks have the same rounds, at the
        same place among what runs in the background."""
        if self._closed.is_set():
            return
        with self._lock:
            windows = ended.values
            if self._waiting is ended:
                self._waiting = None
        self._rounds += 1
        key = f"{self._name}/round {self._rounds}"
        try:
            every = self._ranks.all_tell(f"{key}/begins", windows is not None, self._go_on)
        except Exception as error:  # this rank cannot know what others do
            line = f"policy {self.policy.name}: the plan stays: {reason(error)}; the policy ends"
            kind = next(iter(self._targets))
            self._note(self.passes, kind, line, 0, time.perf_counter(), early=False)
            self._closed.set()
            return
        if windows is not None and all(every):
            self._decide(key, windows, ended.check)

    def _decide(self, key: str, windows: Mapping[str, Window], check: bool) -> None:
        """Decide about each target, or check it first, and request what has changed."""
        begun = time.perf_counter()
        rulings: dict[str, tuple[float | None, Ruling]] = {}
        failed: dict[str, str] = {}
        for kind, window in windows.items():
            try:
                grown = self._deciders[kind].grown(window) if check else None
                if check and not self._is_stale(window, kind, grown):
                    continue
                rulings[kind] = grown, self._deciders[kind].decide(window, self._weights_of(kind))
            except Exception as error:
                failed[kind] = reason(error)
        ends = False
        try:
            failed = self._confirmed(key, failed)
        except Exception as error:  # this rank cannot know what others do
            failed = dict.fromkeys(windows, f"{reason(error)}; the policy ends")
            ends = True
        changed: dict[str, dict[str, Aggregator]] = {}
        for kind, window in windows.items():
            if kind in failed:
                self._failed(window, kind, failed[kind], begun)
            if kind in failed or kind not in rulings:
                continue
            grown, ruling = rulings[kind]
            # Earlier updates are prepared, or refused on all ranks: plans are equal here.
            before = self._targets[kind].methods(self._switch.newest)
            chosen = self._targets[kind].chosen(ruling.choices)
            changed[kind] = {name: m for name, m in chosen.items() if m != before[name]}
            self._decided(window, kind, grown, ruling, len(changed[kind]), begun)
        if ends:
            self._closed.set()
        if any(changed.values()) and not self._closed.is_set():
            try:
                self._await(self._switch.ask(partial(self._changed, changed)))
            except Exception as error:  # alike on all ranks
                self._serial.check()
                kind = next(kind for kind, methods in changed.items() if methods)
                self._failed(windows[kind], kind, reason(error), begun)

    def _confirmed(self, key: str, failed: dict[str, str]) -> dict[str, str]:
        """What has failed on any rank: a ruling may have come too late for one."""
        every = self._ranks.all_tell(f"{key}/ends", failed, self._go_on)
        return {kind: why for one in reversed(every) for kind, why in one.items()}

    def _await(self, update: Update) -> None:
        while True:
            try:
                update.wait(_POLL_S)
                return
            except FutureTimeout:
                self._go_on()

    def _changed(self, methods: Methods, before: Plan) -> Plan:
        return self._with(methods, replace(before, version=before.version + 1))

    def _is_stale(self, window: Window, kind: str, grown: float | None) -> bool:
        assert self.replan.stale is not None
        if grown is not None and self._ranks.tells:
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
        figures = {
            "planned_error": ruling.planned_error, "error": ruling.error,
            "uniform_error": ruling.uniform_error, "budget": ruling.budget,
        }  # fmt: skip
        errors = {k: v if v is None or math.isfinite(v) else None for k, v in figures.items()}
        self._note(window.number, kind, line, changed, begun, early=grown is not None, **errors)

    def _failed(self, window: Window, kind: str, why: str, begun: float) -> None:
        if self._closed.is_set():
            return
        line = f"policy {self.policy.name}: the plan stays: {why}"
        self._note(window.number, kind, line, 0, begun, early=False)

    def _note(
        self, number: int, kind: str, line: str, changed: int, begun: float, **more: Any
    ) -> None:
        seconds = time.perf_counter() - begun
        row = {"pass": number, "of": kind, "line": line, "changed": changed, "seconds": seconds}
        with self._lock:
            self.history.append({**row, **more})
        self._record({"by": self.policy.name, **row, **more})
        if self._ranks.tells:
            said = "pass %d: %s: %s; %d parameters change"
            log.info(said, number, kind, line, changed)

    # ---- state

    def state(self) -> dict[str, Any]:
        """To be saved: passes so far; methods of the plan in force other than the uniform plan's;
        and, on rank 0, what the policy remembers. What is summed of a window is not."""
        found: dict[str, Any] = {
            "passes": self.passes,
            "methods": {},
            # While a trial runs, ranks learn them at different times.
            "byte_weights": self._weights if self._trial is None else None,
        }
        for kind, target in self._targets.items():
            methods = target.methods(self._switch.plan)
            other = {n: m for n, m in methods.items() if m != target.reference}
            found["methods"][kind] = {name: aggregators.text(m) for name, m in other.items()}
            found[kind] = self._deciders[kind].state(methods)
        return found

    def loading(self, states: Sequence[State]) -> tuple[Plan, Callable[[], None]] | None:
        """Check what states of one or all ranks of a saved job have of the policy, once decisions
        have ended. All ranks call it between two passes.

        Returns:
            The plan in force once it is loaded, with the methods of then; and what loads it. None:
            they have nothing of a policy.

        Raises:
            ConfigError: it is something else.
        """
        saved = of_job(states).get("policy")
        if saved is None:
            return None
        self._serial.wait()
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
            plan = self._with(methods, self._switch.plan)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"load_state_dict: the state has {saved!r:.60} for 'policy' ({error}): it is not a "
                "result of Handle.state_dict with this policy"
            ) from None

        def load() -> None:
            self.passes, self._sums, self._count, self.running = passes, {}, 0, False
            self._waiting = self._trial = None
            self._weights = weights
            for load_decider in loads:
                load_decider()
            self._switch.change(partial(self._with, methods))
            self._adopt()

        return plan, load

    def _with(self, methods: Methods, plan: Plan) -> Plan:
        return self._remade(*with_methods(plan, methods))
