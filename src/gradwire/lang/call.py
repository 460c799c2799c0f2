"""The arguments of a kernel call, apart from its table of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.errors import ConfigError

if TYPE_CHECKING:  # sources are also generated without numpy and torch
    import numpy as np
    import torch


@dataclass(frozen=True)
class Call:
    """Attributes:
    ranks: contributions to a sum, the caller's own included.
    rank: position of the caller's values in the sum; -1 if all contributions are payloads.
    distances: int64[payloads] or more, the same for all rows: offsets in bytes from a row's
        `source` to each payload that is summed, so the first is 0; None if no payload is summed. If
        the layout `redraws`, each payload's origin (see rng.origin_keys) follows: int64[2 *
        payloads] or more.
    factor: multiplier of decoded values and of sums.
    threads: number of threads that share the blocks (target c); results do not depend on it.
    workspace: uint8[kernels.workspace_nbytes(...)], or None for codecs that need none.
    failed: int32[1] on a GPU, set by kernels that meet a malformed payload; see `gpu.Mark`. None:
        the call itself raises the error, and waits for the device if it must.
    """

    ranks: int = 1
    rank: int = 0
    distances: np.ndarray | None = None
    factor: float = 1.0
    threads: int = 1
    workspace: torch.Tensor | None = None
    failed: torch.Tensor | None = None

    @property
    def payloads(self) -> int:
        """The number of payloads that are summed."""
        return self.ranks - (self.rank >= 0)

    @property
    def origins(self) -> np.ndarray:
        """The origins of the payloads, where `distances` has them."""
        assert self.distances is not None
        return self.distances[self.payloads : 2 * self.payloads]

    @property
    def stride(self) -> int:
        """The distance between equally spaced payloads, for a target that needs one.

        Raises:
            ConfigError: the payloads are not equally spaced.
        """
        distances = [] if self.distances is None else self.distances[: self.payloads].tolist()
        if len(distances) < 2:
            return 0
        stride = int(distances[1])
        if any(at != k * stride for k, at in enumerate(distances)):
            raise ConfigError(
                f"payloads at distances {distances}: this target only sums equally spaced payloads"
            )
        return stride
