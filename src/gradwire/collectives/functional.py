"""`gw.all_reduce`: one tensor, in torch's manner."""

from __future__ import annotations

from concurrent.futures import Future

import torch
import torch.distributed as dist

from gradwire import codecs
from gradwire.collectives.options import Options
from gradwire.collectives.prepared import Item, prepare
from gradwire.engine import Communicator, Outcome
from gradwire.errors import ConfigError
from gradwire.groups import communicator
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
    step: int = 0,
    name: str = "tensor",
    options: Options | None = None,
    **codec_options: object,
) -> torch.futures.Future[torch.Tensor] | None:
    """Sum or average `tensor` over all ranks through a codec, in place (CGX 4.1).

    Every rank ends with bit-identical values. With one rank nothing is sent and nothing changes.

    Args:
        tensor: fp32, fp16 or bf16 on the CPU, any shape and layout.
        codec: a name (see `gradwire codec list`) with its options as keywords, or a Codec.
        op: "sum" or "avg".
        group: a process group; None is the default one.
        async_op: return a future at once; its `wait()` gives the tensor.
        residual: error feedback: fp32, `tensor.numel()` values, zeros at first; it is added before
            encoding, and holds what was not sent afterwards.
        seed, step, name: what the codec's random numbers derive from, with the rank. Give every
            call its own step if the codec rounds at random.
        options: algorithm, segments, checksum.

    Raises:
        ConfigError: unknown codec, op or dtype; ranks that disagree.
        TransportError: a peer or link failed.
        CodecError: a payload arrived corrupted.
    """
    if op not in ("sum", "avg"):
        raise ConfigError(f"op {op!r}: gradwire.all_reduce knows 'sum' and 'avg'")
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise ConfigError(f"tensor: a dense torch.Tensor is needed, not {kind}")
    if tensor.device.type != "cpu":
        raise ConfigError(f"tensor is on {tensor.device}: this version compresses CPU tensors")
    if not isinstance(step, int) or not 0 <= step < 1 << 63:
        raise ConfigError(f"step is {step!r}, must be a whole number, 0 or more")
    if residual is not None and (
        residual.numel() != tensor.numel()
        or residual.dtype != torch.float32
        or not residual.is_contiguous()
    ):
        raise ConfigError(
            f"residual: {residual.numel()} x {residual.dtype}; it must hold "
            f"{tensor.numel()} x torch.float32, contiguous"
        )
    chosen = codecs.get(codec, **codec_options)
    comm = group if isinstance(group, Communicator) else communicator(group)
    if not async_op and comm.executor.is_own_thread():
        raise ConfigError(
            "all_reduce was called in a callback that runs on gradwire's own thread, where "
            "waiting would never end: use async_op=True"
        )
    spec = Spec(name, tensor.numel(), tensor.dtype, chosen, residual is not None)
    collective = prepare(comm, [spec], options)
    values = tensor.detach().contiguous().view(-1)
    flat_residual = None if residual is None else residual.view(-1)
    keys = rng.parameter_keys(seed, name, comm.rank)
    running = collective.start([Item(values, keys, step, flat_residual)], average=op == "avg")

    def finish(outcome: Future[Outcome]) -> torch.Tensor:
        outcome.result()
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values.view(tensor.shape))
        return tensor

    if not async_op:
        finish(running)
        return None
    result: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def deliver(outcome: Future[Outcome]) -> None:
        error = outcome.exception()
        if error is None:
            result.set_result(finish(outcome))
        else:
            result.set_exception(error)  # type: ignore[arg-type]

    running.add_done_callback(deliver)
    return result
