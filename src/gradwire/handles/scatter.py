"""The objects that FSDP2 calls in place of torch's collectives, for one group of parameters.

A parameter's values for another rank are encoded once. Each rank sums the received values and its
own values, which stay exact. Under HSDP the sum is then averaged over the replicas through the same
codec. The error of that average is kept in the part of the residual that belongs to the own shard,
for which the scatter has no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as FSDPReduceScatter

from gradwire.aggregators import Aggregator, Attached, Compressed, ErrorFeedback
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.collectives import AllReduce, Operation, ReduceScatter
from gradwire.collectives.legal import FLOATS, uncompressed
from gradwire.errors import ConfigError
from gradwire.handles.fsdp import Groups, Piece, factor_of, scattered
from gradwire.handles.metrics import Sampler, round_trip
from gradwire.lang import Codec
from gradwire.partition import Spec

if TYPE_CHECKING:
    from gradwire.handles.scatters import Scatters


@dataclass(frozen=True)
class Scattered:
    """The layout of the last reduce-scatter of a group of parameters.

    Attributes:
        members: the parameters, in FSDP's order.
        shards: per parameter, the number of values of each rank.
        stride: values per rank, with padding.
    """

    members: tuple[Attached, ...]
    shards: tuple[tuple[int, ...], ...]
    stride: int
    operation: Operation
    dtype: torch.dtype
    device: torch.device

    @property
    def lengths(self) -> list[int]:
        """The number of values of each parameter, over all ranks."""
        return [sum(lengths) for lengths in self.shards]

    @property
    def reaches_all(self) -> bool:
        """Whether every rank gets values from every other."""
        return all(map(any, zip(*self.shards, strict=True)))

    def specs(self, aggregators: Mapping[str, Aggregator]) -> list[Spec]:
        """Its description, equal on all ranks, with these aggregators by parameter."""
        found = []
        for member, lengths in zip(self.members, self.shards, strict=True):
            aggregator = aggregators[member.name]
            wire = codec_of(aggregator, self.dtype) or uncompressed(self.operation, self.dtype)
            feedback = isinstance(aggregator, ErrorFeedback) and self.dtype in FLOATS
            found.append(
                Spec(member.name, sum(lengths), self.dtype, wire, feedback, 0, lengths, self.stride)
            )
        return found


class Scatter(FSDPReduceScatter):
    """The reduce-scatter of one group of parameters.

    Args:
        of: the gradients of all groups: runs it.
        members: the parameters, by FSDP's records.

    Attributes:
        last: the layout of its last call.
    """

    def __init__(self, of: Scatters, members: Mapping[Any, Attached]) -> None:
        self.of = of
        self.members = members
        self.last: Scattered | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor`, which has a part per rank, into `output_tensor`, this rank's."""
        of, (reduction, factor) = self.of, factor_of(op)
        rank, ranks, owner = of.groups.shard, of.groups.shards, of.owner
        stride, device = output_tensor.numel(), input_tensor.device
        version = of.reduces(self)
        pieces = scattered(input_tensor.numel(), ranks)
        what = self.last = Scattered(
            tuple(_member(self.members, piece.parameter) for piece in pieces),
            tuple(piece.lengths for piece in pieces),
            stride,
            Operation("reduce_scatter", reduction),
            input_tensor.dtype,
            device,
        )
        samples = []
        specs = what.specs({member.name: member.aggregator for member in what.members})
        items = []
        for spec, piece, member in zip(specs, pieces, what.members, strict=True):
            stretches = [
                input_tensor[at * stride + piece.at :][:length]
                for at, length in enumerate(piece.lengths)
            ]
            weights = [1.0] * ranks
            if of.groups.of_replicas > 1:  # the own shard's owes to the scatter's result
                weights[rank] = (ranks if reduction == "avg" else 1) / factor
            member.add_owed(*stretches, weights=weights)
            own = stretches[rank]
            home = output_tensor[piece.at :][: piece.lengths[rank]]
            residual = _residual(member, home, device, of.groups)
            if residual is not None and of.groups.of_replicas == 1:
                _pay(_own(residual, piece, rank), own)
            home.copy_(own)
            if of.sampler.running:
                samples.append(Sample(member, piece, stretches, residual))
            values = input_tensor[piece.at :][: (ranks - 1) * stride + piece.lengths[-1]]
            request = ReduceScatter(
                values, reduction, piece.lengths, stride, residual, home,
                codec=codec_of(member.aggregator, values.dtype),
            )  # fmt: skip
            items.append(request.item(spec, member.keys, member.step, rank, ranks))
            member.step += 1
        raw_bytes = input_tensor.nbytes * (ranks - 1) // ranks
        least = of.run(owner, specs, items, what.operation, raw_bytes, version)
        for sample in samples:
            sample.take(of.sampler, rank)
        for piece, end in zip(pieces, [*(p.at for p in pieces[1:]), stride], strict=True):
            output_tensor[piece.at + piece.lengths[rank] : end].zero_()  # padding, seen by hooks
        if of.adaptation is not None and of.groups.of_replicas == 1:
            for piece, member in zip(pieces, what.members, strict=True):
                of.adaptation.add(member.name, output_tensor[piece.at :][: piece.lengths[rank]])
        of.scattered(least, what.reaches_all, device)
        if factor != 1.0:
            output_tensor.mul_(factor)
        return None


