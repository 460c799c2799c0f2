"""The error of a plan, as policies compare plans (THESIS 4.4).

A layer's error is the L2 norm of (gradient - what its codec sends). The gradient is the average
over the ranks and over some steps; what error feedback would add is left out. Error feedback sends
the rest in later steps, so the error says how late a layer's gradient arrives, not what is lost.

The metric says how the errors of layers are added up:

    "l2"       sum of the norms       the thesis' formula (4.4), and its code's
    "squared"  sum of their squares   the thesis' text; the square of the global L2 norm

The global L2 norm, of all layers as one vector, is the root of the sum of squares. A plan within
its budget by one metric may be above that of the uniform plan by the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from gradwire.errors import ConfigError, use_one_of

METRICS = ("l2", "squared")


def check_metric(metric: object) -> None:
    """Raise ConfigError unless it is one of `METRICS`."""
    if metric not in METRICS:
        raise ConfigError(f"metric={metric!r}: {use_one_of(metric, METRICS)}")


def terms(norms: np.ndarray, metric: str) -> np.ndarray:
    """What each layer adds to the error: float64 of the shape of `norms`, L2 norms of errors."""
    check_metric(metric)
    return norms if metric == "l2" else norms * norms


def total(added: Iterable[float]) -> float:
    """The error of a plan from its layers' `terms`; correctly rounded, so in any order the same."""
    return math.fsum(added)


def global_l2(norms: Iterable[float]) -> float:
    """The L2 norm of the errors of all layers as one vector."""
    return math.sqrt(math.fsum(norm * norm for norm in norms))
