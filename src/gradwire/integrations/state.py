"""Loading a handle's state, also into another number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire.errors import ConfigError


def merge_states(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int, names: Sequence[str]
) -> dict[str, Any]:
    """The state that `rank` of `world_size` starts from.

    Args:
        states: one rank's state, or those of all ranks of the job that was saved.
        names: the parameters of the attached plan.

    Raises:
        ConfigError: no state, another format, missing ranks, or other parameters.
    """
    if not states or any(state.get("version") != 1 for state in states):
        raise ConfigError("load_state_dict: not the state_dict of a gradwire handle (version 1)")
    first = states[0]
    if list(first["steps"]) != list(names):
        odd = next(iter(set(first["steps"]) ^ set(names)), "the order of parameters")
        raise ConfigError(
            f"load_state_dict: the state is of another model or plan; it differs in {odd}"
        )
    old = first["world_size"]
    mine = [s for s in states if s["rank"] == rank]
    if old == world_size and mine:
        return dict(mine[0])
    if len(states) == 1:
        if first["aggregators"]:
            warnings.warn(
                f"load_state_dict: this state is rank {first['rank']}'s of {old} ranks, now there "
                f"are {world_size} and this is rank {rank}: residuals start at zero. Give the "
                "list of all ranks' states to keep them",
                stacklevel=3,
            )
        return {**first, "aggregators": {}}
    if sorted(s["rank"] for s in states) != list(range(old)):
        raise ConfigError(f"load_state_dict: give the states of all {old} old ranks, once each")
    return {**first, "aggregators": _share_out(states, rank, world_size)}


def _share_out(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int
) -> dict[str, dict[str, torch.Tensor]]:
    """New rank r takes the residuals of old ranks r, r + world_size, ...

    A residual counts in the average with weight 1 / number of ranks, so they are scaled by new /
    old: then the average of what is still to be sent stays what it was.
    """
    old = len(states)
    shared: dict[str, dict[str, torch.Tensor]] = {}
    for state in states:
        if state["rank"] % world_size != rank:
            continue
        for name, tensors in state["aggregators"].items():
            target = shared.setdefault(name, {})
            for key, value in tensors.items():
                scaled = value * (world_size / old)
                target[key] = target[key] + scaled if key in target else scaled
    return shared
