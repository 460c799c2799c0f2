"""The all-gather of FSDP2's weights through codecs (THESIS 5.6, Alg. C.1), for one group.

    1. this rank encodes its shard of every parameter
    2. the payloads of all ranks are gathered, as bytes
    3. every rank decodes all of them, its own too: all compute with the same weights

The optimizer's shards are read only. Random numbers derive from the parameter, the shard, and the
number of reductions that the gradient had when an optimizer last stepped: so forward, backward,
recomputation and micro-batches decode the same bits (THESIS Eq. 5.2), and so do all replicas. If no
torch Optimizer steps, every reduction counts as a new version of the weights.

Bytes sent per rank and gather: its payloads to each of N - 1 ranks; twice per step, or once with
keep="payload", which keeps N ranks' payloads in memory: the compressed model. Of a group that has
no trained parameter (adapters, LoRA) payloads are then kept until its weights have changed
(handles/changes.py): they are encoded and sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.aggregators import Attached
from gradwire.codecs import Codec, Identity
from gradwire.collectives import AllGather
from gradwire.collectives.legal import FLOATS
from gradwire.handles.backward import in_backward
from gradwire.handles.decoding import Decoding
from gradwire.handles.fsdp import (
    FSDPAllGather,
    forward_of,
    gathered,
    gathers_again,
    gathers_shards,
    replace_collective,
)
from gradwire.handles.payloads import Payloads, kernels_of
from gradwire.lang import rng

if TYPE_CHECKING:
    from gradwire.handles.gathered import GatheredWeights


OLD = -1  # a version before all others


@dataclass(eq=False)
class Weight:
    """A parameter that is gathered.

    Attributes:
        member: the parameter as its gradient is reduced; None: it has none.
        codec: None: uncompressed.
        unfit: uncompressed although the plan has a codec for it; see handles/payloads.py.
        key: of the random numbers: equal on all replicas of a shard.
    """

    member: Attached | None
    codec: Codec | None
    key: int
    unfit: bool = False


class WeightGather(FSDPAllGather):
    """What FSDP2 calls to gather one group's weights.

    Args:
        of: the weights of all groups: sends, counts, and has the rules.
        record: FSDP's of the group.
        weights: of each of its parameters, in order.

    Attributes:
        before: FSDP's own all-gather; what FSDP2 gathers anew from weights that were decoded
            already, and groups of several dtypes, go through it.
        kept: the payloads of the last gather of a forward, with keep="payload".
        version: of the weights, as `Changes` counts them, when they were last gathered; OLD if
            nobody told when they changed.
    """

    def __init__(self, of: GatheredWeights, record: Any, weights: Sequence[Weight]) -> None:
        self.of = of
        self.record = record
        self.weights = list(weights)
        self.before: FSDPAllGather = replace_collective(record, "all_gather", self)
        self.kept: torch.Tensor | None = None
        self._next: list[Codec | None] | None = None
        self._payloads: Payloads | None = None
        self.version = OLD
        self._counted: int | None = None  # steps of optimizers as weights were encoded anew
        self._steps: list[int] = []  # of the gradients, from then
        self._draws = 0  # gathers that drew anew from the same weights

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.before.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor`, this rank's part, into `output_tensor`, which has all parts."""
        if not gathers_shards(self.record) or input_tensor.dtype not in FLOATS:
            return self.before(output_tensor, input_tensor, group, async_op)
        if self._next is not None and not in_backward():
            self._adopt(self._next)
        with self.of.exposed():
            return self.gather(output_tensor, input_tensor)

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return ["" if weight.member is None else weight.member.name for weight in self.weights]

    @property
    def frozen(self) -> bool:
        """Whether none of the parameters is trained."""
        return not any(p.sharded_param.requires_grad for p in self.record.fsdp_params)

    def agreed(self, device: torch.device) -> int:
        """The version of the weights that ranks agree on as they gather."""
        forward = forward_of(self.record)
        return self.of.changes.agreed(self, device, self.frozen, forward)

    def use(self, codecs: Sequence[Codec | None]) -> None:
        """Gather in these codecs, of each parameter, from the next forward on; equal on all
        ranks."""
        self._next = list(codecs)

    def _adopt(self, codecs: Sequence[Codec | None]) -> None:
        self._next = None
        if codecs != [weight.codec for weight in self.weights]:
            for weight, codec in zip(self.weights, codecs, strict=True):
                weight.codec, weight.unfit = codec, False
            self._payloads = self.kept = None

    def _leave_out(self, unfit: Sequence[int]) -> None:
        """Gather these parameters uncompressed until the plan changes, or a state is loaded: then
        they are found again, so no state has them. Equal on all ranks."""
        for weight in (self.weights[at] for at in unfit):
            weight.codec, weight.unfit = None, True
        self._payloads = self.kept = None
        self.version = OLD
        self.of.left_out([self.names[at] for at in unfit])

    def gather(self, every: torch.Tensor, own: torch.Tensor) -> dist.Work | None:
        """Gather this rank's values, with padding, into those of all ranks."""
        layout, again = self._layout(own), in_backward()
        frozen = self.of.keep == "payload" and self.frozen
        needed = self.agreed(own.device) if frozen else OLD
        if self.kept is not None and (again or (frozen and self.version >= needed)):
            layout.decode(self.kept, every)
            return None
        sampled = self._sample(layout, own)
        work = self._start(layout, own, self._keys(again), own, every, sampled)
        if not again:
            keeps = self.of.keep == "payload" and (frozen or gathers_again(self.record))
            self.kept = work.payloads if keeps else None
            self.version = self.of.changes.version if frozen else OLD
        return work

    def _sample(self, layout: Payloads, own: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """What notes the error of this rank's values, given those of all ranks decoded, in a
        forward of which metrics are due to be sampled."""
        if in_backward() or not self.of.sampler.due:
            return _nothing
        values = own.clone()

        def sample(every: torch.Tensor) -> None:
            decoded = every.view(layout.ranks, -1)[self.of.shard]
            for weight, name, piece in zip(self.weights, self.names, layout.pieces, strict=True):
                if weight.codec is not None and piece.lengths[self.of.shard]:
                    part = slice(piece.at, piece.at + piece.lengths[self.of.shard])
                    self.of.sampler.add_weight(name, values[part].float(), decoded[part].float())

        return sample

    def _start(
        self,
        layout: Payloads,
        values: torch.Tensor,
        keys: np.ndarray,
        own: torch.Tensor,
        every: torch.Tensor,
        then: Callable[[torch.Tensor], None],
    ) -> Decoding:
        """Encode this rank's `values`, which stand for its `own`, and start to gather into `every`;
        `then` is called with it once it is decoded."""
        payloads = torch.empty(sum(layout.nbytes), dtype=torch.uint8, device=own.device)
        layout.encode(values, payloads, self.of.shard, keys)
        looks = self._looks(layout)
        if looks:
            layout.looked = True
            layout.withhold(values, payloads, self.of.shard)
        sent = layout.own(payloads, self.of.shard)
        request = AllGather(sent, lengths=layout.nbytes, into=payloads)
        ended = self.of.start(request, "payloads of weights", own.nbytes * (layout.ranks - 1))

        def decode() -> list[int]:
            # What a forward allocates in torch's inference mode may be changed in no other mode.
            with torch.inference_mode():
                unfit = layout.withheld(payloads) if looks else []
                if not unfit:
                    layout.decode(payloads, every)
                    then(every)
                return unfit

        def once_more(unfit: list[int]) -> None:
            self._leave_out(unfit)
            with self.of.exposed():
                work = self.gather(every, own)
            if work is not None:
                work.wait()

        return Decoding(self.of, ended, payloads, decode, once_more)

    def _looks(self, layout: Payloads) -> bool:
        """Whether ranks look for unfit parameters in this gather: equal on all of them. On a GPU
        hosts would wait for it in each step; there it is done in the first gather of a layout, and
        for a group that is gathered only once its weights have changed."""
        rare = self.frozen and self.of.keep in ("payload", "reference")
        often = not layout.looked or rare or layout.device.type == "cpu"
        return often and not in_backward()

    def rehearse(self, codecs: Sequence[Codec | None]) -> None:
        """Compile the kernels of these codecs."""
        known = self._payloads
        if known is not None:
            for codec in set(codecs):
                kernels_of(codec or Identity(), known.dtype, known.device)

    @property
    def kept_bytes(self) -> int:
        """Memory of what is kept between gathers."""
        kept = self.kept  # a pass may drop it
        return 0 if kept is None else kept.nbytes

    def forget(self) -> None:
        """Draw anew from the next gather on: a state was loaded."""
        self.kept, self.version, self._counted = None, OLD, None
        if self._payloads is not None:
            self._payloads.looked = False

    def _layout(self, own: torch.Tensor) -> Payloads:
        known = self._payloads
        if known is None or (known.dtype, known.device) != (own.dtype, own.device):
            codecs = [weight.codec or Identity() for weight in self.weights]
            known = self._payloads = self._laid_out(own, codecs)
        return known

    def _laid_out(self, own: torch.Tensor, codecs: Sequence[Codec]) -> Payloads:
        pieces = gathered(self.record, own.numel(), self.of.shards)
        return Payloads(pieces, codecs, own.dtype, own.device)

    def _keys(self, again: bool) -> np.ndarray:
        """The keys of a gather's random numbers, by parameter; `again`: in backward."""
        redraws = again and self.of.keep == "redraw"
        self._draws = self._draws + 1 if redraws else 0
        known, now = self._counted, self.of.versions.steps
        # 0: nobody counts the versions of the weights. Numbers of frozen ones stay.
        if not (now == known != 0 or (self.frozen and known is not None)):
            self._counted = now
            self._steps = [0 if w.member is None else w.member.step for w in self.weights]
        keys = np.array([w.key for w in self.weights], dtype=np.uint64)
        return rng.step_keys(keys, np.array(self._steps, dtype=np.int64), self._draws)


def _nothing(every: torch.Tensor) -> None:
    """What follows a gather that is not sampled."""
