"""Parts that the public functions share with handles: checks of arguments, and `begin`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire import codecs
from gradwire.collectives.operation import OPS
from gradwire.collectives.options import Options
from gradwire.collectives.scope_program import prepare
from gradwire.collectives.typed import Request
from gradwire.engine import Outcome, Owner
from gradwire.errors import ConfigError, check_keywords
from gradwire.lang import Codec, rng

Async = torch.futures.Future[torch.Tensor]
Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType

_NO_KEYS = rng.Keys(0, 0)


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError unless `tensor` is dense (strided), and on the CPU or a GPU."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise ConfigError(f"{name}: a dense torch.Tensor is needed, not {kind}")
    if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ConfigError(f"{name}: elements share memory (it was expanded): give a copy of it")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{name} is on {tensor.device}: kernels are for the CPU and for CUDA")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its values, 1-D and contiguous: its own memory, or a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def op_of(op: Op) -> str:
    """The name of a reduction, given by name or as torch's ReduceOp; raises ConfigError."""
    if isinstance(op, str):
        return op  # Request.check validates it
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        for name in OPS:
            if op == getattr(dist.ReduceOp, name.upper()):
                return name
    known = ", ".join(f"{name!r} or ReduceOp.{name.upper()}" for name in OPS)
    raise ConfigError(f"op={op!r:.60}: give one of {known}")


def flat_residual(
    residual: torch.Tensor | None, numel: int, *others: torch.Tensor
) -> torch.Tensor | None:
    """A residual, 1-D. Raises ConfigError unless it is None, or fp32, contiguous, with `numel`
    values, in memory that is none of the others'."""
    if residual is None:
        return None
    if not isinstance(residual, torch.Tensor):
        raise ConfigError(f"residual: a torch.Tensor or None, not {type(residual).__name__}")
    found = residual.numel(), residual.dtype
    if found != (numel, torch.float32) or not residual.is_contiguous():
        raise ConfigError(
            f"residual: {found[0]} x {found[1]}; it must hold {numel} x torch.float32, contiguous"
        )
    first, end = _span(residual)
    if any(first < stop and start < end for start, stop in map(_span, others)):
        raise ConfigError("residual: it shares memory with a tensor of the call: give it its own")
    return residual.view(-1)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that its values span, [first, end)."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def options_of(options: Options | None, algorithm: str | None = None) -> Options:
    """`options`, with `algorithm` if it is given. Raises ConfigError for a wrong type."""
    if not (options is None or isinstance(options, Options)):
        raise ConfigError(f"options={options!r}: give a gradwire.Options(...), or None")
    options = options or Options()
    return options if algorithm is None else replace(options, algorithm=algorithm)


def codec_of(
    call: Callable[..., object], codec: str | Codec | None, codec_options: Mapping[str, object]
) -> Codec | None:
    """The codec of a name or object that `call` was given; None: values travel uncompressed.

    Raises:
        ConfigError: an unknown name or option, or a misspelt argument of `call`.
    """
    check_keywords(call, codec_options, codecs.OPTIONS)
    if codec == "none":
        codec = None
    if codec is None and codec_options:
        raise ConfigError(
            f"options {', '.join(codec_options)} go with a codec's name, not with codec=None"
        )
    return None if codec is None else codecs.get(codec, **codec_options)


def begin(
    owner: Owner,
    request: Request,
    name: str,
    options: Options | None = None,
    keys: rng.Keys = _NO_KEYS,
    step: Callable[[], int] = lambda: 0,
) -> tuple[Future[Outcome], torch.Tensor]:
    """Start a single collective: (its future, this rank's result, valid once the future ends).

    Args:
        keys, step: of its random numbers, where its codec draws any; `step` is called once it is
            legal.

    Raises:
        ConfigError: as `ScopeProgram.start`.
        TransportError: the group is broken.
    """
    rank, world_size = owner.comm.rank, owner.comm.world_size
    request.check()
    spec = request.spec(name, 0, world_size)
    program = prepare(owner, [spec], options, request.operation, request.values.device)
    item = request.item(spec, keys, step(), rank, world_size)
    return program.start([item]), request.result(spec, item, rank, world_size)


def future_on(device: torch.device) -> torch.futures.Future[Any]:
    """A future for tensors on `device`. Waiting for it makes the caller's stream wait for the work
    on the stream that is current when the result is set."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)
