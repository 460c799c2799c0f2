"""Where the weights of a replica are: on this rank, whole or the rows that it answers for.

Ranks of a replica share the work, so that all of their links are used: under FSDP2 each has its
shard; of a DDP module each takes as many rows of every weight, and gives them to the others when
they have changed. Each rank meets the ranks of the other replicas that have the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError, TransportError
from gradwire.handles.wrapped import original, plain_names


@dataclass(frozen=True)
class Home:
    """A weight of the model, and which of its rows this rank answers for.

    Attributes:
        name: without what DDP, torch.compile and checkpointing add.
        parameter: of the model; under FSDP2 sharded.
        part, parts: which of equal parts of the rows, and how many there are.
    """

    name: str
    parameter: torch.Tensor
    part: int = 0
    parts: int = 1

    def rows(self, part: int | None = None) -> torch.Tensor:
        """These rows, in the model's memory; or those of another rank of the replica."""
        values = self.parameter.detach()
        values = values.to_local() if isinstance(values, DTensor) else values
        values = values.reshape(1) if not values.dim() else values
        at = self.part if part is None else part
        found = values.chunk(self.parts)
        return found[at] if at < len(found) else values[:0]


@dataclass(frozen=True)
class Replica:
    """What this rank has of its replica.

    Attributes:
        every: the weights that are trained, in the module's order.
        inside: the process group of the replica's ranks; None: it has one rank.
        shares: whether every rank of the replica has whole weights.
        sharded: the modules that FSDP2 gathers.
        frozen: weights that are not trained, by name.
    """

    every: Sequence[Home]
    inside: dist.ProcessGroup | None
    shares: bool
    sharded: Sequence[FSDPModule] = ()
    frozen: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def homes(self) -> list[Home]:
        """Those of which this rank has a row."""
        return [home for home in self.every if home.rows().numel()]

    def spread(self, homes: Iterable[Home]) -> None:
        """Give the ranks of this replica the rows that this one has changed, and get theirs."""
        if not self.shares or self.inside is None:
            return
        homes = list(homes)
        for part in range(self.inside.size()):
            rows = [home.rows(part) for home in homes]
            for dtype in dict.fromkeys(r.dtype for r in rows):
                alike = [r for r in rows if r.dtype == dtype]
                flat = torch.cat([r.reshape(-1) for r in alike])
                try:
                    dist.broadcast(flat, group=self.inside, group_src=part)
                except RuntimeError as error:
                    peers = dist.get_process_group_ranks(self.inside)
                    raise TransportError(
                        f"outer: a rank of this replica, ranks {peers}, died or hangs as rows were "
                        f"shared out ({str(error).splitlines()[0]}): start the replica anew"
                    ) from error
                for r, values in zip(alike, flat.split([r.numel() for r in alike]), strict=True):
                    r.copy_(values.view(r.shape))


def replica_of(model: torch.nn.Module, between: dist.ProcessGroup | None) -> Replica:
    """What this rank has of the replica that `model` is.

    Args:
        between: the process group of replicas; None: the default group, of a plain module.

    Raises:
        ConfigError: a wrapped module without `between`, a model without trained weights, or groups
            that do not cross.
    """
    inside, shares, sharded = None, False, []
    wrapped = original(model)
    if isinstance(wrapped, DistributedDataParallel):
        inside, shares, wrapped = wrapped.process_group, True, wrapped.module
    elif sharded := shard(wrapped.modules()):
        inside = _sharding_group(wrapped)
    check_crossing(inside, between)
    own, size = (inside.rank(), inside.size()) if inside is not None and shares else (0, 1)
    named = list(plain_names(wrapped.named_parameters()))
    homes = [Home(name, p, own, size) for name, p in named if p.requires_grad]
    if not homes:
        raise ConfigError("outer: the model has no parameter that requires a gradient")
    ranks = 1 if inside is None else inside.size()
    if all(_filled(home.parameter, ranks) < ranks for home in homes):
        raise ConfigError(
            f"outer: no weight has rows for all {ranks} ranks of a replica, and one without has "
            "nothing to average: use fewer ranks in a replica"
        )
    frozen = {name: p for name, p in named if not p.requires_grad}
    return Replica(homes, inside, shares, sharded, frozen)


