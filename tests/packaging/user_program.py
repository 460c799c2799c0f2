"""A user's program. It is not run: `make types` checks it against the source, where an ignored
error that does not occur is one; test_wheel.py against the wheel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw


def replicated(model: torch.nn.Module) -> float:
    ddp = DistributedDataParallel(model)
    handle: gw.Handle = gw.attach(ddp, "powersgd:rank=4", error_feedback=True)
    state = handle.state_dict()
    handle.load_state_dict(state)
    handle.update(codec=gw.QSGD(bits=4))
    sent: float = handle.stats()["wire_bytes"]
    handle.detach()
    return sent


def sharded(model: torch.nn.Module) -> dict[str, object]:
    handle = gw.attach(fully_shard(model), codec=gw.codecs.TernGrad(), exclude=["*.bias"])
    return handle.stats()


def tensors(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gw.all_reduce(values, codec=gw.QSGD(bits=8), op="avg", group=group)
    gw.all_reduce(values, "qsgd:bits=4", options=gw.Options(algorithm="ring"))
    codec: gw.Codec = gw.codecs.Cast()
    try:
        gw.broadcast(values, codec=codec)
    except gw.ConfigError as error:
        print(str(error))
    except gw.TransportError as error:
        peer: int | None = error.peer
        print(peer)
    return values


def wrong(values: torch.Tensor) -> None:
    gw.attach("a module")  # type: ignore[arg-type]
    gw.all_reduce(values, step="first")  # type: ignore[arg-type]
    gw.QSGD(bits="four")  # type: ignore[arg-type]
    gw.Qsgd()  # type: ignore[attr-defined]
