"""Meetings of replicas: differences go out, averages come back, the outer weights step.

A meeting is a scope of the engine, as DDP's buckets are: codecs, residuals and statistics are the
same. It begins in the optimizer step after which a fragment is due, and ends `delay` steps later:
meanwhile the engine's threads send and sum. Nothing of it is applied unless all of it is there, on
every rank of every replica.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from gradwire.aggregators import OWED, Attached, Observation, Rounds
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.collectives import AllReduce, ScopeProgram
from gradwire.collectives.functional import broadcast
from gradwire.engine import Communicator, Outcome, Owner
from gradwire.errors import ConfigError, GradwireError, TransportError
from gradwire.handles.bias import warn_user
from gradwire.handles.reductions import Reductions
from gradwire.handles.rehearsal import rehearse
from gradwire.handles.summary import Expected, expected_all_reduce
from gradwire.outer_loop.fragment import KEPT, Fragment
from gradwire.outer_loop.homes import Replica, shard
from gradwire.outer_loop.meeting import OuterMeeting
from gradwire.outer_loop.settings import OuterSettings
from gradwire.planner import Plan, Rules
from gradwire.state.state import SavedJob, StateSection

_SAVED = {"every", "fragments", "lr", "momentum", "steps", "met", "weights"}
_FIXED = ("every", "fragments", "rule")  # a state is loaded where these are as they were


class OuterSteps(Reductions):
    """The meetings of one replica, which an optimizer's steps drive.

    Args:
        plan: how each weight's difference is averaged.
        members: the weights' states, by name.
        owner: of the meetings, on the group of replicas.
        settings: equal on all replicas.
        fragments: in the order in which they meet.
        replica: this one.
        inside: its ranks, which apply a meeting together; None: it has one.
        optimizer: whose steps count.
        make: a plan of other rules.

    Attributes:
        weights: by identity.
        within: the owner of what the ranks inside tell each other; None: there is one.
        lr, momentum: of the outer step, from the next meeting on.
        taken: optimizer steps so far.
        met: meetings so far, of any fragment.
        missed: the fragment whose meeting came to nothing, to be held again; None: none has.
    """

    what = "replicas that meet"

    def __init__(
        self,
        plan: Plan,
        members: Mapping[str, Attached],
        owner: Owner,
        settings: OuterSettings,
        fragments: Sequence[Fragment],
        replica: Replica,
        inside: Communicator | None,
        optimizer: torch.optim.Optimizer,
        make: Callable[[Plan, Rules], Plan],
    ) -> None:
        super().__init__(plan, members, [owner], owner.comm.world_size)
        self.settings, self.fragments = settings, list(fragments)
        self.lr, self.momentum = settings.lr, settings.momentum
        self.taken = self.met = 0
        self.missed: int | None = None
        self.replica, self.inside, self._make = replica, inside, make
        self.weights = {id(home.parameter) for home in replica.every}
        self.within = None if inside is None else inside.owner(f"{owner.name}, within a replica")
        self._turns = threading.RLock()
        self._meeting: OuterMeeting | None = None
        self._span: float | None = None
        self._hook: Any = optimizer.register_step_post_hook(lambda *_: self.stepped())

    def all_owners(self) -> list[Owner]:
        return self.owners if self.within is None else [*self.owners, self.within]

    # ---- meetings

    def stepped(self) -> None:
        """An optimizer step has ended: end the meeting whose delay is over, begin the one that is
        due."""
        with self._turns:
            self.taken += 1
            if self._meeting is not None and self.taken >= self._meeting.step + self.settings.delay:
                self.finish()
            due = self.settings.due(self.taken)
            if due is not None:
                self._begin(self.fragments[due])
                if not self.settings.delay:
                    self.finish()

    def meet(self, fragment: int) -> None:
        """Hold a fragment's meeting now."""
        self._begin(self.fragments[fragment])
        self.finish()

    def _begin(self, fragment: Fragment) -> None:
        if self.met % len(self.fragments) == 0:  # a pass is one meeting of every fragment
            self.begin(self._span)
            self._span = 0.0
        thawed = next((name for name, p in self.replica.frozen.items() if p.requires_grad), None)
        if thawed is not None:
            warn_user(
                f"outer: {thawed} was frozen as gw.outer was called, so replicas do not average "
                "it: detach, call gw.outer again"
            )
        values, fault = fragment.differences()
        observe = self._observe if self.sampler.running else None
        before_values = [v.clone() for v in values] if observe is not None else []
        by = self.lr, self.momentum
        meeting = OuterMeeting(fragment, self.taken, values, by, fault=fault)
        for member, value in zip(fragment.members, values, strict=True):
            state = member.state
            meeting.before[member.name] = {
                key: state[key].clone() for key in (RESIDUAL, OWED) if key in state
            }
            member.add_owed(value)
            if RESIDUAL in state and self.settings.residual is not None:
                state[RESIDUAL] *= self.settings.residual

        def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
            if error is None:
                self.know(rounds.least)
            nbytes = sum(v.nbytes for v in values)
            raw = 2 * (self.ranks - 1) / self.ranks * nbytes
            self.count(*outcomes, raw_bytes=raw, seconds=time.perf_counter() - meeting.begun)
            meeting.error = error
            meeting.ended.set()

        plan = self.switch.plan
        try:
            rounds = Rounds(
                self.owner, fragment.members, [*map(AllReduce, values)], plan.options, done,
                observe, before_values, self._version, plan.version,
            )  # fmt: skip
        except BaseException as error:  # nobody will end this meeting
            self._give_up(meeting)
            self.abandon(error if isinstance(error, GradwireError) else None, "a meeting")
            raise
        self._meeting = meeting
        rounds.start()
        self.count(exposed_seconds=time.perf_counter() - meeting.begun)

    def _observe(self, observation: Observation) -> None:
        if self.sampler.running:
            self.sampler.observe(self.members[observation.name], observation)

    def settle(self) -> None:
        """Wait until what a meeting has under way is there, for a state that is about to be saved;
        it is applied when its delay is over. Ranks of a replica do it at the same place.

        Raises:
            ConfigError: replicas differ, or a weight is not finite.
            TransportError: a replica failed. Nothing of the meeting is applied.
        """
        with self._turns:  # a thread that saves may come while another takes steps
            self._settle()
            if self._meeting is not None and self._meeting.steps:  # an interrupt broke it off
                self._apply(self._meeting)

    def _settle(self) -> None:
        meeting = self._meeting
        if meeting is None or meeting.is_there:
            return
        begun = time.perf_counter()
        try:
            meeting.commit(self.owner, self.within)
        except BaseException as error:
            if isinstance(error, Exception) and not meeting.prepared:
                self._give_up(meeting)
            elif meeting.tells:  # an interrupt: nobody tells twice
                self.abandon(what="a meeting")
            raise
        finally:
            self.count(*meeting.words, exposed_seconds=time.perf_counter() - begun)
        meeting.is_there = True
        self._span = (self._span or 0.0) + time.perf_counter() - meeting.begun

    def finish(self) -> None:
        """Apply what is under way, if anything, once it is there; raises as `settle`."""
        self.settle()
        if self._meeting is not None:
            self._apply(self._meeting)

    def _apply(self, meeting: OuterMeeting) -> None:
        """Step and mix. The meeting stays until that is done, for the next call to go on with."""
        meeting.steps = True
        meeting.fragment.step(meeting.values, *meeting.by, meeting.ended)
        meeting.fragment.mix(self.settings.mix)
        self._meeting, self.met = None, self.met + 1
        if self.missed is not None and self.fragments[self.missed] is meeting.fragment:
            self.missed = None
        if self.met % len(self.fragments) == 0:
            self.sampler.end()
        try:
            self.replica.spread(meeting.fragment.every)
        except TransportError as error:  # this replica is at its end: others need not wait
            self.abandon(error, "a meeting")
            raise

    def _give_up(self, meeting: OuterMeeting) -> None:
        """Have members leave out what they did before a meeting; the next difference spans it."""
        self._meeting, self.missed = None, self.fragments.index(meeting.fragment)
        for name, kept in meeting.before.items():
            self.members[name].state.update(kept)

    @property
    def prepared(self) -> bool:
        """Whether a meeting is under way that may have been applied elsewhere."""
        return self._meeting is not None and self._meeting.prepared

    def decide(self, apply: bool) -> None:
        """End a meeting that may have been applied elsewhere: apply it, or give it up."""
        if self._meeting is not None and apply:
            self._meeting.is_there = True
            self.finish()
        elif self._meeting is not None:
            self._give_up(self._meeting)

    def take(self, comm: Communicator, source: int, keys: Sequence[str] = KEPT) -> None:
        """Take what a rank of a group keeps of the outer weights. Collective."""
        if comm.world_size > 1:
            every = (kept[k] for f in self.fragments for kept in f.kept().values() for k in keys)
            for ended in [broadcast(one, source, group=comm, async_op=True) for one in every]:
                assert ended is not None
                ended.wait()

    def follow(self) -> None:
        """Go on from the outer weights."""
        shard(self.replica.sharded)
        for fragment in self.fragments:
            fragment.mix(0.0)
            self.replica.spread(fragment.every)

    # ---- plans

    def planned(self, plan: Plan, rules: Rules) -> Plan:
        return self._make(plan, rules)

    def methods(self, given: dict[str, Any], options: Mapping[str, object]) -> dict[str, Any]:
        own = {one.name for one in fields(self.settings)} - {"codec"}
        for name in own.intersection(options) | {"error_feedback"}.intersection(given):
            how = f"set outer.{name}" if name in ("lr", "momentum") else "detach, call it again"
            raise ConfigError(f"update: {name} is as gw.outer was told: {how}")
        return given

    def changed(self, plan: Plan, given: Mapping[str, Any]) -> Plan:
        for name in ("weights", "coalesce_bytes"):
            if name in given:
                raise ConfigError(f"update: {name} is not for outer synchronisation: leave it out")
        return plan

    def rehearse(self, plan: Plan) -> Sequence[ScopeProgram]:
        found: list[ScopeProgram] = []
        for fragment in (one for one in self.fragments if one.members):
            zeros = [torch.zeros_like(k.theta).reshape(-1) for k in fragment.weights.values()]
            step = max(member.step for member in fragment.members)
            of = fragment.members, [*map(AllReduce, zeros)], step
            found += rehearse(self.owner, plan, *of)
        return found

    # ---- what is told of them

    def observe(self, observer: Callable[[Observation], None]) -> Callable[[], None]:
        raise ConfigError("observe: replicas average differences of weights, and no gradients")

    def expected(self) -> Expected:
        return expected_all_reduce(self.switch.plan, self.owner.comm)

    def facts(self) -> dict[str, Any]:
        """Further statistics; see `Outer.stats`."""
        totals = self.totals()
        return {
            "rounds": self.met / len(self.fragments),
            "optimizer_steps": self.taken,
            "hidden_seconds": max(0.0, totals["seconds"] - totals["exposed_seconds"]),
            "drift": sum(f.drift**2 for f in self.fragments) ** 0.5,
        }

    def remarks(self) -> list[str]:
        facts, of, waited = self.facts(), self.settings, self.totals()["exposed_seconds"]
        every = f"every {of.every} steps" + (
            f", {len(self.fragments)} fragments {of.apart} steps apart"
            if of.apart != of.every
            else ""
        )
        late = f", {of.delay} late, mix {of.mix:g}" if of.delay or of.mix else ""
        return [
            f"{every}{late}; outer step {of.rule}, lr={self.lr:g}, momentum={self.momentum:g}",
            f"{facts['rounds']:g} rounds in {self.taken} steps",
            f"{facts['hidden_seconds']:.3g} s hidden, {waited:.3g} s waited for",
            f"drift {facts['drift']:.3g}; outer weights {self.fingerprint():08x}",
            *super().remarks(),
        ]

    def fingerprint(self) -> int:
        """A number of all outer weights and momenta, equal on all replicas."""
        found = 0
        for fragment in self.fragments:
            found = (31 * found + fragment.fingerprint()) % (1 << 32)
        return found

    # ---- state

    def sections(self) -> list[StateSection]:
        return [StateSection(self._saved, self._loading, ("outer/steps", "outer/met"))]

    def _kept(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: one for fragment in self.fragments for name, one in fragment.kept().items()}

    def _saved(self) -> dict[str, Any]:
        of = {name: getattr(self.settings, name) for name in _FIXED}
        step = {"lr": self.lr, "momentum": self.momentum}
        found = {**of, **step, "steps": self.taken, "met": self.met, "weights": self._kept()}
        meeting = self._meeting
        if meeting is not None:  # its averages are there
            names = [member.name for member in meeting.fragment.members]
            found["begun"], found["by"] = meeting.step, list(meeting.by)
            found["averages"] = dict(zip(names, meeting.values, strict=True))
        return {"outer": found}

    def _loading(self, job: SavedJob) -> Callable[[], None]:
        saved = (job.own or job.states[0]).get("outer")
        if not (isinstance(saved, Mapping) and saved.keys() >= _SAVED):
            raise ConfigError(
                "load_state_dict: the state is not of gw.outer: it has no outer weights"
            )
        saved = {"rule": "nesterov", **saved}  # which older states do not have
        self._check_counts(saved)
        for name in _FIXED:
            if saved[name] != (value := getattr(self.settings, name)):
                raise ConfigError(
                    f"load_state_dict: the state is of {name}={saved[name]}, and this is "
                    f"{name}={value}: give gw.outer what it had"
                )
        pairs = []
        for name, kept in self._kept().items():
            for key, tensor in kept.items():
                of = saved["weights"].get(name)
                there: Any = of.get(key) if isinstance(of, Mapping) else None
                if getattr(there, "shape", None) != tensor.shape or there.dtype != tensor.dtype:
                    raise ConfigError(
                        f"load_state_dict: the outer {key} of {name} is not a tensor of "
                        f"{tuple(tensor.shape)} x {tensor.dtype}: load a state of this model"
                    )
                pairs.append((tensor, there))

        meeting = self._resumed(saved)

        def load() -> None:
            self.taken, self.met, self.missed = saved["steps"], saved["met"], None
            self.lr, self.momentum = saved["lr"], saved["momentum"]
            for tensor, there in pairs:
                tensor.copy_(there)
            self._meeting = meeting
            if job.own is None:  # a replica that was not there begins where all of them met
                self.decide(apply=True)
                self.follow()

        return load

    def _check_counts(self, saved: Mapping[str, Any]) -> None:
        """Raise ConfigError unless a state's numbers can be."""
        replace(self.settings, lr=saved["lr"], momentum=saved["momentum"])
        counts = saved["steps"], saved["met"]
        if not all(type(n) is int and n >= 0 for n in counts) or not isinstance(
            saved["weights"], Mapping
        ):
            raise ConfigError(
                f"load_state_dict: outer steps and meetings are {counts!r:.60}, and outer weights "
                f"{type(saved['weights']).__name__}: the state is damaged, load another"
            )

    def _resumed(self, saved: Mapping[str, Any]) -> OuterMeeting | None:
        """The meeting that was under way as a state was saved."""
        if "begun" not in saved:
            return None
        try:
            fragment = self.fragments[self.settings.due(saved["begun"])]  # type: ignore[index]
            there = [saved["averages"][m.name] for m in fragment.members]
            sizes = [kept.theta.numel() for kept in fragment.weights.values()]
            values = [t.clone() for t in there if t.dtype == torch.float32]
            if [v.numel() for v in values] != sizes:
                raise ValueError
            lr, momentum = saved["by"]
            replace(self.settings, lr=lr, momentum=momentum)
        except (AttributeError, KeyError, TypeError, ValueError, ConfigError):
            raise ConfigError(
                "load_state_dict: the averages under way in this state are damaged: load another"
            ) from None
        return OuterMeeting(fragment, saved["begun"], values, (lr, momentum), is_there=True)

    # ---- its end

    def remove(self) -> None:
        """Apply what is under way, and count no steps any more."""
        try:
            self.finish()
        finally:
            self.halt()

    def leave(self, to: Communicator) -> None:
        """Count no steps any more; replicas that do not go on in the same group may wait here."""
        comm = self.owner.comm
        if to is not comm and comm.world_size > 1:
            said = (
                f"rank {comm.rank} goes on in another group: make one with it, and recover in that"
            )
            comm.fail_owner(self.owner, TransportError(said, peer=comm.rank))
        self.halt()

    def halt(self) -> None:
        """Count no steps any more."""
        self._hook.remove()
        super().remove()
        self.close()
