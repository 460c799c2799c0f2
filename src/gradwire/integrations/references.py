"""The gathered weights in a handle's state: with keep="reference", each rank saves its shards of
the reference, since all ranks hold the same.

    references   parameter -> this rank's shard, in its own shape
    current      parameters whose reference is of the last version that ranks agreed on
    changed      whether this rank's weights had changed since
    digest       of this rank's weights, since the loaded model may have others

Of a saved job with as many shards, sharded in the same way, a rank takes its own; otherwise the
shards of all ranks of one replica are put together, and sharded anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from gradwire.errors import ConfigError

if TYPE_CHECKING:
    from gradwire.integrations.changes import Changes
    from gradwire.integrations.differences import DifferenceGather

State = Mapping[str, Any]


@dataclass(frozen=True)
class Sharding:
    """How the module of a handle is sharded.

    Attributes:
        shapes: of whole parameters, by name.
        dims: the dimension in which one is sharded; those of the first are left out.
        shard, shards: this rank's, and how many there are.
        rank, world_size: of those that have a part in an average.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dims: Mapping[str, int]
    shard: int
    shards: int
    rank: int
    world_size: int

    def shape(self, name: str) -> tuple[int, ...]:
        """Of this rank's shard."""
        whole = torch.empty(self.shapes[name], dtype=torch.float32, device="meta")
        return _cut(whole, self, name).shape


@dataclass(frozen=True)
class References:
    """What a rank takes from a loaded state.

    Attributes:
        parts: its shards, by parameter.
        current, changed: as above.
        lost: the state has none for this rank.
        digest: see `Changes.loaded`.
    """

    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    current: frozenset[str] = frozenset()
    changed: bool = False
    lost: bool = True
    digest: str | None = None


def saved_references(
    gathers: Iterable[DifferenceGather], changes: Changes, here: Sharding
) -> dict[str, Any]:
    """What a rank saves of its gathered weights."""
    references: dict[str, torch.Tensor] = {}
    current: list[str] = []
    for gather in gathers:
        names = gather.names
        parts = gather.state()
        if parts is not None:
            shaped = (part.view(here.shape(n)) for n, part in zip(names, parts, strict=True))
            references.update(zip(names, shaped, strict=True))
        if gather.version >= changes.needed(gather.frozen):
            current += names
    kept = {"references": references, "current": current}
    return {**kept, "changed": changes.changed, "digest": changes.digest()}


def load_references(
    gathers: Iterable[DifferenceGather], changes: Changes, found: References
) -> None:
    """Use what `references_of` took from a state."""
    for gather in gathers:
        gather.forget()
        names = gather.names
        if all(name in found.parts for name in names):
            gather.load([found.parts[n] for n in names], found.current.issuperset(names))
    changes.loaded(found.changed, found.lost, found.digest)


def references_of(states: Sequence[State], here: Sharding) -> References:
    """What this rank takes from the states of one or all ranks of a saved job.

    Raises:
        ConfigError: a state has something else in their place.
    """
    saved = [state["weights"] for state in states if state.get("weights") is not None]
    if len(saved) < len(states) or not saved:
        return References()
    for state in states:
        _check(state, here)
    first = states[0]
    there = first.get("shards"), dict(first.get("dims", {}))
    same = there == (here.shards, dict(here.dims)) and first["world_size"] == here.world_size
    own = [state for state in states if same and state["rank"] == here.rank]
    parts: dict[str, torch.Tensor]
    if own:
        parts = dict(own[0]["weights"]["references"])
    else:
        by_rank = {state["rank"]: state["weights"]["references"] for state in states}
        ranks = range(there[0] or 0)
        if not all(rank in by_rank for rank in ranks):
            return References()
        parts = {
            name: _cut(_whole([by_rank[r][name] for r in ranks], there[1].get(name, 0)), here, name)
            for name in by_rank[0]
            if all(name in by_rank[r] for r in ranks)
        }
    current = frozenset.intersection(*(frozenset(one["current"]) for one in saved))
    digest = own[0]["weights"].get("digest") if own else None
    changed = any(one["changed"] for one in saved)
    return References(parts, current, changed, not parts, digest)


def weights_on_cpu(weights: State) -> State:
    """The same, with tensors on the CPU."""
    references = {name: part.cpu() for name, part in weights["references"].items()}
    return {**weights, "references": references}


def _check(state: State, here: Sharding) -> None:
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
    there = replace(here, dims=dims, shards=shards, shard=state["rank"] % shards)
    for name, part in saved["references"].items():
        dim, shape = dims.get(name, 0), here.shapes.get(name, ())
        known = type(dim) is int and 0 <= dim < len(shape) and part.shape == there.shape(name)
        if not known or part.is_meta or part.layout != torch.strided:
            raise ConfigError(
                f"load_state_dict: the gathered weights of {name}, a tensor of shape "
                f"{tuple(part.shape)}, are no shard of this module's parameter: load a state of "
                "the same model"
            )


def _whole(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat([part.detach().cpu() for part in parts], dim)


def _cut(whole: torch.Tensor, here: Sharding, name: str) -> torch.Tensor:
    """This rank's shard, cut as FSDP2 cuts: some of the last ranks may get none."""
    dim = here.dims.get(name, 0)
    most = math.ceil(whole.shape[dim] / here.shards)
    first = min(here.shard * most, whole.shape[dim])
    return whole.narrow(dim, first, min(most, whole.shape[dim] - first))
