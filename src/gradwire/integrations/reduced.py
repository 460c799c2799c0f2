"""The gradients of one handle's FSDP2 modules: their collectives, and the passes these make.

FSDP's collectives of every group of parameters are replaced by the objects of
integrations/scatter.py, which run here. A pass begins with the first reduce-scatter of a backward.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradwire.aggregators import Attached
from gradwire.collectives import Collective, Item, Operation, prepare, start_round
from gradwire.collectives.legal import uncompressed
from gradwire.engine import Outcome, Owner
from gradwire.errors import TransportError
from gradwire.integrations.backward import Backward, running
from gradwire.integrations.metrics import Sampler
from gradwire.integrations.rehearsal import alike
from gradwire.integrations.scatter import Replicas, Scatter
from gradwire.integrations.sharded_plan import Trained, options_for
from gradwire.integrations.switch import Switch
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.planner import Plan

if TYPE_CHECKING:
    from gradwire.integrations.adaptation import Adaptation
    from gradwire.integrations.gathered import GatheredWeights


class ReducedGradients:
    """The reductions of one handle.

    Args:
        model: whose backward passes are watched.
        trained: its parameters.
        members: their states, by name.
        owners: of reduce-scatters and of all-reduces between replicas, as far as there are.
        switch: the module's plans.
        adopt: called when a pass begins with another plan than the one before.
        sampler: of metrics.

    Attributes:
        weights: those that the handle gathers; None: it does not.
        adaptation: of a policy; is given averages.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: Trained,
        members: Mapping[str, Attached],
        owners: Sequence[Owner],
        switch: Switch,
        adopt: Callable[[], None],
        sampler: Sampler,
    ) -> None:
        self.groups = trained.groups
        self.owners = list(owners)
        self.sampler = sampler
        self.weights: GatheredWeights | None = None
        self.adaptation: Adaptation | None = None
        self._switch, self._adopt = switch, adopt
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {"steps": 0, "calls": 0, "wire_bytes": 0, "raw_bytes": 0}
        self._totals |= {"seconds": 0.0, "exposed_seconds": 0.0}
        self._totals |= {"kernel_seconds": 0.0, "kernel_calls": 0}
        self._pass = running()
        self._begun: set[int] = set()  # what has reduced in this pass
        self._version = 0  # the plan version that this rank offers in this pass
        self._least: int | None = None  # the least version that any rank offers, if known
        self._backward = Backward(_nothing, self._abandoned, self._forward, self._reduces)
        self._backward.watch(model)
        self._replaced: list[tuple[Any, Any, Any]] = []
        self._scatters: list[Scatter] = []
        for record in trained.records:
            of = {p: members[trained.names[p]] for p in record.fsdp_params if p in trained.names}
            self._install(record, of)

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
    def owner(self) -> Owner:
        """The owner of reduce-scatters."""
        assert self.groups.scatter is not None
        return self.owners[0]

    @property
    def replicas(self) -> Owner:
        """The owner of all-reduces between replicas."""
        assert self.groups.replicas is not None
        return self.owners[-1]

    @property
    def installed(self) -> bool:
        """Whether FSDP calls these collectives."""
        return bool(self._replaced)

    def remove(self) -> None:
        """Restore FSDP2's own collectives."""
        self._backward.unwatch()
        for record, scatter, mesh in self._replaced:
            record._reduce_scatter_comm, record.mesh_info = scatter, mesh
        self._replaced.clear()

    def all_owners(self) -> list[Owner]:
        """Those of weights, too."""
        return [*self.owners, *([] if self.weights is None else [self.weights.owner])]

    def totals(self) -> dict[str, float]:
        """Of `Sharded.stats`."""
        with self._lock:
            return dict(self._totals)

    # ---- passes

    @property
    def steps(self) -> int:
        """Backward passes that reduced gradients."""
        return int(self._totals["steps"])

    def begin(self, reduction: object) -> int:
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
            if self.adaptation is not None:
                self.adaptation.begin()
            with self._lock:
                self._totals["steps"] += 1
            self.sampler.begin(self.steps)
            before = self._switch.plan
            least = before.version if self._least is None else self._least
            self._version, self._least = self._switch.begin(least), None
            if self._switch.plan is not before:
                self._adopt()
                self.owner.comm.in_flight.mark(f"adopt: plan {self._switch.plan.version}")
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
        begun = time.perf_counter()
        options = options_for(operation, self._switch.plan.options)
        collective = prepare(owner, specs, options, operation, items[0].values.device)
        collective.check(items)
        ticket = owner.ticket(version)
        try:
            (ended,) = start_round(ticket, [(collective, items)])
            with owner.awaited():
                outcome: Outcome = ended.result()
        finally:
            ticket.close()
        if self.weights is not None:
            self.weights.changes.reduced()
        with self._lock:
            self._totals["calls"] += 1
            self._totals["raw_bytes"] += raw_bytes
            self._totals["wire_bytes"] += outcome.wire_bytes
            self._totals["seconds"] += outcome.seconds
            self._totals["exposed_seconds"] += time.perf_counter() - begun
            self._totals["kernel_seconds"] += outcome.kernel_seconds
            self._totals["kernel_calls"] += outcome.kernel_calls
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

    def _reduces(self, module: torch.nn.Module) -> bool:
        """Whether a backward of the module reduces gradients, by FSDP2's equivalent of no_sync."""
        return any(getattr(record, "reduce_grads", True) for record, *_ in self._replaced)

    def _forward(self) -> None:
        refusal = self._switch.refusal()
        if refusal is not None:
            raise refusal

    def _abandoned(self) -> None:
        """Backward ended with an exception: fail the owners, since peers wait for its scatters."""
        owners = self.all_owners()
        broken = (error for o in owners for error in (o.comm.error, o.error) if error is not None)
        cause = next(broken, None)  # a peer's, which ranks that share no group with it must know
        for owner in owners:
            rank = owner.comm.rank
            error = cause or TransportError(
                f"rank {rank}: backward raised an exception in {owner.name}, so its gradients are "
                f"not complete: see what rank {rank} raised; to go on, every rank catches it and "
                "calls the root module's reset_iter_state() and the handle's recover()",
                peer=rank,
            )
            owner.comm.fail_owner(owner, error)

    # ---- plan versions

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

    def rehearse(self, plan: Plan) -> list[Collective]:
        """Prepare the collectives of `plan`, from the scatters that all ranks last ran equally."""
        name = f"{self.owner.key}/plan {plan.version}"
        known = alike(self.owner, name, lambda: [s.last for s in self._scatters if s.last])
        aggregators = {p.name: plan.levels.aggregator(p) for p in plan.parameters}
        return [
            prepare(self.owner, last.specs(aggregators), plan.options, last.operation, last.device)
            for last in known
        ]


def _nothing() -> None:
    pass
