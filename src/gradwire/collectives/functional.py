"""`gw.all_reduce` and `gw.broadcast`: one tensor, with torch's calling conventions."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradwire.collectives.calling import (
    Async,
    Op,
    called,
    check_residual,
    check_seed,
    check_step,
    check_tensor,
    codec_of,
    communicator_of,
    deliver,
    flat,
    op_of,
    options_of,
)
from gradwire.collectives.options import Options
from gradwire.collectives.typed import AllReduce, Broadcast, Request
from gradwire.engine import Communicator
from gradwire.lang import Codec


def all_reduce(
    tensor: torch.Tensor,
    codec: str | Codec | None = "qsgd",
    *,
    op: Op = "sum",
    algorithm: str | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
    async_op: bool = False,
    residual: torch.Tensor | None = None,
    seed: int = 0,
    step: int | None = None,
    name: str = "tensor",
    options: Options | None = None,
    **codec_options: object,
) -> Async | None:
    """Reduce `tensor` over all ranks, in place, compressed or not (CGX 4.1).

    Every rank ends with bit-identical values. With one rank, `tensor` is unchanged.

    Args:
        tensor: on the CPU or a GPU, any shape and layout. Through a codec: fp32, fp16 or bf16.
        codec: a name (see `gradwire codec list`) with its options as keywords, a Codec, or None:
            the values travel uncompressed, integers and float64 too.
        op: "sum", "avg", "min" or "max", or torch's ReduceOp.SUM, AVG, MIN or MAX; the last two
            without a codec.
        algorithm: a name (docs/reference/algorithms.md); None leaves it to `options`.
        group: a process group; None is the default one.
        async_op: return a future at once; its `wait()` gives the tensor. Over NCCL nothing waits
            on the host, with it or without: the current stream does.
        residual: error feedback: fp32, `tensor.numel()` values, zeros at first; it is added before
            encoding, and holds what was not sent afterwards.
        seed, step, name: together with the rank, they determine the codec's random numbers. Calls
            without a step are counted per group, and each draws its own numbers; `gw.state_dict`
            saves the count, so that a restarted run draws the same numbers.
        options: algorithm, segments, checksum.

    Raises:
        ConfigError: unknown codec, op or algorithm; what docs/reference/algorithms.md does not
            list; ranks that disagree.
        TransportError: a peer or link failed.
        CodecError: a payload arrived corrupted.
    """
    check_tensor("tensor", tensor)
    check_residual(residual, tensor.numel())
    kept = None if residual is None else residual.view(-1)
    values = flat(tensor)
    wire = codec_of(all_reduce, codec, codec_options)
    request = AllReduce(values, op_of(op), kept, codec=wire)
    return _in_place("all_reduce", tensor, request, algorithm, group, async_op, seed, step, name,
                     options)  # fmt: skip


def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    codec: str | Codec | None = None,
    *,
    algorithm: str | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
    async_op: bool = False,
    seed: int = 0,
    step: int | None = None,
    name: str = "tensor",
    options: Options | None = None,
    **codec_options: object,
) -> Async | None:
    """Replace every rank's `tensor` by that of rank `root` (of the group), in place.

    With a codec all ranks, the root too, end with the decoded payload: bit-identical values.

    Args:
        tensor: on the CPU or a GPU, any shape and layout. Through a codec: fp32, fp16 or bf16.
        root: the source, a rank within `group`.
        codec: as in `all_reduce`; None: the values travel uncompressed, whatever their dtype.
        algorithm: "sra" (scatter, then all-gather) or "tree", for few values.
        group, async_op, seed, step, name, options: as in `all_reduce`.

    Raises:
        ConfigError, TransportError, CodecError: as `all_reduce`.
    """
    check_tensor("tensor", tensor)
    values = flat(tensor)
    request = Broadcast(values, root, codec=codec_of(broadcast, codec, codec_options))
    return _in_place("broadcast", tensor, request, algorithm, group, async_op, seed, step, name,
                     options)  # fmt: skip


def _in_place(
    function: str,
    tensor: torch.Tensor,
    request: Request,
    algorithm: str | None,
    group: dist.ProcessGroup | Communicator | None,
    async_op: bool,
    seed: int,
    step: int | None,
    name: str,
    options: Options | None,
) -> Async | None:
    check_step(step)
    check_seed(seed)
    chosen = options_of(options, algorithm)
    comm = communicator_of(function, group, async_op)
    running, values = called(comm, request, name, seed, step, chosen)

    def finish() -> torch.Tensor:
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values.view(tensor.shape))
        return tensor

    return deliver(comm, running, finish, async_op, tensor.device)
