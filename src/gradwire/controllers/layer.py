"""What policies decide on: a table of choices per layer, and a budget of error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.aggregators import Aggregator
from gradwire.controllers import error
from gradwire.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's choices, with the bytes and the error of each.

    Attributes:
        name: of the parameter.
        numel: its values, or those of the segment.
        methods: the choices.
        nbytes: int64[choices], payload bytes per rank and step.
        errors: float64[choices], L2 norms of errors; see `controllers.error`.
        reference: index of the choice of the uniform plan.
        norm: L2 norm of the gradient.
        top_norm: L2 norm of its largest values, by which KMeans sees how sensitive it is.
        weight: what a byte costs, relative to other layers' (THESIS 4.5, "Optimizing for Time").
        rows: (first, end) of a segment of the parameter's rows; None: the whole parameter.
    """

    name: str
    numel: int
    methods: tuple[Aggregator, ...]
    nbytes: np.ndarray
    errors: np.ndarray
    reference: int
    norm: float
    top_norm: float
    weight: float = 1.0
    rows: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert len(self.methods) == len(self.nbytes) == len(self.errors) > 0, self.name
        assert 0 <= self.reference < len(self.methods), self.name
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"layer {self.name}: weight={self.weight!r}: give a number above 0")

    @property
    def label(self) -> str:
        """The name, with the rows of a segment."""
        return self.name if self.rows is None else f"{self.name}[{self.rows[0]}:{self.rows[1]}]"


@dataclass(frozen=True)
class Budget:
    """The largest error that a plan may have.

    Attributes:
        error: in units of the metric.
        metric: see `controllers.error`.
    """

    error: float
    metric: str = "l2"

    def __post_init__(self) -> None:
        error.check_metric(self.metric)

    @classmethod
    def of(cls, layers: Sequence[Layer], alpha: float = 1.0, metric: str = "l2") -> Budget:
        """`alpha` times the error of the uniform plan (CGX 5: alpha E_4).

        Raises:
            ConfigError: alpha is not a number above 0, or an unknown metric.
        """
        if not (math.isfinite(alpha) and alpha > 0):
            raise ConfigError(f"alpha={alpha!r}: give a number above 0")
        return cls(alpha * plan_error(layers, [one.reference for one in layers], metric), metric)


def plan_error(layers: Sequence[Layer], choices: Sequence[int], metric: str) -> float:
    """The error of the plan that takes these choices, by index."""
    norms = _norms(layers, choices)
    return error.total(error.terms(norms, metric))


def plan_global_error(layers: Sequence[Layer], choices: Sequence[int]) -> float:
    """The global L2 norm of its error."""
    return error.global_l2(_norms(layers, choices))


def plan_nbytes(layers: Sequence[Layer], choices: Sequence[int]) -> int:
    """Its payload bytes per rank and step."""
    return sum(int(one.nbytes[c]) for one, c in zip(layers, choices, strict=True))


def plan_cost(layers: Sequence[Layer], choices: Sequence[int]) -> float:
    """Its bytes, each times its layer's weight."""
    pairs = zip(layers, choices, strict=True)
    return math.fsum(one.weight * int(one.nbytes[c]) for one, c in pairs)


def _norms(layers: Sequence[Layer], choices: Sequence[int]) -> np.ndarray:
    return np.array([one.errors[c] for one, c in zip(layers, choices, strict=True)], np.float64)
