"""`gw.reduce_scatter` and `gw.all_gather`: the halves of SRA, or their forms in two levels, with
torch's calling conventions.

They correspond to torch's reduce_scatter_tensor and all_gather_into_tensor: one tensor consists of
world_size equal parts, of any size; part n is the *shard* of rank n.
"""

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
from gradwire.collectives.typed import AllGather, ReduceScatter
from gradwire.engine import Communicator
from gradwire.errors import ConfigError
from gradwire.lang import Codec


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
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
    """Reduce `input` over all ranks, compressed or not; rank n gets shard n.

    A rank's contribution to its own shard is not encoded, and neither is the sum. With algorithm
    "hierarchical", the ranks of a machine first sum what they send to other machines.

    Args:
        output: this rank's shard of the result; `input`'s dtype, any shape. It may be this rank's
            shard of `input` itself; otherwise `input` is unchanged.
        input: on the CPU or a GPU; world_size * output.numel() values, the shards in rank order.
            With a codec: fp32, fp16 or bf16.
        residual: error feedback: fp32, `input.numel()` values, zeros at first. Its part for this
            rank's shard is neither used nor changed.
        codec, op, group, async_op, seed, step, name, options: as in `all_reduce`; the future's
            value is `output`.
        algorithm: "sra", of which this is one half; or "hierarchical", for machines of several
            ranks, which works on a copy of `input`.

    Raises:
        ConfigError: as `all_reduce`, or sizes do not match.
        TransportError: a peer or link failed.
        CodecError: a payload arrived corrupted.
    """
    check_step(step)
    check_seed(seed)
    chosen = options_of(options, algorithm)
    comm = communicator_of("reduce_scatter", group, async_op)
    _check_shards(comm, whole=("input", input), shard=("output", output))
    check_residual(residual, input.numel())
    kept = None if residual is None else residual.view(-1)
    values, home = flat(input), _flat_home(output)
    home.copy_(values[comm.rank * home.numel() :][: home.numel()])
    if chosen.algorithm == "hierarchical":
        values = values.clone()  # sums of machines replace some of them
    wire = codec_of(reduce_scatter, codec, codec_options)
    request = ReduceScatter(values, op_of(op), residual=kept, home=home, codec=wire)
    running, _ = called(comm, request, name, seed, step, chosen)

    def finish() -> torch.Tensor:
        if home.data_ptr() != output.data_ptr():
            output.detach().copy_(home.view(output.shape))
        return output

    return deliver(comm, running, finish, async_op, output.device)


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    codec: str | Codec | None = "qsgd",
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
    """Gather every rank's `input`, compressed or not, into `output` on every rank, in rank order.

    Every rank ends with bit-identical values: a rank's own shard, too, is its decoded payload.

    Args:
        output: `input`'s dtype, world_size * input.numel() values, any shape.
        input: on the CPU or a GPU, any shape; unchanged, unless it is this rank's shard of
            `output`. With a codec: fp32, fp16 or bf16.
        codec, group, async_op, seed, step, name, options: as in `all_reduce`; the future's value
            is `output`.
        algorithm: "sra", of which this is one half; or "hierarchical", for machines of several
            ranks: the same results.

    Raises:
        ConfigError: as `all_reduce`, or sizes do not match.
        TransportError: a peer or link failed.
        CodecError: a payload arrived corrupted.
    """
    check_step(step)
    check_seed(seed)
    chosen = options_of(options, algorithm)
    comm = communicator_of("all_gather", group, async_op)
    _check_shards(comm, whole=("output", output), shard=("input", input))
    values, own = _flat_home(output), flat(input)
    wire = codec_of(all_gather, codec, codec_options)
    request = AllGather(own, into=values, codec=wire)
    running, _ = called(comm, request, name, seed, step, chosen)

    def finish() -> torch.Tensor:
        if values.data_ptr() != output.data_ptr():
            output.detach().copy_(values.view(output.shape))
        return output

    return deliver(comm, running, finish, async_op, output.device)


def _flat_home(tensor: torch.Tensor) -> torch.Tensor:
    """1-D memory for a result: the tensor's own if it is contiguous."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.view(-1)
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)


def _check_shards(
    comm: Communicator, whole: tuple[str, torch.Tensor], shard: tuple[str, torch.Tensor]
) -> None:
    """Raise ConfigError unless `whole` has a shard like `shard` for every rank."""
    for name, tensor in (whole, shard):
        check_tensor(name, tensor)
    (whole_name, all_values), (shard_name, own) = whole, shard
    if all_values.numel() != comm.world_size * own.numel():
        raise ConfigError(
            f"{whole_name} has {all_values.numel()} values; with {comm.world_size} ranks it must "
            f"have {comm.world_size * own.numel()} values: {comm.world_size} x {shard_name}'s"
        )
    if all_values.dtype != own.dtype:
        raise ConfigError(
            f"{whole_name} is {all_values.dtype} and {shard_name} is {own.dtype}; give both the "
            "same dtype"
        )
