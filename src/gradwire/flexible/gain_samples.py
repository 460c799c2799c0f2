"""Samples of the compression gain, E|gc|^2 / E|ge|^2 (ARTOPK 3-E), over some passes of a handle."""

from __future__ import annotations

import statistics

from gradwire.handles.handle import Handle


class GainSamples:
    """Samples of a handle's compression gain, of passes that begin after this is made.

    Args:
        every: a sample in so many passes.
    """

    def __init__(self, handle: Handle, every: int) -> None:
        self._handle, self._every = handle, every
        self._since = handle.stats()["steps"]
        self._found: dict[float, float] = {}
        self.look()

    def look(self) -> None:
        """Note the newest sample."""
        found = self._handle.metrics(every=self._every)
        step = found.get("sampled_step", 0)
        if step > self._since and "compression_gain" in found:
            self._found[step] = found["compression_gain"]

    def mean(self) -> float | None:
        """Over the samples; None: there is none."""
        return statistics.fmean(self._found.values()) if self._found else None
