"""The reductions of FSDP2 modules: gradients are reduce-scattered through a codec per parameter.

FSDP's collectives of every group of parameters are replaced by the objects of
handles/scatter.py, which run here, and, where `attach` was given `weights`, by those of
handles/gathered.py. A pass begins with the first reduce-scatter of a backward.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from gradwire.aggregators import Attached
from gradwire.collectives import Collective, Item, Operation, prepare, start_round
from gradwire.collectives.legal import uncompressed
from gradwire.decide.scripts import DecidingRank
from gradwire.engine import Communicator, Outcome, Owner, ranks_of
from gradwire.errors import ConfigError, GradwireError
from gradwire.groups import communicator
from gradwire.handles.backward import Backward, Forward, running
from gradwire.handles.gathered import NO_STATS, GatheredWeights
from gradwire.handles.learning import learned, wanted
from gradwire.handles.reductions import Reductions, version_values
from gradwire.handles.rehearsal import alike
from gradwire.handles.scatter import Replicas, Scatter
from gradwire.handles.sections import weights_section
from gradwire.handles.sharded_plan import Trained, check_nodes, make_sharded_plan, options_for
from gradwire.handles.summary import Expected, expected_scatter
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.planner import Learned, Plan, Rules, WeightRules
from gradwire.planner.weights import all_in_blocks
from gradwire.state.state import SavedJob, Sharding, StateSection
from gradwire.waiting import result_of

_ADVICE = (
    "all ranks must make the same calls in the same order; where they use different parameters, "
    "call set_reduce_scatter_unused_params(True) of the root module"
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
        self._records = {name: parameter for parameter, name in trained.names.items()}
        self._pass = running()
        self._begun: set[int] = set()  # what has reduced in this pass
        self._in_shards: int | None = None  # the least version among ranks that share a replica
        # Whether a scatter of the pass before, and of this one, told it to all of these.
        self._told = self._tells = False
        self._backward = Backward(self._ended, self.abandon, self.after_forward, self._reduces)
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
        self._replaced.append((record, record._reduce_scatter_comm, record.mesh_info))
        if self.groups.scatter is not None:
            scatter = record._reduce_scatter_comm = Scatter(self, members)
            self._scatters.append(scatter)
        if self.groups.replicas is not None:
            record.mesh_info = copy.copy(record.mesh_info)
            between = Replicas(self.groups.replicas, self, members)
            record.mesh_info.replicate_process_group = between

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
            record._reduce_scatter_comm, record.mesh_info = scatter, mesh
        self._replaced.clear()
        self.close()

    def all_owners(self) -> list[Owner]:
        return [*self.owners, *([] if self.weights is None else [self.weights.owner])]

    def abandon(self, cause: GradwireError | None = None, what: str = "backward") -> None:
        if self.weights is not None:
            self.weights.abandoned = True
        super().abandon(cause, what)

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
        ranks = ranks_of(self.comms(), self.owner.key, self._check_owners, breaks=False)
        issued = [owner.core.issued for owner in owners]
        every = ranks.tell("interrupted", issued).result()
        if any(one != issued for one in every):
            self.abandon(what="forward")
        self._check_owners()
        assert self.weights is not None
        self.weights.abandoned = False
        for owner in owners:
            owner.interrupted = None

    # ---- passes

    def reduces(self, reduction: object) -> int:
        """Called as a reduction begins; returns the plan version that this rank offers in the
        running pass.

        A pass of autograd's is one pass. Pipeline schedules reduce behind it, each group of
        parameters once: there a pass begins with the first that has reduced already.
        """
        within = self._backward.enter()
        now = running()
        again = not within and (not self._begun or id(reduction) in self._begun)
        if now != self._pass or again:
            self._pass = now
            self._begun.clear()
            self.begin(self._least)
            # FSDP2 scatters nothing to a single shard.
            alone = self.groups.scatter is None or self.groups.shards == 1
            self._in_shards = self._version if alone else None
            self._told, self._tells = self._tells, False
        self._begun.add(id(reduction))
        return self._version

    def run(
        self,
        owner: Owner,
        specs: Sequence[Spec],
        items: Sequence[Item],
        operation: Operation,
        raw_bytes: int,
        version: int = 0,
    ) -> int:
        """Run a collective to its end; returns the least plan version that this rank received."""
        self._go_on()
        begun = time.perf_counter()
        options = options_for(operation, self.switch.plan.options)
        collective = prepare(owner, specs, options, operation, items[0].values.device)
        collective.check(items)
        ticket = owner.ticket(version)
        try:
            (ended,) = start_round(ticket, [(collective, items)])
            with owner.awaited():
                outcome: Outcome = result_of(ended)
        finally:
            ticket.close()
        if self.weights is not None:
            self.weights.changes.reduced()
        waited = time.perf_counter() - begun
        self.count(outcome, raw_bytes=raw_bytes, seconds=outcome.seconds, exposed_seconds=waited)
        return ticket.version

    def summed(self, values: torch.Tensor) -> None:
        """Replace fp32 values, on the CPU, by their sum over all ranks."""
        add = Operation("all_reduce", "sum")
        (device, *_) = [s.last.device for s in self._scatters if s.last] or [values.device]
        on_device = values.to(device)
        spec = Spec("levels", values.numel(), torch.float32, uncompressed(add, torch.float32))
        for owner in self.owners:
            self.run(owner, [spec], [Item(on_device, rng.Keys(0, 0), 0)], add, 0)
        values.copy_(on_device)

    def _ended(self) -> None:
        if self.ranks == 1:  # FSDP2 reduces nothing, and this is all of a pass
            self.begin(self._version)

    def _reduces(self, module: torch.nn.Module) -> bool:
        """Whether a backward of the module reduces gradients, by FSDP2's equivalent of no_sync."""
        return any(getattr(record, "reduce_grads", True) for record, *_ in self._replaced)

    # ---- plan versions
    #
    # Ranks know the least version after two hops: scatters find that of the ranks of one replica,
    # and an all-reduce between replicas the least of these. Whether a hop tells it is equal on all
    # ranks of its process group, and every rank knows the least in the same passes.

    def scattered(self, least: int, reaches_all: bool, device: torch.device) -> None:
        """A reduce-scatter has ended, in which this rank received `least`.

        Args:
            reaches_all: whether every rank gets a message from every other.
        """
        known = self._in_shards
        self._tells |= reaches_all
        if not reaches_all:
            if self._told or known is not None:
                return
            least = self._ask(self.owner, self._version, device)  # no scatter tells: too few rows
        self._in_shards = least if known is None else min(known, least)
        if self.groups.replicas is None:
            self.know(least)

    def between_replicas(
        self, specs: Sequence[Spec], items: Sequence[Item], operation: Operation, raw_bytes: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Run an all-reduce between replicas; this rank may have no values in it."""
        offered = self._in_shards
        if specs:
            least = self.run(self.replicas, specs, items, operation, raw_bytes, offered or 0)
        elif offered is None or self._least is not None:
            return
        else:
            least = self._ask(self.replicas, offered, device)
        if offered is not None:
            self.know(least)

    def _ask(self, owner: Owner, version: int, device: torch.device) -> int:
        """The least version that any rank of a process group offers."""
        values, least = version_values(version, device), Operation("all_reduce", "min")
        spec = Spec("plan version", 1, torch.int32, uncompressed(least, torch.int32))
        self.run(owner, [spec], [Item(values, rng.Keys(0, 0), 0)], least, 0)
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

    def rehearse(self, plan: Plan) -> list[Collective]:
        """Prepare them, from the scatters that all ranks last ran equally."""
        if self.weights is not None:
            self.weights.rehearse(plan)
        name = f"{self.owner.key}/plan {plan.version}"
        known = alike(
            self.owner, name, lambda: [s.last for s in self._scatters if s.last], self.switch.check
        )
        aggregators = {p.name: plan.levels.aggregator(p) for p in plan.parameters}
        return [
            prepare(self.owner, last.specs(aggregators), plan.options, last.operation, last.device)
            for last in known
        ]

    @property
    def place(self) -> DecidingRank:
        rank = self.owner.comm.ranks[self.owner.comm.rank]
        shard = 0 if self.groups.scatter is None else self.owner.comm.rank
        replica = 0 if self.groups.replicas is None else self.replicas.comm.rank
        return DecidingRank(rank, shard, self.groups.shards, replica, pieces=True)

    def deciding(self) -> list[Communicator]:
        comms = [
            None if self.groups.scatter is None else self.owner.comm,
            None if self.groups.replicas is None else self.replicas.comm,
        ]
        return [comm for comm in comms if comm is not None and comm.world_size > 1]

    def shard(self, name: str) -> torch.Tensor:
        parameter = self._records[name].sharded_param
        local: torch.Tensor = getattr(parameter, "_local_tensor", parameter).detach()
        return local

    def learn(self, smallest: int, steps: int) -> int:
        if self.groups.scatter is None or not self.installed:
            raise ConfigError(
                "learn_levels: this handle does not scatter the module's gradients (any more): "
                "attach to the module itself"
            )
        targets = list(wanted(self.switch.plan, self._records, self.groups.shards, smallest))
        if not targets and self.switch.plan.rules.uncompiled:
            return 0
        if not targets:
            raise ConfigError(
                f"learn_levels: no parameter of {smallest} values or more is sent through "
                '"learnedlevels": attach with "learnedlevels:rounding=stochastic" for gradients or '
                'weights="learnedlevels", or give a lower `smallest`'
            )
        with ExitStack() as told:
            for comm in self.comms():
                told.enter_context(comm.busy("learns levels"))
            of = self._records, self.groups, self.summed, steps
            found = learned(targets, *of, self._check_owners)
        self._use(lambda levels: levels.changed(found))
        return len(found.gradients) + len(found.weights)

    def _check_owners(self) -> None:
        for owner in self.all_owners():
            owner.check()

    def _use(self, change: Callable[[Learned], Learned]) -> None:
        """Change the levels in force, between two passes on all ranks."""
        self.switch.change(lambda plan: replace(plan, levels=change(plan.levels)))
        self.adopt()

    # ---- what is told of them

    def facts(self) -> dict[str, Any]:
        return NO_STATS if self.weights is None else self.weights.stats()

    def remarks(self) -> list[str]:
        return [] if self.weights is None else self.weights.remarks()

    def expected(self) -> Expected:
        plan, found = self.switch.plan, Expected(0, 0)
        planned = {p.name: p for p in plan.parameters}
        scatter = None if self.groups.scatter is None else self.owner.comm
        between = None if self.groups.replicas is None else self.replicas.comm
        for group in self._trained.shards():
            pieces = [(planned[name], lengths, dtype) for name, lengths, dtype in group]
            of_group = pieces, scatter, between, self.groups.shard
            found += expected_scatter(*of_group, plan.options)
        return found

    # ---- state

    def sections(self) -> list[StateSection]:
        def save() -> dict[str, Any]:
            levels = self.switch.plan.levels
            return {} if levels == Learned() else {"levels": levels.state()}

        def loading(job: SavedJob) -> Callable[[], None]:
            levels = Learned.of(job.states[0].get("levels"))
            return lambda: self._use(lambda _: levels)

        found = [StateSection(save, loading, ("levels",))]
        if self.weights is not None:
            found.append(weights_section(self.weights, self.sharding))
        return found
