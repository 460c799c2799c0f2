"""The state of all ranks in one: gathered over the handle's process groups, and told apart.

A group's ranks send each other their states as messages of the group's transport, which names a
rank that dies or hangs. The watchdog takes this for a call, as any collective.
"""

from __future__ import annotations

import io
import math
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradwire.control import digest
from gradwire.engine import Communicator, Issue, Ticket, agree_over, failing_together
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.integrations.references import weights_on_cpu
from gradwire.integrations.state import check_form
from gradwire.planner.links import awaited, broken

State = Mapping[str, Any]

_ISSUED = digest(0, "full_state_dict", [])


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
            TransportError: a rank did not make the call, or failed.
        """
        self._living()
        comms = [comm for _, comm in self._groups]
        agree_over(comms, "full_state_dict", [f"rank0_only={bool(rank0_only)}"])
        states = [on_cpu(state)]
        with failing_together(comms):
            for comm in comms:
                # Where rank 0 alone gets them, all ranks of a later group have some, or none has.
                if states and comm.world_size > 1:
                    states = _gathered(states, comm, rank0_only)
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


def _gathered(states: list[State], comm: Communicator, rank0_only: bool) -> list[State]:
    """What all ranks of a group hold; with `rank0_only` nothing on the others."""
    file = io.BytesIO()
    torch.save(states, file)
    mine = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    try:
        told = comm.tell_all("the sizes of states", b"%d" % mine.numel())
        ticket = comm.calls.ticket()
        try:
            ticket.next_round(Issue(_ISSUED, "full_state_dict"))
            ticket.is_prepared = True
            receivers = range(1 if rank0_only else comm.world_size)
            exchange = partial(_exchange, comm, ticket, mine, list(map(int, told)), receivers)
            with comm.calls.awaited():
                parts = awaited(comm, comm.workers.submit(exchange))
        finally:
            ticket.close()
    except Exception as error:
        raise broken(comm, error) from error
    files = (io.BytesIO(part.numpy().data) for part in parts)
    return [state for file in files for state in torch.load(file, weights_only=True)]


def _exchange(
    comm: Communicator,
    ticket: Ticket,
    mine: torch.Tensor,
    sizes: Sequence[int],
    receivers: Sequence[int],
) -> list[torch.Tensor]:
    """Send this rank's bytes to the receivers; those of all ranks, if this is one of them."""
    transport, tag = comm.transport, ticket.tag(_ISSUED, 0)
    parts, pending = [], []
    for peer, size in enumerate(sizes if comm.rank in receivers else ()):
        parts.append(mine if peer == comm.rank else torch.empty(size, dtype=torch.uint8))
        if peer != comm.rank:
            pending.append(transport.irecv(parts[peer], peer, tag))
    pending += [transport.isend(mine, peer, tag) for peer in receivers if peer != comm.rank]
    for message in pending:
        message.wait()
    return parts


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
