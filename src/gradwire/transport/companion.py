"""A gloo group beside a process group that carries no CPU tensors, such as "nccl" alone.

Ranks compare plans and report failures over it; it carries no gradients.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from gradwire.errors import TransportError
from gradwire.transport.torch_p2p import timeout_of

CPU = torch.device("cpu")


def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `group` has a backend for tensors on `device`."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def companion(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, through the store of `group`; all ranks call together.

    It has the timeout of `group`, and ends with its last reference.

    Raises:
        TransportError: torch has no gloo, or a peer did not answer.
    """
    if not dist.is_gloo_available():
        raise TransportError(
            "this torch has no gloo, which gradwire needs to compare plans and report failures; "
            "install a torch that has it"
        )
    rank, size = group.rank(), group.size()
    store: Any = group.get_group_store()
    # An earlier companion's entries may still be in the store: each has its own prefix.
    attempt = store.add(f"gradwire/companions of {rank}", 1)
    # On its own connection: the store may live in `group`, and has to end with it.
    with suppress(AttributeError, NotImplementedError, RuntimeError):
        store = store.clone()
    store = dist.PrefixStore(f"gradwire/companion/{attempt}/", store)
    try:
        timeout = timedelta(seconds=timeout_of(group))
        backend = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    except RuntimeError as error:
        text = f"rank {rank}: gloo could not connect to the other ranks of the group: {error}"
        raise TransportError(text) from None
    beside = dist.ProcessGroup(store, rank, size)
    beside._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    beside._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    return beside
