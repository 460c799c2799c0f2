"""Which communicator serves which process group: one for each, made on first use."""

from __future__ import annotations

import atexit
import threading

import torch.distributed as dist

from gradwire.engine import Communicator
from gradwire.errors import ConfigError
from gradwire.transport import Mixed

_lock = threading.Lock()
_communicators: dict[dist.ProcessGroup, Communicator] = {}


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
        for gone in [g for g in _communicators if g not in dist.distributed_c10d._world.pg_map]:
            _communicators.pop(gone).close()  # its process group was destroyed
        if actual not in _communicators:
            _communicators[actual] = Communicator(Mixed(actual))
        return _communicators[actual]


def release(group: dist.ProcessGroup) -> None:
    """Close the communicator of `group`, if it has one: the group is about to go."""
    with _lock:
        comm = _communicators.pop(group, None)
    if comm is not None:
        comm.close()


@atexit.register
def _close_all() -> None:
    """Let process groups go while the interpreter still runs: gloo's threads abort after it."""
    with _lock:
        while _communicators:
            _communicators.popitem()[1].close()
