"""The arguments of a kernel call besides its table of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.errors import ConfigError

if TYPE_CHECKING:  # sources are generated where there is neither
    import numpy as np
    import torch


@dataclass(frozen=True)
class Call:
    """Attributes:
    ranks: contributions to a sum, the caller's own included.
    rank: position of the caller's values in the sum; -1 if all contributions are payloads.
    distances: int64[payloads] or more, the same for all rows: bytes from the payload at a row's
        `source` to each of those that are summed, so the first is 0; None if none are.
    factor: what decode multiplies by; what sums are multiplied by.
    threads: among which blocks are divided (target c); no result depends on it.
    workspace: uint8[kernels.workspace_nbytes(...)], or None for codecs that need none.
    failed: int32[1] on a GPU: where kernels leave word of a payload that they cannot decode; see
        `gpu.Mark`. None: the call itself says so, and waits where it must.
    """

    ranks: int = 1
    rank: int = 0
    distances: np.ndarray | None = None
    factor: float = 1.0
    threads: int = 1
    workspace: torch.Tensor | None = None
    failed: torch.Tensor | None = None

    @property
    def stride(self) -> int:
        """The distance between payloads that stand at equal ones, for a target that needs it.

        Raises:
            ConfigError: they do not.
        """
        if self.distances is None or len(self.distances) < 2:
            return 0
        stride = int(self.distances[1])
        if any(at != k * stride for k, at in enumerate(self.distances.tolist())):
            raise ConfigError(
                f"payloads at distances {self.distances.tolist()}: this target sums payloads that "
                "stand at equal distances alone"
            )
        return stride
