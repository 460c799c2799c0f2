"""The objects that FSDP2 calls in place of torch's collectives, for one group of parameters.

A parameter's values for another rank are encoded once. Each rank sums the received values and its
own values, which stay exact. Under HSDP the sum is then averaged over the replicas through the same
codec. The error of that average is kept in the part of the residual that belongs to the own shard,
for which the scatter has no error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradwire.aggregators import Attached
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.collectives import AllReduce, ReduceScatter, Request
from gradwire.collectives.legal import FLOATS
from gradwire.errors import ConfigError
from gradwire.handles.fsdp import Allocates, FSDPReduceScatter, Piece, factor_of, scattered

if TYPE_CHECKING:
    from gradwire.handles.scatters import Scatters


@dataclass(frozen=True)
class Scattered:
    """What a reduce-scatter of a group of parameters has, equal on all ranks.

    Attributes:
        members: the parameters, in FSDP's order.
        pieces: their places in a rank's part.
        stride: values of a rank's part, with padding.
        op, algorithm: of the reduction.
        dtype, device: of the gradients.
    """

    members: tuple[Attached, ...]
    pieces: tuple[Piece, ...]
    stride: int
    op: str
    algorithm: str
    dtype: torch.dtype
    device: torch.device

    @property
    def lengths(self) -> list[int]:
        """The number of values of each parameter, over all ranks."""
        return [sum(piece.lengths) for piece in self.pieces]

    def reductions(self, parts: torch.Tensor, own: torch.Tensor, rank: int) -> list[Request]:
        """Of the parameters' gradients.

        Args:
            parts: a part for each rank, one after the other.
            own: for this rank's sums.
        """
        found: list[Request] = []
        for piece in self.pieces:
            span = (len(piece.lengths) - 1) * self.stride + piece.lengths[-1]
            values, home = parts[piece.at :][:span], own[piece.at :][: piece.lengths[rank]]
            found.append(
                ReduceScatter(
                    values, self.op, piece.lengths, self.stride, None, home,
                    algorithm=self.algorithm,
                )
            )  # fmt: skip
        return found


class Scatter(Allocates, FSDPReduceScatter):
    """The reduce-scatter of one group of parameters.

    Args:
        of: the gradients of all groups: runs it.
        members: the parameters, by FSDP's records.

    Attributes:
        last: what its last call had.
    """

    def __init__(self, of: Scatters, members: Mapping[Any, Attached]) -> None:
        self.of = of
        self.members = members
        self.last: Scattered | None = None

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
        rank, ranks = of.groups.shard, of.groups.shards
        of.reduces(self)
        pieces = tuple(scattered(input_tensor.numel(), ranks))
        members = tuple(_member(self.members, piece.parameter) for piece in pieces)
        what = self.last = Scattered(
            members, pieces, output_tensor.numel(), reduction, of.plan.options.algorithm,
            input_tensor.dtype, input_tensor.device,
        )  # fmt: skip
        requests = what.reductions(input_tensor, output_tensor, rank)
        weights = [1.0] * ranks
        if of.groups.of_replicas > 1:  # the own shard's owes to the scatter's result
            weights[rank] = (ranks if reduction == "avg" else 1) / factor
        for request, piece, member in zip(requests, pieces, members, strict=True):
            residual, shards = _residual(member, input_tensor, of), request.shards
            member.add_owed(*shards, weights=weights)
            if residual is not None and of.groups.of_replicas == 1:
                _pay(_own(residual, piece, rank), shards[rank])
            request.target.copy_(shards[rank])
        of.scatter(members, requests, input_tensor)
        for piece in pieces:  # padding, seen by hooks
            output_tensor[piece.at + piece.lengths[rank] : piece.end].zero_()
        if factor != 1.0:
            output_tensor.mul_(factor)
        return None


class Replicas(dist.ProcessGroup):
    """Replaces the process group between HSDP's replicas; FSDP only calls its `allreduce`.

    Args:
        group: that process group.
        hop: given this rank's shards of all parameters and the reduction, reduces them in place.
    """

    def __init__(self, group: dist.ProcessGroup, hop: Callable[[torch.Tensor, Any], None]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group = group
        self.hop = hop

    # Equal to `group`, since torch looks groups up in a table for its error messages.

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.group

    def __hash__(self) -> int:
        return hash(self.group)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        self.hop(tensors[0], opts.reduceOp)
        return Completed()


def reduce_replicas(
    of: Scatters, known: Mapping[Any, Attached], values: torch.Tensor, op: Any
) -> None:
    """`Replicas.hop` of one group of parameters, through their codecs.

    Args:
        of: the gradients of all groups: runs the all-reduces.
        known: the parameters, by FSDP's records.
    """
    reduction, factor = factor_of(op)
    shard, shards = of.groups.shard, of.groups.shards
    of.reduces(known)
    members: list[Attached] = []
    requests: list[Request] = []
    for piece in scattered(values.numel() * shards, shards):
        member = _member(known, piece.parameter)
        if not piece.lengths[shard]:
            member.step += 1  # as on ranks that have values of it: steps stay equal
            continue
        residual = _residual(member, values, of)
        own = None if residual is None else _own(residual, piece, shard)
        members.append(member)
        requests.append(AllReduce(values[piece.at :][: piece.lengths[shard]], reduction, own))
    of.between_replicas(members, requests, values)
    if factor != 1.0:
        values.mul_(factor)


class Completed(dist.Work):
    """The Work of a completed collective."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


def _member(members: Mapping[Any, Attached], parameter: Any) -> Attached:
    if parameter not in members:
        raise ConfigError(
            f"FSDP2 reduces the gradient of {parameter}, which did not exist at attach: detach and "
            "attach again"
        )
    return members[parameter]


def _residual(member: Attached, values: torch.Tensor, of: Scatters) -> torch.Tensor | None:
    """A parameter's residual, if its aggregator keeps one and its dtype can be compressed."""
    state = member.state_on(values.device, of.groups.rank, of.groups.size)
    return state.get(RESIDUAL) if values.dtype in FLOATS else None


def _own(residual: torch.Tensor, piece: Piece, rank: int) -> torch.Tensor:
    """The part of a parameter's residual that belongs to this rank's shard."""
    return residual[sum(piece.lengths[:rank]) :][: piece.lengths[rank]]


def _pay(owed: torch.Tensor, own: torch.Tensor) -> None:
    """Add the residual of the own shard, left by another number of ranks, to the own values, which
    are sent exactly; then clear it."""
    own += owed.to(own.dtype)
    owed.zero_()
