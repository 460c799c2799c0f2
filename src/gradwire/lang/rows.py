"""The table of rows of a kernel call; emit/prelude.h declares the same 64 bytes."""

from __future__ import annotations

import numpy as np

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
