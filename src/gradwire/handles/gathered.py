"""The weights of FSDP2 modules that a handle gathers through codecs: all groups of parameters.

For every group, FSDP's all-gather is replaced by an object of handles/weights.py, or of
handles/differences.py with keep="reference".
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.aggregators import Attached
from gradwire.collectives import AllReduce, Request
from gradwire.collectives.calling import begin
from gradwire.engine import Outcome
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.handles.changes import Changes, Versions
from gradwire.handles.differences import DifferenceGather
from gradwire.handles.fsdp import gather_group, replace_collective, shape_of, shard_of
from gradwire.handles.metrics import Sampler, times_less
from gradwire.handles.sharded_plan import Trained, options_for
from gradwire.handles.weights import Weight, WeightGather
from gradwire.lang import Codec, rng
from gradwire.planner import Plan
from gradwire.state.formats import State
from gradwire.state.state import SavedJob, Sharding, StateSection, part_of, whole
from gradwire.waiting import result_of

_TOTALS: dict[str, float] = {
    "weights_calls": 0, "weights_wire_bytes": 0, "weights_raw_bytes": 0,
    "weights_seconds": 0.0, "weights_exposed_seconds": 0.0,
}  # fmt: skip
_OTHERS = {"weights_ratio": 1.0, "weights_kept_bytes": 0, "weights_frozen_values": 0}
_NAMED = 6  # parameters in a line
NO_STATS = _TOTALS | _OTHERS  # of a handle that gathers no weights


class GatheredWeights:
    """The gathers of one handle, installed.

    Args:
        what: the handle's, for messages.
        trained: its parameters.
        members: the parameters as their gradients are reduced, by name.
        plan: has rules for weights.
        sampler: of metrics.
        go_on: called before each collective; it may raise.

    Attributes:
        shard, shards: this rank's, and how many there are.
        keep: what is kept of gathered weights; see `attach`.
        owner: issues the gathers.
        abandoned: whether an exception has ended a forward or backward, and none has begun since.
        versions: counts what changes the weights.
        changes: agrees with all ranks on what has changed, with keep="reference", and of frozen
            weights with keep="payload".
    """

    def __init__(
        self,
        what: str,
        trained: Trained,
        members: Mapping[str, Attached],
        plan: Plan,
        seed: int,
        sampler: Sampler,
        go_on: Callable[[], None],
    ) -> None:
        assert plan.weights is not None
        self.shard, self.shards = trained.groups.shard, trained.groups.shards
        self.keep = plan.weights.keep
        self.owner = communicator(gather_group(trained.records[0])).owner(f"{what}, weights")
        self.abandoned = False
        self.sampler = sampler
        self.versions = Versions(self._shards)
        self.changes = Changes(self._by_kind, self._most, self._forget_references)
        self._options = plan.options
        self._go_on = go_on
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._totals = dict(_TOTALS)
        codecs = _codecs(plan)
        self._gathers: list[WeightGather] = []
        for record in trained.records:
            weights = []
            for parameter in record.fsdp_params:
                name = trained.names.get(parameter, "")
                key = rng.parameter_key(seed, f"weights of {name}", self.shard)
                weights.append(Weight(members.get(name), codecs.get(name), key))
            kind = DifferenceGather if self.keep == "reference" else WeightGather
            self._gathers.append(kind(self, record, weights))

    def start(self, request: Request, name: str, raw_bytes: int) -> Future[Outcome]:
        """Start a collective that gathers weights, or prepares to; its future."""
        self._go_on()
        options = options_for(request.operation, self._options)
        ended, _ = begin(self.owner, request, name, options)

        def count(ended: Future[Outcome]) -> None:
            if ended.exception() is None:
                outcome = ended.result()
                with self._lock:
                    self._totals["weights_calls"] += 1
                    self._totals["weights_raw_bytes"] += raw_bytes
                    self._totals["weights_wire_bytes"] += outcome.wire_bytes
                    self._totals["weights_seconds"] += outcome.seconds

        ended.add_done_callback(count)
        return ended

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Within it FSDP2 waits for a gather to be started, or to end."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._totals["weights_exposed_seconds"] += time.perf_counter() - begun

    # ---- plans

    def adopt(self, plan: Plan) -> None:
        """Gather as a plan says, from the next forward on; called at the same pass on all ranks."""
        codecs = _codecs(plan)
        for gather in self._gathers:
            gather.use([codecs.get(name) for name in gather.names])

    def rehearse(self, plan: Plan) -> None:
        """Compile the kernels that the plan needs."""
        codecs = _codecs(plan)
        for gather in self._gathers:
            gather.rehearse([codecs.get(name) for name in gather.names])

    def left_out(self, names: list[str]) -> None:
        """Warn that these parameters are gathered uncompressed, once of each."""
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        if new:
            warnings.warn(
                f"weights: all ranks gather {_some(new)} uncompressed from now on, for values that "
                "are not finite or near the largest float: give a mask no codec, by "
                f'weights={{"{new[0]}": None, ...}}; what is trained has diverged',
                stacklevel=2,
            )

    def remarks(self) -> list[str]:
        """What a summary says besides the plan."""
        pairs = [pair for g in self._gathers for pair in zip(g.weights, g.names, strict=True)]
        unfit = [name for weight, name in pairs if weight.unfit]
        said = "gathered uncompressed, for values that are not finite or near the largest float"
        return [f"{said}: {_some(unfit)}"] if unfit else []

    # ---- statistics

    def stats(self) -> dict[str, float | None]:
        """See `Handle.stats`."""
        with self._lock:
            totals = dict(self._totals)
        raw, wire = totals["weights_raw_bytes"], totals["weights_wire_bytes"]
        kept = sum(gather.kept_bytes for gather in self._gathers)
        once = [g for g in self._gathers if g.frozen and self.keep in ("payload", "reference")]
        values = sum(math.prod(shape_of(p)) for g in once for p in g.record.fsdp_params)
        return {
            **totals,
            "weights_ratio": times_less(raw, wire),
            "weights_kept_bytes": kept,
            "weights_frozen_values": values,
        }

    def _shards(self) -> list[torch.nn.Parameter]:
        """The parameters that an optimizer has."""
        return [p.sharded_param for g in self._gathers for p in g.record.fsdp_params]

    def remove(self) -> None:
        """Restore FSDP2's own gathers and end counting versions: the handle is detached."""
        self.versions.unwatch()
        for gather in self._gathers:
            replace_collective(gather.record, "all_gather", gather.before)

    # ---- differences

    @property
    def differences(self) -> list[DifferenceGather]:
        return [gather for gather in self._gathers if isinstance(gather, DifferenceGather)]

    def _by_kind(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's shards, of frozen groups and of others; the latter only if it is told when
        they change."""
        kinds: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for gather in self._gathers:
            frozen = gather.frozen
            if frozen or self.differences:
                params = gather.record.fsdp_params
                kinds[not frozen].extend(shard_of(p.sharded_param) for p in params)
        return kinds

    def _most(self, told: int, device: torch.device) -> int:
        """The largest of what ranks tell."""
        values = torch.tensor([told], dtype=torch.int32, device=device)
        ended = self.start(AllReduce(values, "max"), "changes of weights", 0)
        with self.owner.awaited():
            result_of(ended)
        return int(values.item())

    def _forget_references(self) -> None:
        for gather in self.differences:
            gather.forget()

    # ---- state

    def load(
        self,
        parts: Mapping[str, torch.Tensor],
        current: Collection[str],
        changed: bool,
        digest: str | None,
    ) -> None:
        """Use what a state has; what is kept is dropped.

        Args:
            parts: this rank's shards of references, by parameter.
            current: parameters whose reference is of the last version.
            changed, digest: see `Changes.loaded`.
        """
        for gather in self._gathers:
            gather.forget()
        for one in self.differences:
            one.load(parts, current)
        self.changes.loaded(changed, not parts, digest)


def _codecs(plan: Plan) -> dict[str, Codec | None]:
    return {p.name: plan.levels.weight(p) for p in plan.parameters}


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)


# ---- state


def weights_section(weights: GatheredWeights, sharding: Sharding) -> StateSection:
    """Of gathered weights. With keep="reference" each rank saves, under `weights`:

        references   parameter -> this rank's shard, in its own shape
        current      parameters whose reference is of the last version that ranks agreed on
        changed      whether this rank's weights had changed since
        digest       of this rank's weights, since the loaded model may have others

    Of a saved job with as many shards, sharded in the same way, a rank takes its own; otherwise the
    shards of all ranks of one replica are put together, and sharded anew.

    `counted` says that an optimizer counted the versions of the weights as the state was saved: it
    will from now on, although it has not stepped yet.
    """
    changes = weights.changes

    def save() -> dict[str, Any]:
        found: dict[str, Any] = {"counted": True} if weights.versions.steps else {}
        if weights.keep != "reference":
            return found
        references: dict[str, torch.Tensor] = {}
        current: list[str] = []
        for gather in weights.differences:
            for name, part in gather.state().items():
                references[name] = part.view(sharding.part(name, weights.shard))
            if gather.version >= changes.needed(gather.frozen):
                current += gather.names
        kept = {"references": references, "current": current}
        return {
            **found,
            "weights": {**kept, "changed": changes.changed, "digest": changes.digest()},
        }

    def loading(job: SavedJob) -> Callable[[], None]:
        parts: dict[str, torch.Tensor] = {}
        current: set[str] = set()
        changed, digest = False, None
        if weights.differences and all(one.get("weights") is not None for one in job.states):
            for state in job.states:
                _check_references(state, sharding)
            by_rank = {state["rank"]: state["weights"] for state in job.states}
            there = sharding.of(job.states[0])
            if job.own is not None and there == sharding:
                own = by_rank[job.rank]
                parts, digest = dict(own["references"]), own.get("digest")
            else:
                parts = dict(_resharded(by_rank, there, sharding, weights.shard))
            current = set.intersection(*(set(one["current"]) for one in by_rank.values()))
            changed = any(one["changed"] for one in by_rank.values())
        counted = (job.own or job.states[0]).get("counted") is True

        def load() -> None:
            if counted:
                weights.versions.steps = max(weights.versions.steps, 1)
            weights.load(parts, current, changed, digest)

        return load

    return StateSection(save, loading)


def _resharded(
    by_rank: Mapping[int, State], there: Sharding, here: Sharding, shard: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """This shard of what all ranks of one replica saved, if they are there."""
    parts = [by_rank[rank]["references"] for rank in range(there.shards) if rank in by_rank]
    if len(parts) < there.shards:
        return
    for name in parts[0]:
        if all(name in part for part in parts):
            every = whole([part[name] for part in parts], there.spec(name).dim)
            yield name, part_of(every, here.spec(name), shard, here.shards)


def _check_references(state: State, here: Sharding) -> None:
    """Check what one rank saved of its gathered weights, and that they are shards of this module's
    parameters, as that rank's module was sharded."""
    saved, shards, dims = state["weights"], state.get("shards"), state.get("dims")
    if not (
        isinstance(saved, Mapping)
        and isinstance(saved.get("references"), Mapping)
        and all(isinstance(t, torch.Tensor) for t in saved["references"].values())
        and isinstance(saved.get("current"), Sequence)
        and all(isinstance(name, str) for name in saved["current"])
        and isinstance(saved.get("changed"), bool)
        and type(shards) is int
        and isinstance(dims, Mapping)
    ):
        raise ConfigError(
            f"load_state_dict: the state has {saved!r:.60} for 'weights': it is not a result of "
            "Handle.state_dict"
        )
    there = here.of(state)
    for name, part in saved["references"].items():
        dim, shape = dims.get(name, 0), here.shapes.get(name, ())
        known = type(dim) is int and 0 <= dim < len(shape)
        if not (
            known
            and part.shape == there.part(name, state["rank"] % shards)
            and not part.is_meta
            and part.layout == torch.strided
        ):
            raise ConfigError(
                f"load_state_dict: the gathered weights of {name}, a tensor of shape "
                f"{tuple(part.shape)}, are no shard of this module's parameter: load a state of "
                "the same model"
            )
