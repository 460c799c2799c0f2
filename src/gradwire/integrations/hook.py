"""The DDP communication hook, and the socket through which gradwire is plugged into it.

DDP takes a hook once and for all, so what is registered is a socket: with a plug in it, gradients
go through gradwire; after `detach` it averages them plainly, until another one is plugged in. DDP
reads the hook's annotations as objects, so this file does not postpone their evaluation.
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError


class Socket:
    """What one DDP module's hook holds.

    Attributes:
        plug: gets each bucket; None after detach.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.plug: Plug | None = None


class Plug:
    """What a socket takes: `reduce` starts a bucket's average and returns its future."""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError("a plug reduces")


def hook(state: Socket, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, through whatever is plugged in."""
    if state.plug is not None:
        return state.plug.reduce(bucket)
    averaged = average(bucket.buffer(), state.group)
    future: torch.futures.Future[torch.Tensor] = averaged.then(lambda f: f.value()[0])
    return future


def average(
    values: torch.Tensor, group: dist.ProcessGroup
) -> torch.futures.Future[list[torch.Tensor]]:
    """Average `values`, in place, through torch's own all-reduce; the future gives [values]."""
    values.div_(group.size())
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future


# Beside the modules, not in them: a copy of a module has a reducer of its own, without a hook, so
# it must not inherit the socket; and a saved module holds nothing of gradwire's.
_sockets: WeakKeyDictionary[DistributedDataParallel, Socket] = WeakKeyDictionary()


def socket_of(model: DistributedDataParallel) -> Socket:
    """The socket of `model`, registered on first use.

    Raises:
        ConfigError: `model` is no DDP module, has another communication hook, or is one whose
            gradients torch.compile synchronises.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"attach takes a DistributedDataParallel module, not {type(model).__name__}: "
            "wrap it first, attach(DistributedDataParallel(model))"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            "this DDP module was made under torch._dynamo.config.optimize_ddp='python_reducer', "
            "which has no buckets: set it to another value before wrapping the module"
        )
    socket = _sockets.get(model)
    if socket is None:
        socket = Socket(model.process_group)
        try:
            model.register_comm_hook(socket, hook)
        except RuntimeError as error:
            raise ConfigError(
                f"this DDP module has a communication hook already ({error}); attach before, or "
                "instead of, register_comm_hook and DDP(mixed_precision=...)"
            ) from error
        finally:
            # DDP notes the hook and its state in the module, for its Python reducer alone. There
            # they would be copied and saved with it, process group, locks and all.
            model._comm_hooks[:] = [e for e in model._comm_hooks if e[1] is not socket]
        _sockets[model] = socket
    return socket
