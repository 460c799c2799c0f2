"""Switches plans: a new plan is prepared while the old one runs, and all ranks adopt it at the same
pass.

A *pass* is one synchronised backward pass. Versions count from 0; each `update` has the next.

    prepare   on a background thread: ranks compare the plan, then compile the programs of its
              scopes and agree on them, version after version
    offer     as a pass begins, each rank samples the newest version that it has prepared; messages
              carry it, and merges take the minimum (engine/message.py)
    adopt     at the end of a pass every rank knows the minimum over all ranks; this version is in
              force from the next pass on; if it was refused, the forward after that raises

Training does not wait, and a pass has one plan on all ranks. In stream order the host sees no
message headers: there one more number is all-reduced per pass, on the device, and a rank that has
offered a new version waits for it once, as the next pass begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

from gradwire.collectives import ScopeProgram
from gradwire.decide.scripts import CLOSING_S, Detached
from gradwire.engine import Owner, ranks_of
from gradwire.engine.workers import Lane
from gradwire.errors import ConfigError
from gradwire.planner import Plan
from gradwire.waiting import result_of, until_done

log = logging.getLogger("gradwire")

_WHAT = "an update of the plan"
_TAKEN = "accepted"  # else the line that another rank shows beside a refusal is the plan's
MOST_VERSIONS = 1 << 16  # the range of the version in a message header


class Update:
    """What `Handle.update` returns.

    Attributes:
        version: of the requested plan.
    """

    def __init__(self, version: int, switch: Switch) -> None:
        self.version = version
        self._switch = switch
        self._prepared: Future[None] = Future()

    @property
    def in_force(self) -> bool:
        """Whether a pass has begun with this plan, or a later one; never if it was refused."""
        return self.over and not self._is_refused

    @property
    def over(self) -> bool:
        """Whether it is in force, or the plan before it in its place."""
        return self._switch.plan.version >= self.version

    @property
    def _is_refused(self) -> bool:
        return self._prepared.done() and self._prepared.exception() is not None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until this rank has prepared it; it is adopted once all ranks have.

        Raises:
            ConfigError: ranks requested different plans; the previous plan stays in force.
            TransportError: a peer did not answer, or has failed.
            TimeoutError: after `timeout` seconds.
        """
        result_of(self._prepared) if timeout is None else self._prepared.result(timeout)

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        if self._is_refused:
            state = "refused: the plan before it stays in force"
        elif self.in_force:
            state = "in force"
        elif self._switch._closed:
            state = "dropped: the handle has gone on without it"
        elif self._prepared.done():
            state = "pending: prepared here, in force from the next passes on, on all ranks at once"
        else:
            state = "pending: being prepared; wait() returns when it is"
        return f"update to plan {self.version}: {state}"


