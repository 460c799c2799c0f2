"""The communicator of each process group, made on first use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from gradwire.engine import Communicator, GroupInfo
from gradwire.errors import ConfigError, TransportError
from gradwire.transport import Mixed, TorchP2P
from gradwire.transport.companion import carries, companion
from gradwire.transport.queued_p2p import QueuedP2P
from gradwire.transport.torch_p2p import end_waits, timeout_of

_lock = threading.Lock()
# Weak keys, so that no group is kept alive: see gradwire.transport.torch_p2p.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = (
    weakref.WeakKeyDictionary()
)


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator of `group` (None: the default group); returns without waiting for peers.

    Raises:
        ConfigError: torch.distributed is not initialised and no group is given, this rank is not in
            the group, or its ranks may change.
    """
    if group is None and not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group first"
        )
    actual = group if group is not None else dist.group.WORLD
    if not isinstance(actual, dist.ProcessGroup):
        raise ConfigError(
            f"group is {actual!r}: give a process group that this rank is a member of, or None"
        )
    check_fixed(actual)
    with _lock:
        known = _communicators.get(actual)
        if known is None:
            known = _communicators[actual] = _make(actual)
    return known


def check_fixed(group: dist.ProcessGroup) -> None:
    """Raise ConfigError for a group of torchft, which is given other ranks while training runs."""
    if any(kind.__module__.partition(".")[0] == "torchft" for kind in type(group).__mro__):
        raise ConfigError(
            f"{type(group).__name__} is a process group of torchft, whose ranks come and go, and "
            "gradwire needs a fixed number: inside a replica group wrap the module over torch's "
            "own group; between replica groups compress as docs/how-to/torchft.md shows"
        )


def _make(group: dist.ProcessGroup) -> Communicator:
    if group.size() > 1 and group.get_group_store() is None:
        raise ConfigError(
            f"{type(group).__name__} of {group.size()} ranks has no store, over which they meet: "
            "make the group with torch.distributed.init_process_group or new_group"
        )
    gone = threading.Event()
    held = weakref.ref(group, lambda _: gone.set())

    def transport() -> Mixed | TorchP2P:
        return host_transport(_still(held))

    of = group.rank(), group.size(), timeout_of(group), group.get_group_store()
    info = GroupInfo(*of, _ranks_of(group))
    comm = Communicator(transport, info=info)
    comm.links = lambda device: link(_still(held), comm, device)
    comm.stop_opening = lambda: _end_waits(held)
    # A group that torch does not list ends with its last reference. `alive` runs on the control
    # thread and must not hold one even briefly: the group, and on rank 0 its store, would then end
    # on that thread after destroy_process_group has returned, while the next default group may
    # already use the store's port.
    number, listed = id(group), group in _listed()
    comm.alive = lambda: not gone.is_set() and (not listed or number in map(id, _listed()))
    return comm


def _ranks_of(group: dist.ProcessGroup) -> Sequence[int]:
    """The members' ranks in the whole job; of a group that torch does not list, those in it."""
    listed = dist.distributed_c10d._world.pg_group_ranks.get(group)
    return range(group.size()) if listed is None else sorted(listed, key=listed.__getitem__)


def _still(held: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    group = held()
    if group is None:
        raise TransportError("this process group was destroyed before all ranks had used it")
    return group


def _end_waits(held: weakref.ref[dist.ProcessGroup]) -> None:
    group = held()
    if group is not None and carries(group, torch.device("cpu")):
        end_waits(group)


def _listed() -> Collection[dist.ProcessGroup]:
    """The process groups that torch lists; destroyed groups are removed."""
    return dist.distributed_c10d._world.pg_map


def host_transport(group: dist.ProcessGroup) -> Mixed | TorchP2P:
    """The transport between the host memories of `group`'s ranks; all ranks must call together."""
    if carries(group, torch.device("cpu")):
        return Mixed(group)
    beside = companion(group)
    transport = TorchP2P(beside)
    transport.companion = beside
    return transport


def link(group: dist.ProcessGroup, comm: Communicator, device: torch.device) -> QueuedP2P | None:
    """The link that carries messages between tensors on `device` in stream order, or None."""
    if not keeps_order(group, device):
        return None
    host = comm.transport
    assert isinstance(host, (Mixed, TorchP2P))
    return QueuedP2P(group, device, host)


def keeps_order(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL carries messages between tensors on `device`."""
    return (
        device.type == "cuda"
        and carries(group, device)
        and str(group._get_backend(device).name()).startswith("nccl")
    )


def release(group: dist.ProcessGroup) -> None:
    """Close the communicator of `group`, if any: the group is destroyed, or about to be."""
    with _lock:
        comm = _communicators.pop(group, None)
    if comm is not None:
        comm.close()
