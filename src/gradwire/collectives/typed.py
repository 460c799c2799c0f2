"""Typed collectives, each on one tensor: aggregators yield them, and user functions call them.

    AllReduce(values, op="avg")        every rank ends with the reduced values, in place
    ReduceScatter(values, op="avg")    rank n ends with the n-th shard of them, in place
    AllGather(values)                  every rank ends with all ranks' values, in rank order
    Broadcast(values, root=0)          every rank ends with the root's values, in place

Values travel uncompressed, or through a codec. `gradwire.collectives.legal` has the legal
combinations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar

import torch

from gradwire.collectives.job import Item
from gradwire.collectives.legal import uncompressed
from gradwire.collectives.operation import OPS, Operation
from gradwire.collectives.options import Options
from gradwire.errors import ConfigError
from gradwire.lang import Codec, rng
from gradwire.lang.call import check_memory
from gradwire.lang.codec import check_codec
from gradwire.partition import Spec

_operation = lru_cache(maxsize=256)(Operation)
_uncompressed = lru_cache(maxsize=256)(uncompressed)


@dataclass(eq=False)
class Request:
    """The base class of the four.

    Attributes:
        values: 1-D, contiguous.
        codec: compresses them; None: they travel uncompressed.
        of: the parameter that they belong to (a Context): errors name it, and random numbers derive
            from it. None: the first of the scope, which depends on bucketing.
        algorithm, segments: as in Options; None: the handle's.
        positions: how many positions `values` packs, for counting bits as papers do, 32 for each; 0
            if it has none.
    """

    verb: ClassVar[str]

    values: torch.Tensor
    codec: Codec | None = field(default=None, kw_only=True)
    of: Any = field(default=None, kw_only=True)
    algorithm: str | None = field(default=None, kw_only=True)
    segments: int | None = field(default=None, kw_only=True)
    positions: int = field(default=0, kw_only=True)

    # Fields that only some subclasses have.
    op: ClassVar[str] = ""
    root: ClassVar[int] = 0
    lengths: ClassVar[tuple[int, ...]] = ()
    stride: ClassVar[int] = 0
    residual: ClassVar[torch.Tensor | None] = None
    home: ClassVar[torch.Tensor | None] = None

    def check(self) -> None:
        """Raise ConfigError if a field has the wrong type."""
        if self.codec is not None:
            check_codec(self.codec, otherwise="None")
        if type(self.op) is not str:
            raise ConfigError(f"op={self.op!r:.60}: give one of {', '.join(map(repr, OPS))}")
        if type(self.root) is not int:
            raise ConfigError(f"root={self.root!r:.60}: give a rank")
        if type(self.stride) is not int:
            raise ConfigError(f"stride={self.stride!r:.60}: give a number of values")
        lengths = self.lengths
        if type(lengths) is not tuple or not all(type(length) is int for length in lengths):
            raise ConfigError(
                f"lengths={lengths!r:.60}: give a tuple of each rank's number of values"
            )

    @property
    def shape(self) -> tuple[Any, ...]:
        """All that decides how it runs: of a scope's request equal in every step."""
        values = self.values
        return (
            self.verb, self.op, self.root, self.algorithm, self.segments, self.codec,
            values.numel(), values.dtype, self.lengths, self.stride, self.residual is None,
        )  # fmt: skip

    def on_zeros(self) -> Request:
        """Of a reduction, the same one of zeros, in memory of their own."""
        given = {"values": self.values, "residual": self.residual, "home": self.home}
        zeros: dict[str, Any] = {
            name: torch.zeros_like(t) for name, t in given.items() if t is not None
        }
        return replace(self, **zeros)

    @property
    def operation(self) -> Operation:
        return _operation(self.verb, self.op, self.root)

    def options(self, given: Options) -> Options:
        """Its own options, else the handle's. Collectives other than all_reduce use sra by default;
        in two levels, they use the handle's machines."""
        operation, algorithm = self.operation, self.algorithm
        if self.segments is not None:
            given = replace(given, segments=self.segments)
        if operation.verb == "all_reduce" and algorithm in (None, given.algorithm):
            return given
        if operation.op and algorithm == given.algorithm:
            return replace(given, between=Options().between)
        options = given.through(algorithm or "sra")
        if algorithm == given.algorithm == "hierarchical" and operation.shards:
            options = replace(options, nodes=given.nodes)
        return options

    def spec(self, name: str, rotation: int, world_size: int) -> Spec:
        """The tensor's spec, the same on all ranks."""
        values, feedback = self.values, self.residual is not None
        wire = self.codec or _uncompressed(self.operation, values.dtype)
        numel = self._numel(name, world_size)
        shards = self.lengths, self.stride
        return Spec(name, numel, values.dtype, wire, feedback, rotation, *shards)

    def _numel(self, name: str, world_size: int) -> int:
        return self.values.numel()

    def item(self, spec: Spec, keys: rng.Keys, step: int, rank: int, world_size: int) -> Item:
        """The tensor's memory and keys on this rank."""
        return Item(self.values, keys, step, self.residual, self.home)

    @property
    def target(self) -> torch.Tensor:
        """Of a reduction, where its result will be."""
        return self.values if self.home is None else self.home

    def contribution(self) -> torch.Tensor:
        """Of a reduction, this rank's values, of all ranks' shards one after the other."""
        return torch.cat(self.shards) if self.lengths else self.values

    @property
    def shards(self) -> list[torch.Tensor]:
        """Of a reduction with `lengths`, what each rank gets of the values."""
        starts = [rank * self.stride for rank in range(len(self.lengths))]
        if not self.stride:
            starts = [*accumulate(self.lengths, initial=0)]
        return [self.values[at : at + n] for at, n in zip(starts, self.lengths, strict=False)]

    def result(self, spec: Spec, item: Item, rank: int, world_size: int) -> torch.Tensor:
        """This rank's result."""
        return self.values


