"""The state of all ranks in one: gathered over the handle's process groups, and told apart."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import ConfigError

State = Mapping[str, Any]


class StateGather:
    """Over which process groups the states of all ranks come together.

    Args:
        groups: each gathers what those before it gave; rank 0 of all of them is the handle's rank
            0. They are not kept alive.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = [weakref.ref(group) for group in groups]

    def __call__(self, state: State, rank0_only: bool) -> list[State]:
        """All ranks' states, by rank; nothing where only rank 0 gets them.

        Raises:
            ConfigError: a process group was destroyed.
        """
        states = [on_cpu(state)]
        for held in self._groups:
            group = held()
            if group is None:
                raise ConfigError(
                    "full_state_dict: the process group of this handle was destroyed: call it "
                    "before destroy_process_group"
                )
            # Where rank 0 alone gets them, all ranks of a later group have some, or all have none.
            if states and group.size() > 1:
                states = _gathered(states, group, rank0_only)
        return sorted(states, key=lambda one: int(one["rank"]))


def _gathered(states: list[State], group: dist.ProcessGroup, rank0_only: bool) -> list[State]:
    first = group.rank() == 0
    parts: list[Any] = [None] * group.size()
    if rank0_only:
        dist.gather_object(states, parts if first else None, group=group, group_dst=0)
    else:
        dist.all_gather_object(parts, states, group=group)
    return [state for part in parts if part is not None for state in part]


def on_cpu(state: State) -> State:
    """The state with all tensors on the CPU: another rank may not have this one's device."""
    return {
        **state,
        "aggregators": {
            name: {key: tensor.cpu() for key, tensor in tensors.items()}
            for name, tensors in state["aggregators"].items()
        },
    }


def full(states: Sequence[State]) -> dict[str, Any]:
    """What `full_state_dict` gives: {} where there are none."""
    if not states:
        return {}
    return {"version": 1, "world_size": len(states), "ranks": list(states)}


def states_of(given: object) -> list[State]:
    """The states in what `load_state_dict` was given.

    Raises:
        ConfigError: none in it.
    """
    if isinstance(given, Mapping) and not given:
        raise ConfigError(
            "load_state_dict: the state is empty, as full_state_dict(rank0_only=True) gives it on "
            "all ranks but 0: have rank 0 save it, and load the file on every rank"
        )
    if isinstance(given, Mapping) and "ranks" in given:
        ranks = given["ranks"]
        if given.get("version") != 1 or not isinstance(ranks, Sequence):
            raise ConfigError(
                "load_state_dict: not the full_state_dict of a gradwire handle (version 1)"
            )
        if len(ranks) != given.get("world_size"):
            raise ConfigError(
                f"load_state_dict: this full_state_dict has the states of {len(ranks)} ranks, not "
                f"of {given.get('world_size')}: load it as it was saved"
            )
        return list(ranks)
    if isinstance(given, Mapping):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes, torch.Tensor)):
        raise ConfigError(
            f"load_state_dict takes what state_dict or full_state_dict gave, not "
            f"{type(given).__name__}"
        )
    return list(given)
