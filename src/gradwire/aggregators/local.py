"""Local kernel calls: a codec's forms as an aggregator's own computations on a scope's parameters.

What an aggregator computes on a rank's own values (norms, rotations, rounding) is written as a
codec, and runs as compiled kernels at about the speed of memory: one call for all parameters. Such
a codec's payload is local memory, which no message carries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch

from gradwire.aggregators.protocol import Context
from gradwire.errors import CodecError
from gradwire.lang import Codec, kernels, rng
from gradwire.lang.call import ROW, check_memory

_PHASE = 1 << 32  # of the random numbers here; the encodings of collectives have small ones


def run_local(
    codec: Codec,
    form: str,
    values: Sequence[torch.Tensor],
    payloads: Sequence[torch.Tensor],
    keys: np.ndarray | None = None,
    factor: float = 1.0,
) -> None:
    """Run a form of the codec, one of `gradwire.lang.forms.FORMS` without residual or peers.

    Args:
        values: per parameter, fp32, 1-D, contiguous.
        payloads: per parameter, contiguous memory of `layout(codec).nbytes(numel)` bytes, of any
            dtype.
        keys: per parameter, from `step_keys`, of the codec's shared random numbers.
        factor: multiplier of decoded values.

    Raises:
        ConfigError: the kernels could not be made, see `gradwire.lang.kernels`; or values are not
            as described.
        CodecError: a payload's memory has another size, or is not contiguous.
    """
    if not values:
        return
    device = values[0].device
    on_gpu = device.type == "cuda"
    k = kernels(codec, torch.float32, "triton" if on_gpu else "auto", [form])
    rows = np.zeros(len(values), ROW)
    for row, value, payload in zip(rows, values, payloads, strict=True):
        numel = value.numel()
        check_memory(codec, "values", value, numel, torch.float32, device)
        nbytes, whole = k.layout.nbytes(numel), payload.is_contiguous()
        if payload.nbytes != nbytes or not whole or payload.device != device:
            raise CodecError(
                f"{codec}: a payload of {numel} values is {nbytes} contiguous bytes on {device}, "
                f"not {payload.nbytes} on {payload.device}{'' if whole else ', not contiguous'}"
            )
        row["values"], row["payload"], row["numel"] = value.data_ptr(), payload.data_ptr(), numel
    if keys is not None:
        rows["shared"] = keys
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        k.run(form, rows, factor=factor, threads=torch.get_num_threads())


def step_keys(contexts: Sequence[Context], shared: bool) -> np.ndarray:
    """Keys of this step's random numbers, per parameter; `shared`: equal on all ranks."""
    keys = [c.keys.shared if shared else c.keys.own for c in contexts]
    steps = np.array([c.step for c in contexts], np.int64)
    return rng.step_keys(np.array(keys, np.uint64), steps, _PHASE)


def with_residual(c: Context) -> torch.Tensor:
    """The gradient plus its residual, if there is one, as fp32; it overwrites an fp32 gradient."""
    fed = c.gradient.float()
    return fed if c.residual is None else fed.add_(c.residual)


def keep_residual(c: Context, finite: torch.Tensor, error: torch.Tensor) -> None:
    """Replace the residual by `error` if `finite`, a tensor of one bool, is true on all ranks:
    GradScaler skips a step that is not."""
    assert c.residual is not None
    if c.residual.is_cuda:  # no wait for the device
        torch.where(finite, error, c.residual, out=c.residual)
    elif finite:  # a third of the time
        c.residual.copy_(error)
