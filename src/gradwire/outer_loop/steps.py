"""Meetings of replicas: differences go out, averages come back, the outer weights step.

A meeting is a scope of the engine, as DDP's buckets are: codecs, residuals and statistics are the
same. It begins in the optimizer step after which a fragment is due, and ends `delay` steps later:
meanwhile the engine's threads send and sum. Nothing of it is applied unless all of it is there, on
every rank of the replica.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.aggregators import OWED, Attached, Observation, Rounds
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.collectives import AllReduce, ScopeProgram
from gradwire.control import PendingResult
from gradwire.engine import Communicator, Outcome, Owner, ranks_of
from gradwire.errors import ConfigError, GradwireError, TransportError, again
from gradwire.handles.reductions import Reductions
from gradwire.handles.rehearsal import rehearse
from gradwire.handles.summary import Expected, expected_all_reduce
from gradwire.outer_loop.fragment import KEPT, Fragment
from gradwire.outer_loop.homes import Replica
from gradwire.outer_loop.settings import OuterSettings
from gradwire.planner import Plan, Rules
from gradwire.state.state import SavedJob, StateSection
from gradwire.waiting import until_set

_SAVED = {"every", "fragments", "rule", "lr", "momentum", "steps", "met", "weights"}
_FIXED = ("every", "fragments", "rule")  # a state is loaded where these are as they were


@dataclass(eq=False)
class _Meeting:
    """A fragment's meeting that has begun.

    Attributes:
        step: the optimizer step after which it began.
        values: differences, which averages replace.
        before: what members had left out, as it was.
        by: lr and momentum of the outer step.
        told: what every replica tells: its outer weights' number, these two, and a weight that is
            not finite.
        is_there: whether `values` are averages, and all ranks of the replica know it.
    """

    fragment: Fragment
    step: int
    values: list[torch.Tensor]
    before: dict[str, dict[str, torch.Tensor]]
    by: tuple[float, float]
    told: PendingResult[list[Any]] | None
    begun: float = field(default_factory=time.perf_counter)
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    is_there: bool = False


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
        lr, momentum: of the outer step, from the next meeting on.
        taken: optimizer steps so far.
        met: meetings so far, of any fragment.
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
        self._replica, self._inside, self._make = replica, inside, make
        self._meeting: _Meeting | None = None
        self._span: float | None = None
        self._hook: Any = optimizer.register_step_post_hook(lambda *_: self.stepped())

    # ---- meetings

    def stepped(self) -> None:
        """An optimizer step has ended: end the meeting whose delay is over, begin the one that is
        due."""
        self.taken += 1
        if self._meeting is not None and self.taken >= self._meeting.step + self.settings.delay:
            self.finish()
        due = self.settings.due(self.taken)
        if due is not None:
            self._begin(self.fragments[due])
            if not self.settings.delay:
                self.finish()

    def _begin(self, fragment: Fragment) -> None:
        if self.met % len(self.fragments) == 0:  # a pass is one meeting of every fragment
            self.begin(self._span)
            self._span = 0.0
        values, fault = fragment.differences()
        by = self.lr, self.momentum
        told = self.owner.ranks.tell("meeting", [fragment.fingerprint(), *by, fault])
        observe = self._observe if self.sampler.running else None
        before_values = [v.clone() for v in values] if observe is not None else []
        kept: dict[str, dict[str, torch.Tensor]] = {}
        for member, value in zip(fragment.members, values, strict=True):
            state = member.state
            kept[member.name] = {
                key: state[key].clone() for key in (RESIDUAL, OWED) if key in state
            }
            member.add_owed(value)
            if RESIDUAL in state and self.settings.residual is not None:
                state[RESIDUAL] *= self.settings.residual
        meeting = _Meeting(fragment, self.taken, values, kept, by, told)

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
        except BaseException:  # the group is broken: nobody will end this meeting
            self._give_up(meeting)
            raise
        self._meeting = meeting
        rounds.start()

    def _observe(self, observation: Observation) -> None:
        if self.sampler.running:
            self.sampler.observe(self.members[observation.name], observation)

    def settle(self) -> None:
        """Wait until what a meeting has under way is there, for a state that is about to be saved;
        it is applied when its delay is over.

        Raises:
            ConfigError: replicas differ, or a weight is not finite.
            TransportError: a replica failed. Nothing of the meeting is applied.
        """
        meeting = self._meeting
        if meeting is None or meeting.is_there:
            return
        begun = time.perf_counter()
        error: BaseException | None = None
        try:
            with self.owner.awaited():
                until_set(meeting.ended)
                if meeting.error is not None:
                    raise again(meeting.error)
                assert meeting.told is not None
                self._check(meeting.told.result(self.owner.check))
        except GradwireError as found:
            error = found
        try:
            self._agree_inside(error)
        except BaseException:
            self._give_up(meeting)
            raise
        finally:
            self.count(exposed_seconds=time.perf_counter() - begun)
        meeting.is_there = True
        self._span = (self._span or 0.0) + time.perf_counter() - meeting.begun

    def finish(self) -> None:
        """Apply what is under way, if anything, once it is there; raises as `settle`."""
        self.settle()
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.fragment.step(meeting.values, *meeting.by)
            meeting.fragment.mix(self.settings.mix)
            self._replica.spread(meeting.fragment.every)
            self.met += 1
            if self.met % len(self.fragments) == 0:
                self.sampler.end()

    def _give_up(self, meeting: _Meeting) -> None:
        """Have members leave out what they did before a meeting; the next difference spans it."""
        self._meeting = None
        for name, kept in meeting.before.items():
            self.members[name].state.update(kept)

    def _check(self, told: Sequence[Sequence[Any]]) -> None:
        """Raise ConfigError unless all replicas can apply what they have."""
        ranks = self.owner.comm.ranks
        faults = [(rank, fault) for rank, (*_, fault) in enumerate(told) if fault]
        if faults:
            rank, name = faults[0]
            raise ConfigError(
                f"outer: rank {ranks[rank]}: parameter {name} is not finite after step "
                f"{self.taken}: nothing of this meeting was applied; go on from a checkpoint"
            )
        for at, what in enumerate(("outer weights", "lr", "momentum")):
            found = [one[at] for one in told]
            common, many = Counter(found).most_common(1)[0]
            if many < len(found):
                rank = next(r for r, value in enumerate(found) if value != common)
                known = 2 * many > len(found)
                other = "most replicas" if known else f"rank {ranks[found.index(common)]}"
                values = "" if not at else f": {found[rank]}, not {common}"
                raise ConfigError(
                    f"outer: rank {ranks[rank]} differs from {other} in {what}{values}; they must "
                    "be equal: load the same checkpoint everywhere, and set lr and momentum alike "
                    "between two meetings"
                )

    def _agree_inside(self, error: BaseException | None) -> None:
        """Raise `error`, or that of another rank of this replica: one applies what all apply."""
        if self._inside is not None and self._inside.world_size > 1:
            text = "" if error is None else str(error)
            told = ranks_of([self._inside], f"{self.owner.key}/inside").tell("met", text).result()
            others = [(rank, one) for rank, one in enumerate(told) if one]
            if error is None and others:
                rank, text = others[0]
                raise TransportError(
                    f"rank {self._inside.ranks[rank]} of this replica has not met: {text}"
                )
        if error is not None:
            raise error

    # ---- plans

    def planned(self, plan: Plan, rules: Rules) -> Plan:
        return self._make(plan, rules)

    def changed(self, plan: Plan, given: Mapping[str, Any]) -> Plan:
        for name in ("weights", "coalesce_bytes"):
            if name in given:
                raise ConfigError(f"update: {name} is not for outer synchronisation: leave it out")
        return plan

    def rehearse(self, plan: Plan) -> Sequence[ScopeProgram]:
        found: list[ScopeProgram] = []
        for fragment in self.fragments:
            zeros = [torch.zeros_like(fragment.theta[h.name]).reshape(-1) for h in fragment.homes]
            step = max(member.step for member in fragment.members)
            of = fragment.members, [*map(AllReduce, zeros)], step
            found += rehearse(self.owner, plan, *of)
        return found

    # ---- what is told of them

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

    def _saved(self) -> dict[str, Any]:
        fragments = [fragment.save() for fragment in self.fragments]
        named = {
            name: {key: one[key][name] for key in one} for one in fragments for name in one["theta"]
        }
        of = {name: getattr(self.settings, name) for name in _FIXED}
        step = {"lr": self.lr, "momentum": self.momentum}
        counts = {"steps": self.taken, "met": self.met}
        found = {**of, **step, **counts, "weights": named}
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
        for name in _FIXED:
            if saved[name] != (value := getattr(self.settings, name)):
                raise ConfigError(
                    f"load_state_dict: the state is of {name}={saved[name]}, and this is "
                    f"{name}={value}: give gw.outer what it had"
                )
        weights = saved["weights"]
        of = [
            {key: {n: weights[n][key] for n in f.theta if n in weights} for key in KEPT}
            for f in self.fragments
        ]
        for fragment, found in zip(self.fragments, of, strict=True):
            fragment.check(found)
        joins = job.own is None

        def load() -> None:
            self.taken, self.met = saved["steps"], saved["met"]
            self.lr, self.momentum = saved["lr"], saved["momentum"]
            for fragment, found in zip(self.fragments, of, strict=True):
                fragment.load(found)
            self._meeting = meeting = self._resumed(saved)
            if joins:  # a replica that was not there begins where all of them met
                if meeting is not None:
                    meeting.fragment.step(meeting.values, *meeting.by)
                    self.met, self._meeting = self.met + 1, None
                for fragment in self.fragments:
                    fragment.mix(0.0)
                    self._replica.spread(fragment.every)

        return load

    def _resumed(self, saved: Mapping[str, Any]) -> _Meeting | None:
        """The meeting that was under way as a state was saved."""
        if "begun" not in saved:
            return None
        due = self.settings.due(saved["begun"])
        assert due is not None
        fragment = self.fragments[due]
        values = [saved["averages"][m.name].clone() for m in fragment.members]
        lr, momentum = saved["by"]
        begun = saved["begun"]
        return _Meeting(fragment, begun, values, {}, (lr, momentum), None, is_there=True)

    # ---- its end

    def remove(self) -> None:
        """Apply what is under way, and count no steps any more."""
        try:
            self.finish()
        finally:
            self._hook.remove()
            super().remove()
            self.close()
