"""How one handle's module reduces its gradients: the passes it makes, its plans, and totals.

A *pass* is one synchronised backward pass. As it begins, the newest plan that all ranks have
prepared comes into force. handles/buckets.py has the passes of DDP modules,
handles/scatters.py those of FSDP2 modules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gradwire.aggregators import Attached, Observation, drop_programs
from gradwire.collectives import AllReduce, ScopeProgram
from gradwire.collectives.calling import begin
from gradwire.decide.scripts import DecidingRank, Make, Runner
from gradwire.engine import Communicator, Outcome, Owner, ranks_of
from gradwire.errors import ConfigError, GradwireError, TransportError
from gradwire.handles.bias import warn_of_bias
from gradwire.handles.metrics import Metrics
from gradwire.handles.summary import Expected, unfit
from gradwire.handles.switch import Switch
from gradwire.planner import Plan, Rules
from gradwire.state.state import UNSHARDED, StateSection
from gradwire.waiting import result_of

if TYPE_CHECKING:
    from gradwire.controllers import Policy
    from gradwire.controllers.replan import Replan
    from gradwire.decide.auto import Auto, Automatic
    from gradwire.decide.policy import Adaptation

State = Mapping[str, Any]
_TOTALS = ("steps", "calls", "wire_bytes", "raw_bytes", "replicas_wire_bytes", "kernel_calls")
_SECONDS = ("seconds", "exposed_seconds", "kernel_seconds")


class Reductions:
    """The reductions of one handle, installed in its module.

    Args:
        plan: the first one.
        members: the parameters, by name.
        owners: of its collectives, one for each process group over which gradients are reduced.
        ranks: that take part in an average.

    Attributes:
        installed: whether the module calls them.
        switch: the plans.
        metrics, sampler: of passes.
        runner: of the scripts that change plans.
        adaptation: of a policy, which is given averages; None: there is none at work.
        automatic: mode; None: it is not asked for.
        decisions: of both, see `Handle.history`.
        reduced: the dtype of gradients, by name, where it may not be the parameter's.
    """

    what: ClassVar[str]  # is attached, in words
    after_error = ""  # what to do after an exception in backward
    sharding = UNSHARDED
    idle = False  # whether no gradient is given to members

    def __init__(
        self, plan: Plan, members: Mapping[str, Attached], owners: Sequence[Owner], ranks: int
    ) -> None:
        self.installed = True
        self.members, self.owners, self.ranks = members, list(owners), ranks
        self.metrics = Metrics(ranks)
        self.sampler = self.metrics.sampler
        self.switch = Switch(plan, self.owners, self.rehearse)
        self.runner = Runner(
            self.owner.comm.workers, self.tell, self.switch.ask, self.owner.comm.check
        )
        self.adaptation: Adaptation | None = None
        self.automatic: Automatic | None = None
        self.decisions: list[dict[str, Any]] = []
        self.reduced: Mapping[str, torch.dtype] = {}
        self._lock = threading.Lock()
        self._totals: dict[str, float] = dict.fromkeys(_TOTALS, 0) | dict.fromkeys(_SECONDS, 0.0)
        self._version = plan.version  # that this rank offers in the running pass
        self._least: int | None = None  # the least version that any rank offers, if known
        # In stream order, of the running pass: that version, on a device once a collective ends.
        self._word: tuple[torch.Tensor, Future[Outcome]] | None = None

    @property
    def owner(self) -> Owner:
        """That of the gradients' first collective in a pass."""
        return self.owners[0]

    def all_owners(self) -> list[Owner]:
        """Those of other collectives, too."""
        return self.owners

    def comms(self) -> list[Communicator]:
        return list(dict.fromkeys(owner.comm for owner in self.all_owners()))

    def check_living(self, verb: str) -> None:
        """Raise ConfigError if no pass can run any more."""
        if not all(comm.alive() for comm in self.comms()):
            raise ConfigError(
                f"{verb}: the process group of this handle was destroyed: attach again in the new "
                "one"
            )

    # ---- passes

    @property
    def steps(self) -> int:
        """Passes so far."""
        return int(self._totals["steps"])

    def totals(self) -> dict[str, float]:
        """See `Handle.stats`."""
        with self._lock:
            return dict(self._totals)

    def count(self, *outcomes: Outcome, **more: float) -> None:
        """Add to the totals: collectives that have ended, and numbers by name. What they sent is
        added together with the raw bytes that they stand for: another thread may read totals at any
        time, and divides one by the other."""
        with self._lock:
            for outcome in outcomes:
                self._totals["calls"] += 1
                self._totals["wire_bytes"] += outcome.wire_bytes
                self._totals["kernel_seconds"] += outcome.kernel_seconds
                self._totals["kernel_calls"] += outcome.kernel_calls
            for name, number in more.items():
                self._totals[name] += number

    def begin(self, span: float | None = None) -> None:
        """Begin a pass, after all collectives of the previous one have ended. The newest plan that
        all ranks have prepared comes into force.

        Args:
            span: seconds that the previous pass took, if known.
        """
        least = self._agreed()
        window = None if self.adaptation is None else self.adaptation.ended()
        self.runner.begin(self.switch.plan.version, span, window)
        if self.adaptation is not None:
            self.adaptation.begin()
        self.count(steps=1)
        self.sampler.begin(self.steps)
        before = self.switch.plan
        self._version = self.switch.begin(before.version if least is None else least)
        self._least = self._word = None
        if self.switch.plan is not before:
            self.adopt()
            self.owner.comm.runs.mark(f"adopt: plan {self.switch.plan.version}")

    def _agreed(self) -> int | None:
        """The least version that any rank offered in the previous pass, if known."""
        if self._word is not None and self._version > self.switch.plan.version:
            values, told = self._word
            result_of(told)
            return int(values.item())  # the host waits for its stream
        return self._least

    def tell_version(self, device: torch.device) -> None:
        """Exchange plan versions in a pass in stream order, where the host sees no headers; without
        waiting."""
        values = torch.tensor([self._version], dtype=torch.int32, device=device)
        for owner in self.owners:
            if self._word is not None:
                result_of(self._word[1])  # the stream waits
            self._word = values, begin(owner, AllReduce(values, "min"), "plan version")[0]

    def know(self, least: int | None) -> None:
        """Note the least version that any rank offers in this pass, as messages had it."""
        if least is not None:
            with self._lock:
                self._least = least if self._least is None else min(self._least, least)

    def settle(self) -> None:
        """Wait for what backward has left late."""

    def after_forward(self) -> None:
        """Raise a refused update, since an error in backward would end training."""
        refusal = self.switch.refusal()
        if refusal is not None:
            raise refusal

    def abandon(self, cause: GradwireError | None = None, what: str = "backward") -> None:
        """Backward or forward ended with an exception: tell peers, who wait for what this rank was
        to send.

        Args:
            cause: of the exception, if it is known.
        """
        owners = self.all_owners()
        broken = (error for o in owners for error in (o.comm.error, o.error) if error is not None)
        known = cause or next(broken, None)  # a peer's, which others share no group with
        for owner in owners:
            owner.comm.fail_owner(owner, known or self.early_end(owner, what))

    def unrecovered(self) -> str:
        """What has to be done before `Handle.recover`, if anything."""
        return ""

    def early_end(self, owner: Owner, what: str) -> TransportError:
        """The error for peers, where backward or forward ended with an exception."""
        rank = owner.comm.rank
        return TransportError(
            f"rank {rank}: {what} raised an exception at step {self.steps} of {owner.name}, so "
            f"its gradients are not complete: see what rank {rank} raised{self.after_error}",
            peer=rank,
        )

    # ---- plans

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.switch.plan

    @property
    def newest(self) -> Plan:
        """The plan requested last."""
        return self.switch.newest

    def rewrite(self, change: Make) -> None:
        """Change all plans, that in force too, between two passes, and run as they say."""
        self.switch.change(change)
        self.adopt()

    def adopt(self) -> None:
        """Run as the plan in force says, from the running pass on."""
        plan = self.switch.plan
        for planned in plan.parameters:
            self.members[planned.name].adopt(plan.levels.aggregator(planned))
        for owner in self.owners:
            drop_programs(owner, plan.version)

    def remade(self, plan: Plan, rules: Rules) -> Plan:
        """`plan` with other rules; raises ConfigError if there is none."""
        made = self.planned(plan, rules)
        warn_of_bias(made, self.ranks, "handle.update")  # it may be an error: nothing changes then
        return made

    def planned(self, plan: Plan, rules: Rules) -> Plan:
        raise NotImplementedError

    def methods(self, given: dict[str, Any], options: Mapping[str, object]) -> dict[str, Any]:
        """The codecs in the arguments of an update, with defaults of this kind of module."""
        return given

    def changed(self, plan: Plan, given: Mapping[str, Any]) -> Plan:
        """`plan` with arguments of an update that only one kind of module has.

        Raises:
            ConfigError: one has a wrong value, or is for another kind of module.
        """
        raise NotImplementedError

    def rehearse(self, plan: Plan) -> Sequence[ScopeProgram]:
        """Prepare the programs of `plan`."""
        raise NotImplementedError

    # ---- what decides

    def adapt(
        self,
        policy: Policy,
        replan: Replan,
        before: Adaptation | None = None,
        passes: int = 0,
    ) -> None:
        """Let a policy choose methods from now on.

        Args:
            before, passes: of a policy to be carried on, see `Adaptation`.

        Raises:
            ConfigError: there is no choice around the plan's methods.
        """
        from gradwire.decide.policy import Adaptation  # loaded on use

        adaptation = Adaptation(policy, replan, self, before, passes)
        if self.ranks > 1:  # a single rank sends nothing
            self.adaptation = adaptation
            adaptation.start()

    def automate(self, auto: Auto) -> None:
        """Let trials choose the plan from now on."""
        from gradwire.decide.auto import automate  # loaded on use

        if self.ranks > 1:
            self.automatic = automate(auto, self)

    @property
    def place(self) -> DecidingRank:
        """This rank among those that decide."""
        comm = self.owner.comm
        return DecidingRank(comm.ranks[comm.rank], comm.rank, comm.world_size)

    def deciding(self) -> list[Communicator]:
        """Those of the ranks that decide: of shards, then of replicas."""
        return [self.owner.comm]

    def tell(self, key: str, value: Any, check: Callable[[], None]) -> list[Any]:
        """What all ranks tell that decide."""
        ranks = ranks_of(self.deciding(), f"{self.owner.key}/decisions", breaks=False)
        return ranks.tell(key, value).result(check)

    def decided(self, row: Mapping[str, Any]) -> None:
        """Note a decision of a policy or of automatic mode."""
        self.decisions.append({"step": self.steps, **row})

    def refuse_update(self) -> None:
        """Raise ConfigError for an update by the user where these make them."""
        if self.automatic is not None:
            raise ConfigError(
                'update: "auto" changes this handle\'s plan: detach, and attach with a codec'
            )
        if self.adaptation is not None:
            raise ConfigError(
                f"update: the policy {self.adaptation.policy.name} changes this handle's plan: "
                "detach, and attach without one"
            )

    def shard(self, name: str) -> torch.Tensor:
        """This rank's part of a weight."""
        raise NotImplementedError

    def bucket_names(self) -> Sequence[Sequence[str]]:
        """Of the parameters of each bucket, in the order of sending."""
        raise NotImplementedError

    def learn(self, smallest: int, steps: int) -> int:
        """See `Handle.learn_levels`."""
        raise ConfigError(
            "learn_levels: it is for FSDP2 modules; give a DDP module's codec its levels: "
            "gw.codecs.LearnedLevels.learn(gradient, bits=...)"
        )

    # ---- what is told of them

    def observe(self, observer: Callable[[Observation], None]) -> Callable[[], None]:
        """See `Handle.observe`."""
        raise ConfigError(
            f"observe: {self.what} reduces each rank's shards, and no rank has whole averages: it "
            "is for DDP modules"
        )

    def facts(self) -> dict[str, Any]:
        """Further statistics."""
        return {}

    def remarks(self) -> list[str]:
        """What a summary says besides the plan."""
        found = unfit(self.plan, self.reduced)
        trying = () if self.automatic is None else self.automatic.trying
        return [*found, f"auto: still trying {', '.join(trying)} in turn"] if trying else found

    def expected(self) -> Expected:
        """Bytes of a step."""
        raise NotImplementedError

    def sections(self) -> list[StateSection]:
        """What only one kind of module saves."""
        return []

    def remove(self) -> None:
        """Give the module its own collectives back."""
        self.installed = False
        self.runner.close()
        self.switch.close()
        if not (self.owner.is_forked or self.owner.comm.workers.owns(threading.current_thread())):
            self.runner.join()  # what runs in torch as the process ends would abort it
            self.switch.join()

    def close(self) -> None:
        """Issue nothing any more."""
        for owner in self.all_owners():
            owner.comm.close_owner(owner)
