"""Error feedback: what was not sent is added to the next step's gradient (THESIS Alg. 2.1).

The kernels do it in their one pass: p = g + e; send Q(p); e = p - Q(p). Both encodings of a
scatter-reduce are covered: the rank that owns a chunk keeps the error of the encoded sum in its
own residual, so over all ranks

    sum of gradients + sum of residuals before == world_size * average + sum of residuals after

to the last rounding: nothing is lost anywhere. A value that is not finite never enters a
residual.
"""

from __future__ import annotations

import torch

from gradwire.aggregators.protocol import Aggregator, Steps
from gradwire.errors import ConfigError


class ErrorFeedback:
    """Wraps an aggregator of one compressed all-reduce.

    Args:
        inner: yields one CompressedAllReduce without a residual.

    Attributes:
        residual: fp32, one for each value, zeros until the first step; None before it.
    """

    def __init__(self, inner: Aggregator) -> None:
        self.inner = inner
        self.residual: torch.Tensor | None = None

    def aggregate(self, gradient: torch.Tensor) -> Steps:
        if self.residual is None:
            self.residual = torch.zeros_like(gradient, dtype=torch.float32)
        # A state that was loaded may lie elsewhere.
        self.residual = self.residual.to(gradient.device)
        steps = self.inner.aggregate(gradient)
        request = next(steps)
        assert request.residual is None, "the inner aggregator has error feedback of its own"
        request.residual = self.residual
        result = yield request
        try:
            steps.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise AssertionError("error feedback wraps aggregators of a single collective")

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {} if self.residual is None else {"residual": self.residual}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        residual = state.get("residual")
        if residual is None:
            self.residual = None
            return
        # The kernels take its address: anything else would be read and written as fp32, 1-D.
        found = (residual.dtype, residual.dim(), residual.is_contiguous(), residual.is_meta)
        if found != (torch.float32, 1, True, False):
            raise ConfigError(
                f"a residual is fp32, 1-D, contiguous and in memory, not {residual.dtype}, "
                f"{residual.dim()}-D, strides {residual.stride()}, on {residual.device}"
            )
        self.residual = residual.clone()
