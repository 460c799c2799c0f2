"""The handle of FSDP2 modules: gradients are reduce-scattered through a codec per parameter.

For every group of parameters, this file replaces the collectives that FSDP calls by the objects of
integrations/scatter.py. Weights are gathered uncompressed.
"""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire.aggregators import Aggregator, Attached
from gradwire.aggregators.registry import Method
from gradwire.collectives import (
    Collective,
    Item,
    Operation,
    Options,
    prepare,
    retire,
    start_round,
)  # fmt: skip
from gradwire.collectives.legal import uncompressed
from gradwire.engine import Outcome, Owner
from gradwire.errors import ConfigError, TransportError
from gradwire.groups import communicator
from gradwire.integrations.backward import Backward, running
from gradwire.integrations.bias import warn_of_bias
from gradwire.integrations.fsdp import process_groups
from gradwire.integrations.full_state import StateGather
from gradwire.integrations.metrics import EVERY, Metrics
from gradwire.integrations.rehearsal import alike
from gradwire.integrations.residual_layout import ResidualLayout
from gradwire.integrations.saved import Saved, members_of
from gradwire.integrations.scatter import Replicas, Scatter, WeightGather
from gradwire.integrations.sharded_plan import Trained, make_sharded_plan
from gradwire.integrations.summary import Expected, expected_scatter, summary
from gradwire.integrations.switch import Switch, Update
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.planner import Plan

_SAME: Any = object()
_OPTIONS = Options()


