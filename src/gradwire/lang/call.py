"""The arguments of a kernel call besides its table of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # sources are generated where there is no torch
    import torch


@dataclass(frozen=True)
class Call:
    """Attributes:
    ranks: contributions to a sum, the caller's own included.
    rank: position of the caller's values in the sum; -1 if all contributions are payloads.
    stride: bytes between the payloads at a row's `source`.
    factor: what decode multiplies by; what sums are multiplied by.
    threads: among which blocks are divided (target c); no result depends on it.
    workspace: uint8[layout.workspace_nbytes(...)], or None for codecs that need none.
    """

    ranks: int = 1
    rank: int = 0
    stride: int = 0
    factor: float = 1.0
    threads: int = 1
    workspace: torch.Tensor | None = None
