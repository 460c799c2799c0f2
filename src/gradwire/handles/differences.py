"""The all-gather of FSDP2's weights as differences to what was gathered before, for one group.

Vocabulary
    reference   the weights that all ranks decoded last: the whole group, equal on all ranks

    1. this rank encodes (own shard - own part of the reference)
    2. the payloads of all ranks are gathered, as bytes
    3. every rank decodes them and adds them to its reference, which FSDP2 gets

The next difference is to what was decoded, so it has this one's error in it: errors do not add up
(the idea of SDP4Bit). A difference is smaller than a weight, and so is the grid of its codes. What
is gathered uncompressed is sent as it is. The first gather sends all weights as they are. What is
not finite in a reference is lost to differences: its parameter is gathered uncompressed from then
on.

Where all ranks know that the weights are those of the reference (handles/changes.py), nothing
is sent: in backward, in recomputation and in micro-batches.

Bytes sent per rank and version: its payloads to each of N - 1 ranks, and one number. Memory: the
whole model in the dtype in which it is gathered, on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.codecs import Identity
from gradwire.handles.fsdp import gathered
from gradwire.handles.payloads import Payloads
from gradwire.handles.weights import OLD, Weight, WeightGather

if TYPE_CHECKING:
    from gradwire.handles.gathered import GatheredWeights


class DifferenceGather(WeightGather):
    """What FSDP2 calls to gather one group's weights.

    Attributes:
        reference: values of all ranks, with padding; None: the next gather sends all weights.
        loaded: this rank's parts of a saved reference, by name, until the next gather.
    """

    def __init__(self, of: GatheredWeights, record: Any, weights: Sequence[Weight]) -> None:
        super().__init__(of, record, weights)
        self.reference: torch.Tensor | None = None
        self.loaded: dict[str, torch.Tensor] | None = None
        self._finite: torch.Tensor | None = None  # bool[]
        self._ready: torch.cuda.Event | None = None  # the reference is, on a GPU

    def gather(self, every: torch.Tensor, own: torch.Tensor) -> dist.Work | None:
        needed = self.agreed(own.device)
        self._restore(own)
        if self._ready is not None:
            torch.cuda.current_stream(own.device).wait_event(self._ready)
        reference = self.reference
        if reference is not None and self.version >= needed:
            every.copy_(reference)
            return None
        if reference is not None and not bool(self._finite):
            self._leave_out_lost(reference, self._layout(own))
        self.version = self.of.changes.version
        layout, values = self._layout(own), own
        sampled = self._sample(layout, own)
        if reference is None:
            layout = self._as_they_are(own)
        else:
            values = own.clone()
            of_own = reference.view(layout.ranks, -1)[self.of.shard]
            for part in layout.coded.values():
                values[part] -= of_own[part]

        def add(every: torch.Tensor) -> None:
            if reference is None:
                self._refer_to(every.clone())
            else:
                by_rank, before = (t.view(layout.ranks, -1) for t in (every, reference))
                for part in layout.coded.values():
                    by_rank[:, part] += before[:, part]
                self._refer_to(reference.copy_(every))
            sampled(every)

        return self._start(layout, values, self._keys(False), own, every, add)

    def _refer_to(self, reference: torch.Tensor) -> None:
        self.reference = reference
        self._finite = torch.isfinite(torch.stack(torch.aminmax(reference))).all()
        if reference.is_cuda:
            self._ready = torch.cuda.current_stream(reference.device).record_event()

    def _leave_out_lost(self, reference: torch.Tensor, layout: Payloads) -> None:
        """Leave out the parameters to which no difference is finite any more: the same on all
        ranks, since they decode the same bits."""
        by_rank = reference.view(layout.ranks, -1)
        lost = [n for n, part in layout.coded.items() if not by_rank[:, part].isfinite().all()]
        if lost:
            self._leave_out(lost)

    def _as_they_are(self, own: torch.Tensor) -> Payloads:
        """The layout of all weights uncompressed."""
        return self._laid_out(own, [Identity()] * len(self.weights))

    # ---- state

    @property
    def kept_bytes(self) -> int:
        reference = self.reference
        return 0 if reference is None else reference.nbytes

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's parts of the reference, by name; none if there is none."""
        if self.loaded is not None:
            return {name: part.clone() for name, part in self.loaded.items()}
        if self.reference is None:
            return {}
        rank, ranks = self.of.shard, self.of.shards
        own = self.reference.view(ranks, -1)[rank]
        pieces = gathered(self.record, own.numel(), ranks)
        parts = [own[piece.at :][: piece.lengths[rank]].clone() for piece in pieces]
        return dict(zip(self.names, parts, strict=True))

    def load(self, parts: Mapping[str, torch.Tensor], current: Collection[str]) -> None:
        """Take what `state` gave, if it has all parameters; `current`: those of the version that
        ranks agreed on last."""
        if all(name in parts for name in self.names):
            self.loaded = {name: parts[name] for name in self.names}
            is_current = all(name in current for name in self.names)
            self.version = self.of.changes.version if is_current else OLD

    def forget(self) -> None:
        super().forget()
        self.reference = self.loaded = None

    def _restore(self, own: torch.Tensor) -> None:
        """Gather the reference as all ranks have loaded it."""
        parts, self.loaded = self.loaded, None
        if parts is None:
            return
        layout, part = self._as_they_are(own), torch.zeros_like(own)
        for piece, values in zip(layout.pieces, parts.values(), strict=True):
            part[piece.at :][: values.numel()] = values.view(-1).to(own)
        every = own.new_empty(layout.ranks * own.numel())
        keys = np.zeros(len(parts), np.uint64)
        self._start(layout, part, keys, part, every, self._refer_to).wait()
