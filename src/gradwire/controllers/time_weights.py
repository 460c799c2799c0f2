"""What a byte of each bucket costs in time, by regression (THESIS 4.5, "Optimizing for Time").

    span = latency + sum over buckets of T(b) bytes(b),    T(b) >= 0

The span goes from the start of the first bucket's synchronisation to the end of the last one's, in
steps with several plans. T(b), over their mean, are weights of the bytes of the bucket's layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.errors import ConfigError

_FLOOR = 0.01  # a weight of 0 would let a layer send anything


def time_weights(sent: np.ndarray, spans: Sequence[float]) -> np.ndarray:
    """The weight of each bucket's bytes: float64[buckets], their mean about 1.

    Args:
        sent: float64[samples, buckets], bytes sent in each bucket.
        spans: seconds, one per sample.

    Raises:
        ConfigError: shapes differ, numbers are not finite, or there are fewer samples than buckets
            plus 1, or none tells buckets apart.
    """
    bytes_, seconds = np.asarray(sent, np.float64), np.asarray(spans, np.float64)
    if bytes_.ndim != 2 or seconds.shape != bytes_.shape[:1]:
        raise ConfigError(
            f"time_weights: {bytes_.shape} bytes with {seconds.shape} spans: give a row of buckets "
            "and a span per sample"
        )
    if not (np.isfinite(bytes_).all() and np.isfinite(seconds).all()):
        raise ConfigError("time_weights: a number is not finite")
    samples, buckets = bytes_.shape
    centred = bytes_ - bytes_.mean(axis=0)
    if samples <= buckets or np.linalg.matrix_rank(centred) < buckets:
        raise ConfigError(
            f"time_weights: {samples} samples do not tell {buckets} buckets apart: give more, of "
            "plans that differ in every bucket"
        )
    found = _non_negative(centred, seconds - seconds.mean())
    if not found.any():
        return np.ones(buckets)
    weights: np.ndarray = np.maximum(found / found.mean(), _FLOOR)
    return weights


def _non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares with the most negative coefficient set to zero until none is negative."""
    free = list(range(a.shape[1]))
    while free:
        found = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        if (found >= 0).all():
            whole = np.zeros(a.shape[1])
            whole[free] = found
            return whole
        free.pop(int(found.argmin()))
    return np.zeros(a.shape[1])
