"""`gw.all_reduce`: one tensor, in torch's manner."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradwire import codecs
from gradwire.collectives.calling import (
    Async,
    check_op,
    check_residual,
    check_seed,
    check_step,
    check_tensor,
    communicator_of,
    deliver,
    step_of,
)
from gradwire.collectives.collective import prepare
from gradwire.collectives.job import Item
from gradwire.collectives.options import Options
from gradwire.engine import Communicator
from gradwire.lang import Codec, rng
from gradwire.partition import Spec


def all_reduce(
    tensor: torch.Tensor,
    codec: str | Codec = "qsgd",
    *,
    op: str = "sum",
    group: dist.ProcessGroup | Communicator | None = None,
    async_op: bool = False,
    residual: torch.Tensor | None = None,
    seed: int = 0,
    step: int | None = None,
    name: str = "tensor",
    options: Options | None = None,
    **codec_options: object,
) -> Async | None:
    """Sum or average `tensor` over all ranks through a codec, in place (CGX 4.1).

    Every rank ends with bit-identical values. With one rank nothing is sent and nothing changes.

    Args:
        tensor: fp32, fp16 or bf16 on the CPU or a GPU, any shape and layout.
        codec: a name (see `gradwire codec list`) with its options as keywords, or a Codec.
        op: "sum" or "avg".
        group: a process group; None is the default one.
        async_op: return a future at once; its `wait()` gives the tensor. Over NCCL nothing waits
            on the host, with it or without: the current stream does.
        residual: error feedback: fp32, `tensor.numel()` values, zeros at first; it is added before
            encoding, and holds what was not sent afterwards.
        seed, step, name: what the codec's random numbers derive from, with the rank. Without a
            step every call draws its own; give one to draw the same numbers again, as after a
            restart.
        options: algorithm, segments, checksum.

    Raises:
        ConfigError: unknown codec, op or dtype; a codec that is not defined in the algorithm, or
            with error feedback; ranks that disagree.
        TransportError: a peer or link failed.
        CodecError: a payload arrived corrupted.
    """
    check_op("all_reduce", op)
    check_tensor("tensor", tensor)
    check_step(step)
    check_seed(seed)
    check_residual(residual, tensor.numel())
    chosen = codecs.get(codec, **codec_options)
    comm = communicator_of("all_reduce", group, async_op)
    spec = Spec(name, tensor.numel(), tensor.dtype, chosen, residual is not None)
    collective = prepare(comm.calls, [spec], options, device=tensor.device)
    values = tensor.detach().contiguous().view(-1)
    flat_residual = None if residual is None else residual.view(-1)
    keys = rng.parameter_keys(seed, name, comm.rank)
    item = Item(values, keys, step_of(comm, step), flat_residual)
    running = collective.start([item], average=op == "avg")

    def finish() -> torch.Tensor:
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values.view(tensor.shape))
        return tensor

    return deliver(running, finish, async_op, tensor.device)
