"""Which communicator serves which process group: one for each, made on first use."""

from __future__ import annotations

import atexit
import threading
from functools import partial

import torch
import torch.distributed as dist

from gradwire.engine import Communicator
from gradwire.errors import ConfigError
from gradwire.transport import Mixed, TorchP2P
from gradwire.transport.companion import carries, companion
from gradwire.transport.queued_p2p import Host, QueuedP2P


class _Entry:
    """A group's communicator, made under a lock of its own: making one waits for the other ranks,
    who may make those of several groups in another order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.communicator: Communicator | None = None

    def close(self) -> None:
        # Not made yet, and perhaps never, if its maker waits for a rank that is gone.
        if self.lock.acquire(timeout=_MAKING_S):
            if self.communicator is not None:
                self.communicator.close()
            self.lock.release()


_MAKING_S = 1.0
_lock = threading.Lock()
_entries: dict[dist.ProcessGroup, _Entry] = {}


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator of `group` (None: the default group).

    Raises:
        ConfigError: torch.distributed is not initialised, or this rank is not in the group.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group first"
        )
    actual = group if group is not None else dist.group.WORLD
    if not isinstance(actual, dist.ProcessGroup):
        raise ConfigError(
            f"group is {actual!r}: give a process group that this rank is a member of, or None"
        )
    with _lock:
        gone = [_entries.pop(g) for g in list(_entries) if _is_gone(g)]
        entry = _entries.setdefault(actual, _Entry())
    for other in gone:
        other.close()
    with entry.lock:
        if entry.communicator is None:
            host = host_transport(actual)
            entry.communicator = Communicator(host, links=partial(link, actual, host))
        return entry.communicator


def host_transport(group: dist.ProcessGroup) -> Mixed | TorchP2P:
    """What carries messages between the hosts of `group`'s ranks, who all make theirs at once."""
    if carries(group, torch.device("cpu")):
        return Mixed(group)
    return TorchP2P(companion(group))


def link(group: dist.ProcessGroup, host: Host, device: torch.device) -> QueuedP2P | None:
    """What carries messages between tensors on `device` in stream order; None if nothing does."""
    return QueuedP2P(group, device, host) if keeps_order(group, device) else None


def keeps_order(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL carries what is on `device`."""
    return (
        device.type == "cuda"
        and carries(group, device)
        and str(group._get_backend(device).name()).startswith("nccl")
    )


def _is_gone(group: dist.ProcessGroup) -> bool:
    """Whether a process group was destroyed.

    Those of the backend gradwire say so themselves (`release`): torch does not know all of them.
    """
    if getattr(group, "tells_its_end", False):
        return False
    return group not in dist.distributed_c10d._world.pg_map


def release(group: dist.ProcessGroup) -> None:
    """Close the communicator of `group`, if it has one: the group is about to go."""
    with _lock:
        entry = _entries.pop(group, None)
    if entry is not None:
        entry.close()


@atexit.register
def _close_all() -> None:
    """Let process groups go while the interpreter still runs: gloo's threads abort after it."""
    with _lock:
        entries = list(_entries.values())
        _entries.clear()
    for entry in entries:
        entry.close()