@dataclass(eq=False)
class AllReduce(Request):
    """Reduce `values` over the ranks, in place.

    Attributes:
        op: "avg", "sum", "min" or "max".
        residual: error feedback: fp32, as many as `values`, read and written by the kernels; None:
            no error is kept.
    """

    verb = "all_reduce"

    op: str = "avg"  # type: ignore[misc]
    residual: torch.Tensor | None = None  # type: ignore[misc]


@dataclass(eq=False)
class ReduceScatter(Request):
    """Reduce `values`, which have a shard for every rank; rank n ends with shard n, in place.

    With algorithm "hierarchical", sums of a machine's ranks replace some of the other shards.

    Attributes:
        op: as in AllReduce.
        lengths: values per rank's shard; (): equal lengths.
        stride: values from the beginning of a shard to that of the next; 0: shards are adjacent.
        residual: error feedback: fp32, as many values as all shards together. Its part for this
            rank's shard is neither used nor changed.
        home: this rank's shard, used instead of the one in `values`; the result replaces it, and
            its shard in `values` is neither used nor changed.
    """

    verb = "reduce_scatter"

    op: str = "avg"  # type: ignore[misc]
    lengths: tuple[int, ...] = ()  # type: ignore[misc]
    stride: int = 0  # type: ignore[misc]
    residual: torch.Tensor | None = None  # type: ignore[misc]
    home: torch.Tensor | None = None  # type: ignore[misc]

    def _numel(self, name: str, world_size: int) -> int:
        if self.lengths:
            return sum(self.lengths)
        if not self.stride:
            return self.values.numel()
        shard = self.values.numel() - (world_size - 1) * self.stride
        if not 0 <= shard <= self.stride:
            raise ConfigError(
                f"{name}: {self.values.numel()} values cannot be {world_size} equal shards with "
                f"stride {self.stride}"
            )
        return shard * world_size

    def result(self, spec: Spec, item: Item, rank: int, world_size: int) -> torch.Tensor:
        _, length, at = spec.shards(world_size)[rank]
        return self.values[at : at + length] if self.home is None else self.home


@dataclass(eq=False)
class AllGather(Request):
    """Gather every rank's `values` on every rank, in rank order; a rank's own values, too, are its
    decoded payload.

    Attributes:
        lengths: values per rank; (): all have as many as this rank.
        stride: values from the beginning of a rank's shard to that of the next; 0: shards are
            adjacent.
        into: memory for the result: 1-D, contiguous; None: new memory, with zeros between shards.
    """

    verb = "all_gather"

    lengths: tuple[int, ...] = ()  # type: ignore[misc]
    stride: int = 0  # type: ignore[misc]
    into: torch.Tensor | None = None

    def _numel(self, name: str, world_size: int) -> int:
        return sum(self.lengths) if self.lengths else world_size * self.values.numel()

    def item(self, spec: Spec, keys: rng.Keys, step: int, rank: int, world_size: int) -> Item:
        own = self.values
        _, length, at = spec.shards(world_size)[rank]
        if length != own.numel():
            raise ConfigError(
                f"{spec.name}: rank {rank} has {own.numel()} values; lengths[{rank}] is {length}"
            )
        all_values, extent = self.into, spec.extent(world_size)
        if all_values is None:  # memory between shards must be equal on all ranks, too
            all_values = own.new_zeros(extent) if self.stride else own.new_empty(extent)
        check_memory(spec.name, "into", all_values, extent, spec.dtype, own.device)
        if all_values.dim() != 1:
            raise ConfigError(f"{spec.name}: `into` has {all_values.dim()} dimensions, not 1")
        shard = all_values[at : at + length]
        if shard.data_ptr() != own.data_ptr():
            shard.copy_(own)
        return Item(all_values, keys, step)

    def result(self, spec: Spec, item: Item, rank: int, world_size: int) -> torch.Tensor:
        return item.values


@dataclass(eq=False)
class Broadcast(Request):
    """Every rank ends with the values of rank `root`, in place; all ranks, the root too, end with
    the decoded payload."""

    verb = "broadcast"

    root: int = 0  # type: ignore[misc]
