"""The table of rows of a kernel call; emit/prelude.h declares the same 64 bytes.

Kernels get bare addresses, so what they point to is checked where an address is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gradwire.errors import ConfigError

if TYPE_CHECKING:
    import torch

ROW = np.dtype(
    [
        ("values", "<u8"),  # address of the flat values, in the kernel's dtype
        ("residual", "<u8"),  # address of fp32[numel]
        ("payload", "<u8"),  # address of uint8[layout.nbytes(numel)]
        ("source", "<u8"),  # address of the first peer's payload; see `Call.distances`
        ("numel", "<i8"),
        ("start", "<i8"),  # position of the first value in its parameter
        ("key", "<u8"),  # of the random numbers, see rng.step_keys and rng.origin_keys
        ("shared", "<u8"),  # of the random numbers that all ranks share
    ]
)
assert ROW.itemsize == 64


def check_memory(
    of: str,
    what: str,
    tensor: torch.Tensor | None,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ConfigError unless `tensor` is contiguous and no lazy view (conjugate, negative).

    Args:
        of, what: for the message: whose memory it is, and which.
        numel, dtype, device: what the tensor must have.
    """
    if tensor is None:
        raise ConfigError(f"{of}: `{what}` is missing")
    # torch releases the GIL in these checks, so they are made only where a lazy view is possible: a
    # negative view of real dtype is every other value of a complex one, hence not contiguous.
    lazy = (dtype.is_complex or numel == 1) and (tensor.is_conj() or tensor.is_neg())
    as_it_must_be = (
        tensor.numel() == numel
        and tensor.dtype is dtype
        and tensor.device == device
        and tensor.is_contiguous()
        and not lazy
    )
    if not as_it_must_be:
        layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
        if lazy:
            layout = "a view that negates its imaginary part"
        raise ConfigError(
            f"{of}: `{what}` holds {tensor.numel()} x {tensor.dtype} on {tensor.device}, "
            f"{layout}; it must hold {numel} x {dtype}, contiguous on {device}"
        )


def check_table(rows: np.ndarray) -> None:
    """Raise ConfigError unless `rows` is a C-contiguous table of dtype `ROW`."""
    if rows.dtype != ROW or not rows.flags.c_contiguous:
        raise ConfigError("rows: give a C-contiguous numpy table of dtype gradwire.lang.ROW")


def check_distances(distances: np.ndarray | None, read: int) -> None:
    """Raise ConfigError unless there are as many as a call reads; see `Call.distances`."""
    if distances is None:
        if read:
            raise ConfigError(f"distances: none are given, and the call reads {read}")
    elif distances.dtype != np.int64 or not distances.flags.c_contiguous or distances.size < read:
        raise ConfigError(
            f"distances: {distances.size} x {distances.dtype} are given; the call reads {read}, "
            "int64 and C-contiguous"
        )


def check_workspace(workspace: torch.Tensor | None, needed: int) -> None:
    """Raise ConfigError unless a workspace has the bytes that a call needs."""
    given = 0 if workspace is None else workspace.nbytes
    if given < needed:
        raise ConfigError(f"workspace: {given} bytes are given; the call needs {needed}")