class Sharded(Saved):
    """What `attach` returns for an FSDP2 module."""

    def __init__(
        self, model: torch.nn.Module, trained: Trained, plan: Plan, seed: int, first: int
    ) -> None:
        self.groups = groups = trained.groups
        members = members_of(plan, seed, groups.rank, first)
        gather = StateGather(process_groups(trained.records[0]).all)
        layout = ResidualLayout(groups.shards, trained.dims())
        super().__init__(members, seed, groups.rank, groups.size, gather, layout)
        what = f"the sharded module of {plan.parameters[0].name}"
        self._owners = [communicator(group).owner(what) for group in groups.all]
        self._named, self._shards = trained.named, trained.shards()
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {"steps": 0, "calls": 0, "wire_bytes": 0, "raw_bytes": 0}
        self._totals |= {"seconds": 0.0, "exposed_seconds": 0.0}
        self._totals |= {"kernel_seconds": 0.0, "kernel_calls": 0}
        self._metrics = Metrics(groups.size)
        self.sampler = self._metrics.sampler
        self._switch = Switch(plan, self._owners[0], self._rehearse)
        self._pass = self._counted = running()
        self._version = 0  # the plan version that this rank offers in this pass
        self._least: int | None = None  # the least version that any rank offers, if known
        self._backward = Backward(_nothing, self._abandoned, self._forward, self._reduces)
        self._backward.watch(model)
        self._replaced: list[tuple[Any, Any, Any, Any]] = []
        self._scatters: list[Scatter] = []
        for record in trained.records:
            of = {p: members[trained.names[p]] for p in record.fsdp_params if p in trained.names}
            self._install(record, of)

    def _install(self, record: Any, members: Mapping[Any, Attached]) -> None:
        before = record._reduce_scatter_comm, record._all_gather_comm, record.mesh_info
        self._replaced.append((record, *before))
        if self.groups.scatter is not None:
            scatter = record._reduce_scatter_comm = Scatter(self, members)
            self._scatters.append(scatter)
            record._all_gather_comm = WeightGather(record._all_gather_comm)
        if self.groups.replicas is not None:
            record.mesh_info = copy.copy(record.mesh_info)
            between = Replicas(self.groups.replicas, self, members)
            record.mesh_info.replicate_process_group = between

    @property
    def owner(self) -> Owner:
        """The owner of reduce-scatters."""
        assert self.groups.scatter is not None
        return self._owners[0]

    @property
    def replicas(self) -> Owner:
        """The owner of all-reduces between replicas."""
        assert self.groups.replicas is not None
        return self._owners[-1]

    # ---- passes

    def begin(self) -> int:
        """Called as a scatter begins; returns the plan version that this rank offers in the running
        pass."""
        self._backward.enter()
        now = running()
        if now != self._pass:
            self._pass = now
            self.sampler.begin(int(self._totals["steps"]) + 1)
            before = self._switch.plan
            least = before.version if self._least is None else self._least
            self._version, self._least = self._switch.begin(least), None
            if self._switch.plan is not before:
                for planned in self._switch.plan.parameters:
                    self._members[planned.name].adopt(planned.aggregator)
                retire(self.owner)
                self.owner.comm.in_flight.mark(f"adopt: plan {self._switch.plan.version}")
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
        begun = time.perf_counter()
        collective = prepare(owner, specs, _OPTIONS, operation, items[0].values.device)
        collective.check(items)
        ticket = owner.ticket(version)
        try:
            (ended,) = start_round(ticket, [(collective, items)])
            outcome: Outcome = ended.result()
        finally:
            ticket.close()
        with self._lock:
            self._totals["steps"] += running() != self._counted
            self._counted = running()
            self._totals["calls"] += 1
            self._totals["raw_bytes"] += raw_bytes
            self._totals["wire_bytes"] += outcome.wire_bytes
            self._totals["seconds"] += outcome.seconds
            self._totals["exposed_seconds"] += time.perf_counter() - begun
            self._totals["kernel_seconds"] += outcome.kernel_seconds
            self._totals["kernel_calls"] += outcome.kernel_calls
        return ticket.version

    def know(self, least: int) -> None:
        """Note the least version that any rank offers in this pass, from a scatter's headers."""
        self._least = least if self._least is None else min(self._least, least)

    @property
    def is_told(self) -> bool:
        """Whether a scatter of each pass sends a message from every rank to every other; equal on
        all ranks."""
        return any(s.last is not None and s.last.reaches_all for s in self._scatters)

    def ask(self, version: int, device: torch.device) -> None:
        """Exchange the versions that ranks offer, if no scatter does since there are too few
        rows."""
        values = torch.tensor([version], dtype=torch.int32, device=device)
        least = Operation("all_reduce", "min")
        spec = Spec("plan version", 1, torch.int32, uncompressed(least, torch.int32))
        self.run(self.owner, [spec], [Item(values, rng.Keys(0, 0), 0)], least, 0)
        self.know(int(values.item()))

    def _reduces(self, module: torch.nn.Module) -> bool:
        """Whether a backward of the module reduces gradients, by FSDP2's equivalent of no_sync."""
        return any(getattr(record, "reduce_grads", True) for record, *_ in self._replaced)

    def _forward(self) -> None:
        refusal = self._switch.refusal()
        if refusal is not None:
            raise refusal

    def _abandoned(self) -> None:
        """Backward ended with an exception: fail the owners, since peers wait for its scatters."""
        for owner in self._owners:
            rank = owner.comm.rank
            error = TransportError(
                f"rank {rank}: backward raised an exception in {owner.name}, so its gradients are "
                f"not complete: see what rank {rank} raised",
                peer=rank,
            )
            owner.comm.fail_owner(owner, error)

    # ---- plans

    @property
    def plan(self) -> Plan:
        """How each parameter is synchronised: the plan in force."""
        return self._switch.plan

    def update(
        self,
        codec: Method = _SAME,
        *,
        include: Sequence[str] = _SAME,
        exclude: Sequence[str] = _SAME,
        codecs: Mapping[str, Method] = _SAME,
        error_feedback: bool = _SAME,
        **codec_options: object,
    ) -> Update:
        """Change arguments of `attach` during training, as `Handle.update`.

        Raises:
            ConfigError: as `Handle.update`; or the module has replicas (HSDP).
        """
        if self.groups.replicas is not None:
            raise ConfigError(
                "update: the plan of a module with replicas (HSDP) cannot change: detach and "
                "attach again"
            )
        if not self._replaced:
            raise ConfigError("update: this handle was detached: attach again")
        rules = {
            "codec": codec, "include": include, "exclude": exclude, "codecs": codecs,
            "error_feedback": error_feedback,
        }  # fmt: skip
        given = {name: value for name, value in rules.items() if value is not _SAME}

        def changed(before: Plan) -> Plan:
            rules = before.rules.changed(codec_options, **given)
            plan = make_sharded_plan(self._named, rules, self.world_size, before.version + 1)
            warn_of_bias(plan, self.world_size)  # a warning may be an error: then nothing changes
            return plan

        return self._switch.ask(changed)

    def _rehearse(self, plan: Plan) -> list[Collective]:
        """Prepare the collectives of `plan`, from the scatters that all ranks last ran equally."""
        name = f"{self.owner.key}/plan {plan.version}"
        known = alike(self.owner, name, lambda: [s.last for s in self._scatters if s.last])
        aggregators: dict[str, Aggregator] = {p.name: p.aggregator for p in plan.parameters}
        return [
            prepare(self.owner, last.specs(aggregators), _OPTIONS, last.operation, last.device)
            for last in known
        ]

    # ---- statistics, state, detach

    def stats(self) -> dict[str, Any]:
        """Totals since `attach`.

        Returns:
            steps: backward passes that reduced gradients.
            calls: reduce-scatters, all-reduces between replicas, and exchanges of plan versions
                with ranks that scatter nothing.
            wire_bytes: sent by this rank, headers included.
            raw_bytes: what they would have sent uncompressed: (N-1)/N of the gradients, and
                2 (N-1)/N of their shards between N replicas.
            ratio: raw_bytes / wire_bytes (None before anything was sent).
            seconds: from the start of each to its result.
            exposed_seconds: what communication added to backward: FSDP2 waits for each of these
                where it calls it, so all of the time from call to result, waits for ranks that come
                later and for kernels to be compiled included. Over NCCL the host does not wait, and
                this is the time of queueing the work. Gathers of weights are torch's, and are not
                counted.
            kernel_seconds, kernel_calls: as of `Handle.stats`.
            residual_bytes: memory of residuals: with error feedback 4 bytes for every value of
                every compressed parameter, whole, on each rank.
            parameters: name -> codec (or "dense"), numel, payload_bytes, ratio.
            plan: its version.
        """
        with self._lock:
            totals: dict[str, Any] = dict(self._totals)
        wire = totals["wire_bytes"]
        return {
            **totals,
            "ratio": totals["raw_bytes"] / wire if wire else None,
            "residual_bytes": self._state_bytes(),
            "parameters": self._facts(),
            "plan": self.plan.version,
        }

    def metrics(self, layers: bool = False, every: int = EVERY) -> dict[str, float]:
        """Scalars for a logger; see `Handle.metrics`. Uncompressed bytes are those of `stats`. A
        sample is of reduce-scatters, in which the own shard is exact, and is there as the next pass
        begins.

        Raises:
            ConfigError: `every` is not a number of passes.
        """
        with self._lock:
            totals = dict(self._totals)
        return self._metrics.read(totals, self.plan, self._members, layers, every)

    def summary(self) -> str:
        planned = {p.name: p for p in self.plan.parameters}
        scatter = None if self.groups.scatter is None else self.owner.comm
        between = None if self.groups.replicas is None else self.replicas.comm
        expected = Expected(0, 0)
        for group in self._shards:
            pieces = [(planned[name], lengths, dtype) for name, lengths, dtype in group]
            expected += expected_scatter(pieces, scatter, between, self.groups.shard)
        comms = [owner.comm for owner in self._owners]
        of = self.plan, self.rank, comms, expected, self.stats(), self.world_size
        return summary("an FSDP2 module" + ("" if self._replaced else " (detached)"), *of)

    summary.__doc__ = Saved.summary.__doc__

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """As `Handle.load_state_dict`. With FSDP2 a rank's own shard is sent exactly: what a
        residual holds of it, from another number of ranks, another sharding or DDP, is added to
        the next gradient.

        Raises:
            ConfigError: as there.
        """
        super().load_state_dict(state)
        if self.groups.size == 1 and any(member.state for member in self._members.values()):
            warnings.warn(
                "load_state_dict: a single rank reduces nothing under FSDP2, so the residuals of "
                "this state are dropped",
                stacklevel=2,
            )
            for member in self._members.values():
                member.keep({})

    def detach(self) -> None:
        """Restore FSDP2's own collectives; call it between two steps. Statistics and state stay
        readable."""
        self._backward.unwatch()
        for record, scatter, gather, mesh in self._replaced:
            record._reduce_scatter_comm, record._all_gather_comm = scatter, gather
            record.mesh_info = mesh
        self._replaced.clear()
        for owner in self._owners:
            owner.comm.close_owner(owner)


def _nothing() -> None:
    pass
