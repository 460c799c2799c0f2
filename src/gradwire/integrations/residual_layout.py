"""The order of a residual's values in memory and in a saved state, and which states can be loaded.

FSDP2 scatters a parameter shard by shard. Of a parameter that is sharded in another dimension than
the first, that is not the order of its own values. A saved residual has the parameter's order, so
it does not depend on how the module is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.aggregators import OWED, Attached
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.errors import ConfigError


@dataclass(frozen=True)
class ResidualLayout:
    """How the module of a handle is sharded.

    Attributes:
        shards: number of shards; None: DDP, which shards nothing.
        dims: per parameter, the dimension in which it is sharded; those of the first are left out.
    """

    shards: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """What a saved state tells of it."""
        return {} if self.shards is None else {"shards": self.shards, "dims": dict(self.dims)}

    def saved(self, member: Attached, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of the state, in the parameter's order."""
        dim = self._dim(member, key)
        if dim == 0 or self.shards is None:
            return tensor.clone()
        part = list(member.shape)
        part[dim] //= self.shards
        return torch.cat(tensor.view(self.shards, *part).unbind(), dim).view(tensor.shape)

    def loaded(self, member: Attached, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a saved tensor, in the order in which the parameter is reduced."""
        tensor = tensor.detach()
        dim = self._dim(member, key)
        if dim == 0 or self.shards is None:
            return tensor.clone()
        return torch.cat(tensor.view(member.shape).chunk(self.shards, dim)).view(tensor.shape)

    def _dim(self, member: Attached, key: str) -> int:
        return self.dims.get(member.name, 0) if key in (RESIDUAL, OWED) else 0

    def check(self, state: Mapping[str, Any], world_size: int) -> None:
        """Check that residuals of a state can be loaded by `world_size` ranks in this layout.

        With replicas, the own shard's values in a residual have the weight of all shards. So they
        are of use only where the same shard is on the same rank.

        Raises:
            ConfigError: they cannot, or the state does not tell its layout.
        """
        size, shards, dims = state["world_size"], state.get("shards"), state.get("dims", {})
        if "shards" in state and not (
            type(shards) is int
            and 0 < shards <= size
            and size % shards == 0
            and isinstance(state.get("dims"), Mapping)
        ):
            raise ConfigError(
                f"load_state_dict: the state has {shards!r:.60} for 'shards' and "
                f"{state.get('dims')!r:.60} for 'dims': it is not a result of Handle.state_dict"
            )
        here, there = (world_size, self.shards), (size, shards)
        if not any(map(_has_replicas, (here, there))) or not state["aggregators"]:
            return
        if here != there or dict(dims) != dict(self.dims):
            sharded = "" if here != there else ", sharded in other dimensions"
            raise ConfigError(
                f"load_state_dict: this state is of {size} ranks {_in_shards(shards)}; this group "
                f"has {world_size} {_in_shards(self.shards)}{sharded}: residuals of replicas "
                "(HSDP) cannot be moved; load it with an empty 'aggregators' to start from zero "
                "residuals"
            )


UNSHARDED = ResidualLayout()


def _has_replicas(of: tuple[int, int | None]) -> bool:
    world_size, shards = of
    return shards not in (None, world_size)


def _in_shards(shards: int | None) -> str:
    return "under DDP" if shards is None else f"in {shards} shards"
