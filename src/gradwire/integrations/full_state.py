"""The state of all ranks in one: gathered over the handle's process groups, and told apart."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.integrations.references import weights_on_cpu
from gradwire.integrations.state import check_form

State = Mapping[str, Any]


class StateGather:
    """Over which process groups the states of all ranks come together.

    Args:
        groups: each gathers what those before it gave; rank 0 of all of them is the handle's rank
            0. They are not kept alive.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = [(weakref.ref(group), communicator(group)) for group in groups]

    def __call__(self, state: State, rank0_only: bool) -> list[State]:
        """All ranks' states, by rank; nothing where only rank 0 gets them.

        Raises:
            ConfigError: a process group was destroyed, or ranks differ in `rank0_only`.
            TransportError: a rank did not make the call.
        """
        groups = self._living()
        self._agree(bool(rank0_only))
        states = [on_cpu(state)]
        for group in groups:
            # Where rank 0 alone gets them, all ranks of a later group have some, or all have none.
            if states and group.size() > 1:
                states = _gathered(states, group, rank0_only)
        return sorted(states, key=lambda one: int(one["rank"]))

    def part(self) -> int | None:
        """Which part of the job these ranks are, if there are others: those of another column of a
        mesh (tensor parallelism) have a handle, a rank 0, and so on of their own. It is the global
        rank of rank 0, in a mesh that numbers its ranks in order; None: these are all ranks."""
        groups = self._living()
        size = math.prod(group.size() for group in groups)
        if not groups or size == dist.get_world_size():
            return None
        here = dist.get_rank()
        return here + sum(dist.get_process_group_ranks(group)[0] - here for group in groups)

    def _living(self) -> list[dist.ProcessGroup]:
        groups = [held() for held, comm in self._groups if comm.alive()]
        living = [group for group in groups if group is not None]
        if len(living) < len(self._groups):
            raise ConfigError(
                "the process group of this handle was destroyed: save and load states before "
                "destroy_process_group"
            )
        return living

    def _agree(self, rank0_only: bool) -> None:
        """Verify that all ranks make this call with this argument. A rank that finds a difference
        in one group still takes part in the agreements of later ones: their ranks wait for it."""
        line, error = f"rank0_only={rank0_only}", None
        for _, comm in self._groups:
            try:
                comm.agree("full_state_dict", [line])
            except ConfigError as found:
                line, error = "rank0_only=(differs between ranks)", error or found
        if error is not None:
            raise error


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
        **({"weights": weights_on_cpu(state["weights"])} if "weights" in state else {}),
    }


def full(states: Sequence[State]) -> dict[str, Any]:
    """What `full_state_dict` gives: {} where there are none."""
    if not states:
        return {}
    return {"version": 1, "world_size": len(states), "ranks": list(states)}


def states_of(given: object) -> list[State]:
    """The states in what `load_state_dict` was given: one or more, each of the form of a handle's.

    Raises:
        ConfigError: it is something else.
    """
    states = _listed(given)
    if not states:
        raise ConfigError("load_state_dict: the list of states is empty")
    for state in states:
        check_form(state)
    return states


def _listed(given: object) -> list[State]:
    if isinstance(given, Mapping) and not given:
        raise ConfigError(
            "load_state_dict: the state is empty, as full_state_dict(rank0_only=True) gives it on "
            "all ranks but 0: have rank 0 save it, and load the file on every rank"
        )
    if isinstance(given, Mapping) and "ranks" in given:
        ranks = given["ranks"]
        version, ranks_told = given.get("version"), given.get("world_size")
        if (
            (type(version), version) != (int, 1)
            or type(ranks_told) is not int
            or not isinstance(ranks, Sequence)
            or isinstance(ranks, (str, bytes))
        ):
            raise ConfigError(
                "load_state_dict: not the full_state_dict of a gradwire handle (version 1)"
            )
        if len(ranks) != ranks_told:
            raise ConfigError(
                f"load_state_dict: this full_state_dict has the states of {len(ranks)} ranks, not "
                f"of {ranks_told}: load it as it was saved"
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
