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

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as FSDPAllGather

from gradwire.codecs import Identity
from gradwire.handles.payloads import Payloads
from gradwire.handles.weights import OLD, Weight, WeightGather

if TYPE_CHECKING:
    from gradwire.handles.gathered import GatheredWeights


class DifferenceGather(WeightGather):
    """What FSDP2 calls to gather one group's weights.

    Attributes:
        reference: values of all ranks, with padding; None: the next gather sends all weights.
        loaded: this rank's parts of a saved reference, by parameter, until the next gather.
    """

    def __init__(
        self, of: GatheredWeights, record: Any, weights: Sequence[Weight], before: FSDPAllGather
    ) -> None:
        super().__init__(of, record, weights, before)
        self.reference: torch.Tensor | None = None
        self.loaded: list[torch.Tensor] | None = None
        self._finite: torch.Tensor | None = None  # bool[]
        self._whole: Payloads | None = None
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
        layout = self._layout(own)
        if reference is not None and not bool(self._finite):
            self._leave_out(self._lost(reference, layout))
            layout = self._layout(own)
        self.version = self.of.changes.version
        sampled = self._sample(layout, own)
        if reference is None:
            layout, values = self._as_they_are(own), own
        else:
            values = self._difference(own, reference, layout)
        sent, ended = self._send(layout, values, self._keys(False), own)

        def add() -> None:
            layout.decode(sent.payloads, every)
            self._add(every, reference, layout)
            if sampled is not None:
                sampled(every)

        return self._decoding(sent, ended, add, every)

    def _difference(
        self, own: torch.Tensor, reference: torch.Tensor, layout: Payloads
    ) -> torch.Tensor:
        """What is encoded: differences, and what is gathered uncompressed as it is."""
        difference = own - reference.view(layout.ranks, -1)[self.of.shard]
        for first, end in self._uncompressed(layout):
            difference[first:end] = own[first:end]
        return difference

    def _add(self, every: torch.Tensor, reference: torch.Tensor | None, layout: Payloads) -> None:
        """Replace decoded differences by the new reference."""
        if reference is None:
            self.reference = reference = every.clone()
        else:
            by_rank = reference.view(layout.ranks, -1)
            for first, end in self._uncompressed(layout):
                by_rank[:, first:end] = 0.0
            reference += every
            every.copy_(reference)
        self._finite = torch.isfinite(torch.stack(torch.aminmax(every))).all()
        if every.device.type == "cuda":
            self._ready = torch.cuda.current_stream(every.device).record_event()

    def _lost(self, reference: torch.Tensor, layout: Payloads) -> list[int]:
        """The parameters to which no difference is finite any more: the same on all ranks, since
        they decode the same bits."""
        by_rank = reference.view(layout.ranks, -1)
        coded = [at for at, weight in enumerate(self.weights) if not _plain(weight)]
        ends = [(layout.pieces[at].at, layout.ends[at]) for at in coded]
        finite = [torch.isfinite(by_rank[:, first:end]).all() for first, end in ends]
        told = torch.stack(finite).tolist() if finite else []
        return [at for at, good in zip(coded, told, strict=True) if not good]

    def _uncompressed(self, layout: Payloads) -> list[tuple[int, int]]:
        """(first, end) within a rank's values, of parameters that are sent as they are."""
        return [
            (piece.at, end)
            for weight, piece, end in zip(self.weights, layout.pieces, layout.ends, strict=True)
            if _plain(weight)
        ]

    def _as_they_are(self, own: torch.Tensor) -> Payloads:
        """The layout of all weights uncompressed."""
        coded, whole = self._layout(own), self._whole
        if whole is None or (whole.dtype, whole.device) != (own.dtype, own.device):
            codecs = [Identity()] * len(coded.pieces)
            of = own.numel(), coded.ranks, own.dtype, own.device
            whole = self._whole = Payloads(coded.pieces, codecs, *of)
        return whole

    # ---- state

    @property
    def kept_bytes(self) -> int:
        reference = self.reference
        return 0 if reference is None else reference.nbytes

    def state(self) -> list[torch.Tensor] | None:
        """Copies of this rank's parts of the reference, by parameter; None: there is none."""
        if self.loaded is not None:
            return [part.clone() for part in self.loaded]
        layout = self._payloads
        if self.reference is None or layout is None:
            return None
        rank = self.of.shard
        own = self.reference.view(layout.ranks, -1)[rank]
        return [own[piece.at :][: piece.lengths[rank]].clone() for piece in layout.pieces]

    def load(self, parts: list[torch.Tensor], current: bool) -> None:
        """Take what `state` gave; `current`: the version was the last one that ranks agreed on."""
        self.loaded = parts
        self.version = self.of.changes.version if current else OLD

    def forget(self) -> None:
        super().forget()
        self.reference = self.loaded = None

    def _restore(self, own: torch.Tensor) -> None:
        """Gather the reference as all ranks have loaded it."""
        parts, self.loaded = self.loaded, None
        if parts is None:
            return
        layout, part = self._as_they_are(own), torch.zeros_like(own)
        for piece, values in zip(layout.pieces, parts, strict=True):
            part[piece.at :][: values.numel()] = values.view(-1).to(own)
        sent, ended = self._send(layout, part, np.zeros(len(parts), np.uint64), part)
        reference = own.new_empty(layout.ranks * own.numel())
        decode = partial(layout.decode, sent.payloads, reference)
        self._decoding(sent, ended, decode, reference).wait()
        self.reference = reference
        self._finite = torch.isfinite(torch.stack(torch.aminmax(reference))).all()


def _plain(weight: Weight) -> bool:
    """Whether it is sent as it is."""
    return isinstance(weight.codec or Identity(), Identity)
