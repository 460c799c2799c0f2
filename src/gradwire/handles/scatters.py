"""The reductions of FSDP2 modules: gradients are reduce-scattered through a codec per parameter.

FSDP's collectives of every group of parameters are replaced by the objects of
handles/scatter.py, which run here, and, where `attach` was given `weights`, by those of
handles/gathered.py. A pass begins with the first reduce-scatter of a backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradwire.aggregators import Attached, Observation, Rounds
from gradwire.collectives import AllReduce, Options, Request, ScopeProgram
from gradwire.collectives.calling import begin
from gradwire.decide.scripts import DecidingRank
from gradwire.engine import Communicator, Outcome, Owner, ranks_of
from gradwire.errors import ConfigError, GradwireError
from gradwire.groups import communicator
from gradwire.handles.backward import Backward, Forward, running
from gradwire.handles.fsdp import (
    broken_off,
    collective_of,
    replace_collective,
    replace_replicas,
    shard_of,
)
from gradwire.handles.gathered import NO_STATS, GatheredWeights, weights_section
from gradwire.handles.learning import learned, levels_section
from gradwire.handles.reductions import Reductions
from gradwire.handles.rehearsal import alike, rehearse
from gradwire.handles.scatter import Replicas, Scatter, reduce_replicas
from gradwire.handles.sharded_plan import Trained, check_nodes, make_sharded_plan
from gradwire.handles.summary import Expected, expected_scatter
from gradwire.planner import Learned, Plan, Rules, WeightRules
from gradwire.planner.weights import all_in_blocks
from gradwire.state.state import Sharding, StateSection
from gradwire.waiting import result_of

_ADVICE = (
    "all ranks must make the same calls in the same order; where they use different parameters, "
    "call set_reduce_scatter_unused_params(True) of the root module"
)
_UNRECOVERED = (
    "FSDP2 has not recovered, and would leave out gradients: call the root module's "
    "reset_iter_state() first, on every rank"
)


class Scatters(Reductions):
    """The collectives of a module's FSDP groups, installed; on all ranks together.

    Args:
        model: whose backward passes are watched.
        trained: its parameters.
        plan: the first one.
        members: their states, by name.
        seed: of random numbers.
        name: of the module, for messages.

    Attributes:
        groups: the process groups.
        records: FSDP's, of parameters by name.
        weights: those that are gathered through codecs; None: FSDP2 gathers them.
    """

    what = "an FSDP2 module"
    after_error = (
        "; to go on, every rank catches it and calls the root module's reset_iter_state() and the "
        "handle's recover()"
    )

    def __init__(
        self,
        model: torch.nn.Module,
        trained: Trained,
        plan: Plan,
        members: Mapping[str, Attached],
        seed: int,
        name: str,
    ) -> None:
        self.groups = groups = trained.groups
        owners = [communicator(group).owner(name, advice=_ADVICE) for group in groups.all]
        super().__init__(plan, members, owners, groups.size)
        shapes = {name: tuple(p.shape) for name, p in trained.named}
        self.sharding = Sharding(shapes, trained.dims(), groups.shards)
        self.idle = groups.size == 1
        self._trained = trained
        self.reduced = {name: dtype for of in trained.shards() for name, _, dtype in of}
        self.records = {name: parameter for parameter, name in trained.names.items()}
        self._pass = running()
        self._begun: set[int] = set()  # what has reduced in this pass
        self._in_shards: int | None = None  # the least version among ranks that share a replica
        # Whether a scatter of the pass before, and of this one, told it to all of these.
        self._told = self._tells = False
        # After an error, FSDP2 calls nothing in passes of groups that it had not finished.
        told = self.abandon, self.after_forward, self._reduces, self.check_owners
        self._backward = Backward(self._ended, *told)
        self._backward.watch(model)
        self._replaced: list[tuple[Any, Any, Any]] = []
        self._scatters: list[Scatter] = []
        for record in trained.records:
            of = {p: members[trained.names[p]] for p in record.fsdp_params if p in trained.names}
            self._install(record, of)
        self.weights: GatheredWeights | None = None
        if plan.weights is not None and groups.shards > 1:
            self.weights = GatheredWeights(
                name, trained, members, plan, seed, self.sampler, self._go_on
            )
            # Peers gather with this rank in forward, too.
            self._forward = Forward(model, self._interrupt)

    def _install(self, record: Any, members: Mapping[Any, Attached]) -> None:
        self._replaced.append((record, collective_of(record, "reduce_scatter"), record.mesh_info))
        if self.groups.scatter is not None:
            self._scatters.append(Scatter(self, members))
            replace_collective(record, "reduce_scatter", self._scatters[-1])
        if self.groups.replicas is not None:
            by = Replicas(self.groups.replicas, partial(reduce_replicas, self, members))
            replace_replicas(record, by)

    @property
    def replicas(self) -> Owner:
        """The owner of all-reduces between replicas."""
        assert self.groups.replicas is not None
        return self.owners[-1]

    def remove(self) -> None:
        """Call it between two steps."""
        super().remove()
        if self.weights is not None:
            self.weights.remove()
            self._forward.unwatch()
        self._backward.unwatch()
        for record, scatter, mesh in self._replaced:
            replace_collective(record, "reduce_scatter", scatter)
            record.mesh_info = mesh
        self._replaced.clear()
        self.close()

    def all_owners(self) -> list[Owner]:
        return [*self.owners, *([] if self.weights is None else [self.weights.owner])]

    def abandon(self, cause: GradwireError | None = None, what: str = "backward") -> None:
        if self.weights is not None:
            self.weights.abandoned = True
        super().abandon(cause, what)

    def unrecovered(self) -> str:
        return _UNRECOVERED if any(map(broken_off, self._trained.records)) else ""

    # ---- forwards that end with an exception
    #
    # All ranks may raise it at one place, and catch it: an early exit, or calibration. Then none
    # waits, and what each gathers next is the same. So a rank does not tell at once, but as a peer
    # waits for what it has not issued; and before the next collective ranks compare how many each
    # has issued.

    def _interrupt(self) -> None:
        owners = self.all_owners()
        if any(owner.error is not None or owner.comm.error is not None for owner in owners):
            self.abandon(what="forward")
            return
        assert self.weights is not None
        self.weights.abandoned = True
        self.weights.changes.interrupted()
        for owner in owners:
            owner.interrupted = self.early_end(owner, "forward")
            owner.comm.watchdog.interrupted(owner)

    def _go_on(self) -> None:
        """After a forward that ended with an exception: go on if it did on all ranks at one place.

        Raises:
            TransportError: it did not; peers are told.
        """
        if self.owner.interrupted is None:
            return
        owners = self.all_owners()
        ranks = ranks_of(self.comms(), self.owner.key, self.check_owners, breaks=False)
        issued = [owner.core.issued for owner in owners]
        every = ranks.tell("interrupted", issued).result()
        if any(one != issued for one in every):
            self.abandon(what="forward")
        self.check_owners()
        assert self.weights is not None
        self.weights.abandoned = False
        for owner in owners:
            owner.interrupted = None

    # ---- passes

    def reduces(self, reduction: object) -> None:
        """Called as a reduction begins.

        A pass of autograd's is one pass. Pipeline schedules reduce behind it, each group of
        parameters once: there a pass begins with the first that has reduced already.
        """
        within = self._backward.enter()
        now = running()
        again = not within and (not self._begun or id(reduction) in self._begun)
        if now != self._pass or again:
            self._pass = now
            self._begun.clear()
            self.begin()
            # FSDP2 scatters nothing to a single shard.
            alone = self.groups.scatter is None or self.groups.shards == 1
            self._in_shards = self._version if alone else None
            self._told, self._tells = self._tells, False
        self._begun.add(id(reduction))

    def scatter(
        self,
        members: Sequence[Attached],
        requests: Sequence[Request],
        whole: torch.Tensor,
    ) -> None:
        """Replace this rank's shards of a group's gradients by their averages over its replica.

        Args:
            whole: the gradients, with padding.
        """
        raw_bytes = whole.nbytes * (self.groups.shards - 1) // self.groups.shards
        of = self.owner, members, requests, self.plan.options, raw_bytes, self._version
        least = self._run(*of, ends=self.groups.of_replicas == 1)
        self._scattered(least, whole.device)

    def between_replicas(
        self, members: Sequence[Attached], requests: Sequence[Request], whole: torch.Tensor
    ) -> None:
        """Average this rank's shards of a group, all of `whole` but padding, over the replicas; it
        may have none."""
        offered, least = self._in_shards, None
        if members:
            ranks, options = self.groups.of_replicas, self.plan.options.through("sra")
            raw_bytes = 2 * whole.nbytes * (ranks - 1) // ranks
            least = self._run(self.replicas, members, requests, options, raw_bytes, offered or 0)
        elif offered is not None and self._least is None and self._word is None:
            least = self._ask(self.replicas, offered, whole.device)
        if offered is not None:
            self.know(least)

    def _run(
        self,
        owner: Owner,
        members: Sequence[Attached],
        requests: Sequence[Request],
        options: Options,
        raw_bytes: int,
        version: int,
        ends: bool = True,
    ) -> int | None:
        """Run a scope to its end; returns the least plan version, if all ranks have told it.

        Args:
            ends: whether its results are averages over all ranks.
        """
        self._go_on()
        begun = time.perf_counter()
        ended: Future[list[Outcome]] = Future()
        observe, before = None, list[torch.Tensor]()
        if self.sampler.running and owner is self.owner and self.groups.scatter is not None:
            observe, before = self._sampled, [request.contribution() for request in requests]

        def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
            ended.set_result(outcomes) if error is None else ended.set_exception(error)

        of = options, done, observe, before, version, self.plan.version
        scope = Rounds(owner, members, requests, *of)
        scope.start()
        with owner.awaited():
            outcomes = result_of(ended)
        self._reduced(outcomes, begun, raw_bytes)
        if self.groups.replicas is not None and owner is self.replicas:
            self.count(replicas_wire_bytes=sum(one.wire_bytes for one in outcomes))
        if self._word is None and owner.comm.stream(requests[0].values.device) is not None:
            self.tell_version(requests[0].values.device)
        if ends and self.adaptation is not None:
            for member, average in zip(members, scope.gradients, strict=True):
                self.adaptation.add(member.name, average)
        return scope.least

    def _reduced(self, outcomes: Sequence[Outcome], begun: float, raw_bytes: int = 0) -> None:
        if self.weights is not None:
            self.weights.changes.reduced()
        waited, seconds = time.perf_counter() - begun, sum(one.seconds for one in outcomes)
        self.count(*outcomes, raw_bytes=raw_bytes, seconds=seconds, exposed_seconds=waited)

    def _sampled(self, observation: Observation) -> None:
        self.sampler.observe(self.members[observation.name], observation)

    def _reduce(self, owner: Owner, values: torch.Tensor, op: str, name: str) -> None:
        """Reduce values that are no gradients over a process group, in place."""
        self._go_on()
        begun = time.perf_counter()
        ended, _ = begin(owner, AllReduce(values, op), name)
        with owner.awaited():
            self._reduced([result_of(ended)], begun)

    def summed(self, values: torch.Tensor) -> None:
        """Replace fp32 values, on the CPU, by their sum over all ranks."""
        (device, *_) = [s.last.device for s in self._scatters if s.last] or [values.device]
        on_device = values.to(device)
        for owner in self.owners:
            self._reduce(owner, on_device, "sum", "levels")
        values.copy_(on_device)

    def _ended(self) -> None:
        if self.ranks == 1:  # FSDP2 reduces nothing, and this is all of a pass
            self._least = self._version
            self.begin()

    def _reduces(self, module: torch.nn.Module) -> bool:
        """Whether a backward of the module reduces gradients, by FSDP2's equivalent of no_sync."""
        return any(getattr(record, "reduce_grads", True) for record, *_ in self._replaced)

    # ---- plan versions
    #
    # Ranks know the least version after two hops: scatters find that of the ranks of one replica,
    # and an all-reduce between replicas the least of these. Whether a hop tells it is equal on all
    # ranks of its process group, and every rank knows the least in the same passes.

    def _scattered(self, least: int | None, device: torch.device) -> None:
        """A reduce-scatter has ended, in which all ranks have told the least version, or None."""
        if self._word is not None:
            return
        known = self._in_shards
        self._tells |= least is not None
        if least is None:
            if self._told or known is not None:
                return
            least = self._ask(self.owner, self._version, device)  # no scatter tells: too few rows
        self._in_shards = least if known is None else min(known, least)
        if self.groups.replicas is None:
            self.know(least)

    def _ask(self, owner: Owner, version: int, device: torch.device) -> int:
        """The least version that any rank of a process group offers."""
        values = torch.tensor([version], dtype=torch.int32, device=device)
        self._reduce(owner, values, "min", "plan version")
        return int(values.item())

    # ---- plans

    def adopt(self) -> None:
        """Gradients at once, weights from the next forward on."""
        super().adopt()
        if self.weights is not None:
            self.weights.adopt(self.switch.plan)

    def planned(self, plan: Plan, rules: Rules) -> Plan:
        of = self.ranks, plan.version, plan.weights, plan.options
        check_nodes(plan.options, self.groups.shards)
        return replace(make_sharded_plan(self._trained.named, rules, *of), levels=plan.levels)

    def methods(self, given: dict[str, Any], options: Mapping[str, object]) -> dict[str, Any]:
        return all_in_blocks(given, options)

    def changed(self, plan: Plan, given: Mapping[str, Any]) -> Plan:
        if "coalesce_bytes" in given:
            raise ConfigError(
                "update: coalesce_bytes is for DDP's buckets; FSDP2 scatters group by group: leave "
                "it out"
            )
        if "weights" not in given:
            return plan
        if plan.weights is None:
            raise ConfigError(
                "update: attach was given no weights, so FSDP2 gathers them: detach and attach "
                "again, with weights"
            )
        return replace(plan, weights=WeightRules.of(given["weights"], plan.weights.keep))

    def rehearse(self, plan: Plan) -> list[ScopeProgram]:
        """Prepare them, from the scatters that all ranks last ran equally."""
        if self.weights is not None:
            self.weights.rehearse(plan)
        name = f"{self.owner.key}/plan {plan.version}"
        known, step = alike(
            self.owner, name, lambda: [s.last for s in self._scatters if s.last], self.switch.check
        )
        found: list[ScopeProgram] = []
        for last in known:
            last = replace(last, algorithm=plan.options.algorithm)
            numel, stride = (1 + self.groups.shards) * last.stride, last.stride
            zeros = torch.zeros(numel, dtype=last.dtype, device=last.device)
            requests = last.reductions(zeros[stride:], zeros[:stride], self.groups.shard)
            found += rehearse(self.owner, plan, last.members, requests, step)
        return found

    @property
    def place(self) -> DecidingRank:
        rank = self.owner.comm.ranks[self.owner.comm.rank]
        shard, replica = (0 if comm is None else comm.rank for comm in self._hops())
        return DecidingRank(rank, shard, self.groups.shards, replica, pieces=True)

    def _hops(self) -> tuple[Communicator | None, Communicator | None]:
        """Over which gradients are scattered, and averaged; None: that is left alone."""
        scatter = None if self.groups.scatter is None else self.owner.comm
        return scatter, None if self.groups.replicas is None else self.replicas.comm

    def deciding(self) -> list[Communicator]:
        return [comm for comm in self._hops() if comm is not None and comm.world_size > 1]

    def shard(self, name: str) -> torch.Tensor:
        return shard_of(self.records[name].sharded_param)

    def learn(self, smallest: int, steps: int) -> int:
        found = learned(self, smallest, steps)
        if found != Learned():
            self.use_levels(lambda levels: levels.changed(found))
        return len(found.gradients) + len(found.weights)

    def check_owners(self) -> None:
        for owner in self.all_owners():
            owner.check()

    def use_levels(self, change: Callable[[Learned], Learned]) -> None:
        """Change the levels in force, between two passes on all ranks."""
        self.switch.change(lambda plan: replace(plan, levels=change(plan.levels)))
        self.adopt()

    # ---- what is told of them

    def facts(self) -> dict[str, Any]:
        return NO_STATS if self.weights is None else self.weights.stats()

    def remarks(self) -> list[str]:
        return super().remarks() + ([] if self.weights is None else self.weights.remarks())

    def expected(self) -> Expected:
        plan = self.switch.plan
        planned = {p.name: p for p in plan.parameters}
        of = *self._hops(), self.groups.shard, plan.options
        groups = (
            [(planned[name], lengths, dtype) for name, lengths, dtype in group]
            for group in self._trained.shards()
        )
        return sum((expected_scatter(group, *of) for group in groups), Expected(0, 0))

    # ---- state

    def sections(self) -> list[StateSection]:
        found = [levels_section(self)]
        if self.weights is not None:
            found.append(weights_section(self.weights, self.sharding))
        return found