def shard(modules: Iterable[object]) -> list[FSDPModule]:
    """Those that FSDP2 gathers. Frees whole weights, which a forward without backward leaves in the
    place of shards, and which do not follow them."""
    found = [module for module in modules if isinstance(module, FSDPModule)]
    for module in found:
        module.reshard()
    return found


def _filled(parameter: torch.Tensor, parts: int) -> int:
    """How many of equal parts of its rows have any."""
    dim = parameter.placements[0].dim if isinstance(parameter, DTensor) else 0  # type: ignore[attr-defined]
    rows = parameter.shape[dim] if parameter.dim() else 1
    return -(-rows // -(-rows // parts)) if rows else 0


def _sharding_group(model: torch.nn.Module) -> dist.ProcessGroup:
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if len(meshes) != 1 or next(iter(meshes)).ndim != 1:
        found = ", ".join(map(str, meshes)) or "none"
        raise ConfigError(
            "outer: the FSDP2 module must be sharded over one mesh of one dimension, found "
            f"{found}: shard each replica by itself, fully_shard(model, mesh=mesh['shards']), and "
            "give group=mesh['replicas'], so that nothing crosses between replicas in backward"
        )
    return next(iter(meshes)).get_group()


def check_crossing(inside: dist.ProcessGroup | None, between: dist.ProcessGroup | None) -> None:
    """Raise ConfigError unless a rank is all that its replica and the group between share."""
    if inside is None:
        return
    mesh = (
        'mesh = init_device_mesh("cpu", (R, N), mesh_dim_names=("replicas", "ranks")), wrap the '
        'model over mesh["ranks"], and give group=mesh["replicas"]'
    )
    if between is None:
        raise ConfigError(f"outer: group: say which ranks are in other replicas: {mesh}")
    ranks = {*dist.get_process_group_ranks(inside)}
    shared = ranks & {*dist.get_process_group_ranks(between)}
    if shared != {dist.get_rank()}:
        raise ConfigError(
            f"outer: group: ranks {sorted(shared)} are in one replica, whose module averages their "
            f"gradients in every backward: {mesh}"
        )


# ---- fragments

_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of each numbered layer, such as "blocks.0."; "" has those outside of layers."""
    found: dict[str, list[str]] = {}
    for name in names:
        at = _NUMBER.search(name)
        found.setdefault(name[: at.end()] if at else "", []).append(name)
    return found


def fragments_of(names: Sequence[str], every: int, fragments: int | None) -> list[list[str]]:
    """The names of each fragment's weights.

    Layers are dealt out in turn, since neighbours learn alike; what is outside of layers, such as
    embeddings and head, is the last fragment (2501.18512). None for `fragments`: one of every third
    layer, and that; as many as divide `every`, at most.

    Raises:
        ConfigError: there are too few layers.
    """
    layers = layers_of(names)
    outside = layers.pop("", [])
    most = len(layers) + bool(outside)
    if fragments is None:
        wanted = max(1, -(-len(layers) // 3) + bool(outside))
        fragments = max(n for n in range(1, wanted + 1) if every % n == 0)
    if fragments == 1:
        return [list(names)]
    if fragments > most:
        raise ConfigError(
            f"outer: fragments={fragments}: the model has {len(layers)} numbered layers "
            f"(ModuleList or Sequential){' and weights outside of them' if outside else ''}: use "
            f"at most {max(most, 1)}"
        )
    turns = fragments - bool(outside)
    dealt: list[list[str]] = [[] for _ in range(turns)]
    for number, inside in enumerate(layers.values()):
        dealt[number % turns] += inside
    return [*dealt, outside] if outside else dealt


def deal(homes: Sequence[Home], fragments: Sequence[Sequence[str]]) -> Iterator[list[Home]]:
    """The homes of each fragment."""
    by_name = {home.name: home for home in homes}
    for names in fragments:
        yield [by_name[name] for name in names if name in by_name]