class Switch:
    """The plans of one handle.

    Args:
        plan: the initial plan.
        owners: of the rounds that use it: one for each process group, so that what the first group
            says is told to the ranks of the second.
        rehearse: prepares the programs of a plan (handles/rehearsal.py).

    Attributes:
        plan: the plan in force.
        newest: the plan requested last.
    """

    def __init__(
        self,
        plan: Plan,
        owners: Sequence[Owner],
        rehearse: Callable[[Plan], Sequence[ScopeProgram]],
    ) -> None:
        self.plan = plan
        self.newest = plan
        self._owners = owners
        self._rehearse = rehearse
        self._lock = threading.Lock()
        of = owners[0].comm.workers, "plans", log.exception
        self._lane = Lane(*of, lambda: None, lambda: False)
        self._plans = {plan.version: plan}  # the plan in force, and prepared ones
        self._prepared = plan.version
        self._asked: list[Update] = []  # those in force are left out in time
        self._closed = False
        self._refused: dict[int, ConfigError] = {}  # by version, until it is in force

    # ---- requests and preparation --------------------------------------------------------------

    def ask(self, make: Callable[[Plan], Plan]) -> Update:
        """Request a plan, made by `make` from the newest one: prepare it, and adopt it. What `make`
        raises refuses this version on all ranks, on which it may have raised nothing.

        Raises:
            ConfigError: raised by `make`; after `MOST_VERSIONS` updates; or in a forked child.
        """
        self._owners[0].check_process()
        with self._lock:
            if self.newest.version + 1 >= MOST_VERSIONS:
                raise ConfigError(
                    f"a handle has at most {MOST_VERSIONS} updates: detach and attach again"
                )
            refused = None
            try:
                plan = make(self.newest)
            except ConfigError as error:
                plan, refused = replace(self.newest, version=self.newest.version + 1), error
            self.newest = plan
            update = Update(plan.version, self)
            self._asked = [*(u for u in self._asked if not u.over), update]
            self._lane.put(self._work, plan, update, refused)
        if refused is not None:
            raise refused
        return update

    def pending(self) -> list[Update]:
        """The updates that are not over, oldest first; none once the handle is detached."""
        with self._lock:
            return [] if self._closed else [*(u for u in self._asked if not u.over)]

    def _work(self, plan: Plan, update: Update, refused: ConfigError | None) -> None:
        try:
            if refused is None:
                self._prepare(plan)
            else:
                self._agree(f"plan {plan.version}", [f"refused: {refused}"])
        except ConfigError as error:
            self._refuse(plan, update, error)
        except Detached:
            update._prepared.set_exception(ConfigError(f"{_WHAT}: the handle was detached"))
        except BaseException as error:
            # Peers could never switch if only this rank failed, so fail the owner everywhere.
            for owner in self._owners:
                owner.comm.fail_owner(owner, error)
            update._prepared.set_exception(error)
        else:
            if refused is not None:
                self._refuse(plan, update, refused, known=True)
                return
            with self._lock:
                self._plans[plan.version] = plan
                self._prepared = plan.version
            update._prepared.set_result(None)

    def close(self) -> None:
        """Prepare nothing more: the handle is detached."""
        self._closed = True

    def join(self) -> None:
        """After `close`: wait for what is being prepared, for some seconds at most."""
        wait([update._prepared for update in self._asked], CLOSING_S)

    def check(self) -> None:
        if self._closed:
            raise Detached
        for owner in self._owners:
            owner.check()

    def _prepare(self, plan: Plan) -> None:
        """Prepare `plan` on this rank; raises ConfigError on all ranks, or on none."""
        self.check()
        name = f"plan {plan.version}"
        self._agree(name, [_TAKEN, *plan.describe()])
        # An error on one rank must reach all ranks before any of them continues.
        programs: Sequence[ScopeProgram] = ()
        verdict = "rehearsed"
        try:
            programs = self._rehearse(plan)
        except Exception as error:
            verdict = f"refused: {type(error).__name__}: {error}"
        what = [line for program in programs for line in program.lines]
        self._agree(f"{name}, rehearsed", [verdict, *what])
        if verdict != "rehearsed":
            raise ConfigError(f"{_WHAT}: {verdict}")
        for program in programs:
            program.begin()
        for program in programs:
            program.reserve()

    def _agree(self, name: str, said: list[str]) -> None:
        comms, keys = [o.comm for o in self._owners], [o.key for o in self._owners]
        ranks = ranks_of(comms, keys, self.check, breaks=False)
        ranks.agree(name, _WHAT, said).result()

    def _refuse(self, plan: Plan, update: Update, error: ConfigError, known: bool = False) -> None:
        """Refuse `plan`, on all ranks: its version gets the previous plan, and once it is in force,
        the next forward raises the error, unless all callers know it."""
        with self._lock:
            same = replace(self._plans[self._prepared], version=plan.version)
            if self.newest is plan:
                self.newest = same
            self._plans[plan.version] = same
            self._prepared = plan.version
            if not known:
                self._refused[plan.version] = error
        if not known:
            log.error("%s", error)
        update._prepared.set_exception(error)

    def refusal(self) -> ConfigError | None:
        """The error of a refused update, returned once, when its version is in force: ranks learn
        of it at different steps. Of several, that of the newest."""
        with self._lock:
            errors = [self._refused.pop(v) for v in [*self._refused] if v <= self.plan.version]
        return errors[-1] if errors else None

    def change(self, change: Callable[[Plan], Plan]) -> None:
        """Change every plan, that in force too, without preparing it again. All ranks call it
        between two passes; it waits until this rank has prepared what was requested."""
        while True:
            for update in list(self._asked):
                until_done(update._prepared)
            with self._lock:
                if all(update._prepared.done() for update in self._asked):
                    self._plans = {version: change(plan) for version, plan in self._plans.items()}
                    self.newest, self.plan = change(self.newest), self._plans[self.plan.version]
                    return

    def prepared(self, version: int) -> Plan:
        """A version that this rank has prepared, and not left behind yet."""
        with self._lock:
            return self._plans[version]

    # ---- passes --------------------------------------------------------------------------------

    def begin(self, least: int) -> int:
        """Begin a pass; `least` is the least version that any rank offered in the previous one.

        Returns:
            The version that this rank offers; `plan` is in force.
        """
        with self._lock:
            if least > self.plan.version:
                self.plan = self._plans[least]
                for version in [v for v in self._plans if v < least]:
                    del self._plans[version]
            return self._prepared
