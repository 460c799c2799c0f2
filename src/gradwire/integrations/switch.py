"""Plans in turn: a new one is prepared while the old one runs, and adopted by all ranks at once.

A *pass* is one synchronised backward pass. Versions count from 0; each `update` has the next.

    prepare   on a thread that nobody waits for: ranks compare the plan, then compile what it will
              run, and agree on that, version after version
    offer     as a pass begins, each rank notes the newest version that it has prepared; messages
              carry it, and whoever merges messages takes the least (engine/message.py)
    adopt     so when a pass has ended, every rank knows the least that any had noted; with the next
              pass that version is in force, on all ranks

Nobody waits, and no two plans meet within a pass. Where messages keep a stream's order no host sees
them: there one more number is all-reduced per pass, on the device, and a rank that has offered a
version waits for it once, as the next pass begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from gradwire.collectives import Collective
from gradwire.engine import Owner
from gradwire.errors import ConfigError
from gradwire.planner import Plan

log = logging.getLogger("gradwire")

MOST_VERSIONS = 1 << 16  # that a message header can tell apart


class Update:
    """What `Handle.update` returns.

    Attributes:
        version: of the plan that it asks for.
    """

    def __init__(self, version: int, switch: Switch) -> None:
        self.version = version
        self._switch = switch
        self._prepared: Future[None] = Future()

    @property
    def in_force(self) -> bool:
        """Whether a pass has begun with this plan, or a later one."""
        return self._switch.plan.version >= self.version

    def wait(self, timeout: float | None = None) -> None:
        """Until this rank has prepared it; it is adopted once all have.

        Raises:
            ConfigError: ranks asked for unlike plans; the one before stays in force.
            TransportError: a peer did not answer, or has failed.
            TimeoutError: after `timeout` seconds.
        """
        self._prepared.result(timeout)


class Switch:
    """The plans of one handle.

    Args:
        plan: in force from the beginning.
        owner: whose rounds follow it.
        rehearse: the collectives that a plan will run, being prepared (integrations/rehearsal.py).

    Attributes:
        plan: in force.
        newest: the plan that was asked for last.
    """

    def __init__(
        self, plan: Plan, owner: Owner, rehearse: Callable[[Plan], Sequence[Collective]]
    ) -> None:
        self.plan = plan
        self.newest = plan
        self._owner = owner
        self._rehearse = rehearse
        self._lock = threading.Lock()
        self._plans = {plan.version: plan}  # in force, and prepared
        self._prepared = plan.version
        self._waiting: list[tuple[Plan, Update]] = []
        self._busy = False
        self._refused: ConfigError | None = None

    # ---- asking for a plan ---------------------------------------------------------------------

    def ask(self, make: Callable[[Plan], Plan]) -> Update:
        """Have the plan that `make` makes of the newest one prepared and adopted.

        Raises:
            ConfigError: what `make` raises; or as many updates as versions can be told apart.
        """
        with self._lock:
            plan = make(self.newest)
            if plan.version >= MOST_VERSIONS:
                raise ConfigError(f"{MOST_VERSIONS} updates of one handle: detach and attach anew")
            self.newest = plan
            update = Update(plan.version, self)
            self._waiting.append((plan, update))
            if self._busy:
                return update
            self._busy = True
        self._owner.comm.workers.run(self._work)
        return update

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                plan, update = self._waiting.pop(0)
            try:
                self._prepare(plan)
            except ConfigError as error:
                self._refuse(plan, update, error)
            except BaseException as error:
                # Alone with this failure, we would keep the others from ever switching.
                self._owner.comm.fail_owner(self._owner, error)
                update._prepared.set_exception(error)
            else:
                with self._lock:
                    self._plans[plan.version] = plan
                    self._prepared = plan.version
                update._prepared.set_result(None)

    def _prepare(self, plan: Plan) -> None:
        """Until this rank can run `plan`; raises ConfigError on all ranks, or on none."""
        comm, name = self._owner.comm, f"{self._owner.key}/plan {plan.version}"
        what = "an update of what is attached"
        comm.agreement(name, what, plan.describe()).result()
        # What goes wrong on one rank alone must be known to all before one of them goes on.
        collectives: Sequence[Collective] = ()
        verdict = "rehearsed"
        try:
            collectives = self._rehearse(plan)
        except Exception as error:
            verdict = f"refused by rank {comm.rank}: {type(error).__name__}: {error}"
        comm.agreement(f"{name}, rehearsed", what, [verdict]).result()
        if verdict != "rehearsed":
            raise ConfigError(f"{what}: {verdict}")
        for collective in collectives:
            collective.prepared.reserve()

    def _refuse(self, plan: Plan, update: Update, error: ConfigError) -> None:
        """All ranks find so: this version is the one before, and the next forward says why."""
        with self._lock:
            same = replace(self._plans[self._prepared], version=plan.version)
            if self.newest is plan:
                self.newest = same
            self._plans[plan.version] = same
            self._prepared = plan.version
            self._refused = error
        log.error("%s", error)
        update._prepared.set_exception(error)

    def refusal(self) -> ConfigError | None:
        """Why an update was refused, once."""
        with self._lock:
            error, self._refused = self._refused, None
        return error

    # ---- passes --------------------------------------------------------------------------------

    def begin(self, least: int) -> int:
        """A pass begins, after one in which `least` was the least version that any rank offered.

        Returns:
            The version that this rank offers; `plan` is in force.
        """
        with self._lock:
            if least > self.plan.version:
                self.plan = self._plans[least]
                for version in [v for v in self._plans if v < least]:
                    del self._plans[version]
            return self._prepared