class Sample:
    """A parameter's sample, for metrics, begun before its reduce-scatter.

    Args:
        stretches: its values for each rank.
        residual: before.
    """

    def __init__(
        self,
        member: Attached,
        piece: Piece,
        stretches: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
    ) -> None:
        self.member = member
        self.lengths = piece.lengths
        self.gradient = torch.cat([part.view(-1) for part in stretches])
        self.residual = residual
        self.fed = self.gradient.float()
        if residual is not None:
            self.fed = self.fed + residual.view(-1)

    def take(self, sampler: Sampler, rank: int) -> None:
        """Called after the reduce-scatter, which has changed the residual."""
        codec = codec_of(self.member.aggregator, self.gradient.dtype)
        if codec is None:
            return
        if self.residual is not None:
            sent = self.fed - self.residual.view(-1)
        else:
            sent = round_trip(codec, self.gradient, self.member)
            own, whole = (v.split(list(self.lengths)) for v in (sent, self.fed))
            own[rank].copy_(whole[rank])  # exact
        sampler.add(self.member.name, self.fed, sent, self.residual)


class Replicas(dist.ProcessGroup):
    """Replaces the process group between HSDP's replicas; FSDP only calls its `allreduce`.

    Args:
        group: that process group.
        of: the gradients of all groups: runs the all-reduces.
        members: the parameters, by FSDP's records.
    """

    def __init__(
        self, group: dist.ProcessGroup, of: Scatters, members: Mapping[Any, Attached]
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group = group
        self.of = of
        self.members = members

    # Equal to `group`, since torch looks groups up in a table for its error messages.

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.group

    def __hash__(self) -> int:
        return hash(self.group)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce this rank's shards of all parameters, in place."""
        of, (values,), (reduction, factor) = self.of, tensors, factor_of(opts.reduceOp)
        groups = of.groups
        shard, shards = groups.shard, groups.shards
        of_ranks = groups.replica, groups.of_replicas
        of.reduces(self)
        specs, items = [], []
        for piece in scattered(values.numel() * shards, shards):
            member, device = _member(self.members, piece.parameter), values.device
            if not piece.lengths[shard]:
                member.step += 1  # as on ranks that have values of it: steps stay equal
                continue
            residual = _residual(member, values, device, groups)
            part = values[piece.at :][: piece.lengths[shard]]
            request = AllReduce(
                part, reduction, None if residual is None else _own(residual, piece, shard),
                codec=codec_of(member.aggregator, values.dtype),
            )  # fmt: skip
            spec = request.spec(member.name, member.rotation, groups.of_replicas)
            specs.append(spec)
            items.append(request.item(spec, member.keys, member.step, *of_ranks))
            member.step += 1
        raw_bytes = 2 * values.nbytes * (groups.of_replicas - 1) // groups.of_replicas
        operation = Operation("all_reduce", reduction)
        of.between_replicas(specs, items, operation, raw_bytes, values.device)
        if of.adaptation is not None:
            for spec, item in zip(specs, items, strict=True):
                of.adaptation.add(spec.name, item.values)
        if factor != 1.0:
            values.mul_(factor)
        return Completed()


class Completed(dist.Work):
    """The Work of a completed collective."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


def codec_of(aggregator: Aggregator, dtype: torch.dtype) -> Codec | None:
    """The codec of a parameter that FSDP2 reduces in this dtype; None: uncompressed."""
    inner = getattr(aggregator, "inner", aggregator)
    return inner.codec if isinstance(inner, Compressed) and dtype in FLOATS else None


def _member(members: Mapping[Any, Attached], parameter: Any) -> Attached:
    if parameter not in members:
        raise ConfigError(
            f"FSDP2 reduces the gradient of {parameter}, which did not exist at attach: detach and "
            "attach again"
        )
    return members[parameter]


def _residual(
    member: Attached, values: torch.Tensor, device: torch.device, groups: Groups
) -> torch.Tensor | None:
    """A parameter's residual, if its aggregator keeps one and its dtype can be compressed."""
    state = member.context(values, device, groups.rank, groups.size).state
    return state.get(RESIDUAL) if values.dtype in FLOATS else None


def _own(residual: torch.Tensor, piece: Piece, rank: int) -> torch.Tensor:
    """The part of a parameter's residual that belongs to this rank's shard."""
    return residual[sum(piece.lengths[:rank]) :][: piece.lengths[rank]]


def _pay(owed: torch.Tensor, own: torch.Tensor) -> None:
    """Add the residual of the own shard, left by another number of ranks, to the own values, which
    are sent exactly; then clear it."""
    own += owed.to(own.dtype)
    owed.zero_()
