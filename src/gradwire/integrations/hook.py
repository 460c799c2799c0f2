"""The DDP communication hook, and the socket through which a handle is plugged into it.

DDP takes a hook once and for all, so what is registered is a socket: with a handle in it,
gradients go through gradwire; after `detach` it averages them plainly, until another handle is
plugged in. DDP reads the hook's annotations as objects, so this file does not postpone their
evaluation.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError


class Socket:
    """What one DDP module's hook holds.

    Attributes:
        handle: gets each bucket; None after detach.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.handle: Plug | None = None


class Plug:
    """What a socket takes: `reduce` starts a bucket's average and returns its future."""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError("a plug reduces")


def hook(state: Socket, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, through whatever is plugged in."""
    if state.handle is not None:
        return state.handle.reduce(bucket)
    values = bucket.buffer().div_(state.group.size())
    work = dist.all_reduce(values, group=state.group, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda f: f.value()[0])
    return future


_SOCKET = "_gradwire_socket"


def socket_of(model: DistributedDataParallel) -> Socket:
    """The socket of `model`, registered on first use.

    Raises:
        ConfigError: `model` is no DDP module, or has another communication hook.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"attach takes a DistributedDataParallel module, not {type(model).__name__}: "
            "wrap it first, attach(DistributedDataParallel(model))"
        )
    socket: Socket | None = getattr(model, _SOCKET, None)
    if socket is None:
        socket = Socket(model.process_group)
        try:
            model.register_comm_hook(socket, hook)
        except RuntimeError as error:
            raise ConfigError(
                f"this DDP module has a communication hook already ({error}); attach before, or "
                "instead of, register_comm_hook and DDP(mixed_precision=...)"
            ) from error
        setattr(model, _SOCKET, socket)
    return socket
