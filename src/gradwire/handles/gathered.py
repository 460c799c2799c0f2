"""The weights of FSDP2 modules that a handle gathers through codecs: all groups of parameters.

For every group, FSDP's all-gather is replaced by an object of handles/weights.py, or of
handles/differences.py with keep="reference".
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from gradwire.aggregators import Attached
from gradwire.collectives import AllReduce, Request
from gradwire.collectives.calling import begin
from gradwire.engine import Outcome
from gradwire.groups import communicator
from gradwire.handles.changes import Changes
from gradwire.handles.differences import DifferenceGather
from gradwire.handles.fsdp import gather_group, replace_collective, shape_of, shard_of
from gradwire.handles.metrics import Sampler, times_less
from gradwire.handles.sharded_plan import Trained, options_for
from gradwire.handles.versions import Versions
from gradwire.handles.weights import Weight, WeightGather
from gradwire.lang import Codec, rng
from gradwire.planner import Plan
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
