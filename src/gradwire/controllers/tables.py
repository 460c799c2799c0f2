"""Error tables: a layer's choices with their payload bytes and their errors (THESIS 4.5).

Bytes are those of the methods' own layouts, per rank and step, without headers. Errors are of the
averaged gradient, without error feedback (`controllers.error`, `controllers.losses`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from gradwire.aggregators import Aggregator
from gradwire.controllers.families import FLAT, Family
from gradwire.controllers.layer import Layer
from gradwire.controllers.losses import losses, norms
from gradwire.errors import ConfigError


def table(
    name: str,
    gradient: torch.Tensor,
    family: Family,
    weight: float = 1.0,
    dtype: torch.dtype = torch.float32,
    rows: tuple[int, int] | None = None,
) -> Layer:
    """The table of one layer.

    Args:
        gradient: the average over ranks and steps, in the parameter's shape or the segment's.
        family: of choices; a parameter of fewer than two dimensions has one, bf16.
        weight, rows: see `Layer`.
        dtype: of the values that are sent.

    Raises:
        ConfigError: a choice's error or size is unknown, or the weight is not above 0.
    """
    shape = tuple(gradient.shape)
    flat = len(shape) < 2
    methods: list[Aggregator] = [FLAT] if flat else family.methods(shape)
    reference = 0 if flat else methods.index(family.reference(shape))
    norm, top_norm = norms(gradient)
    return Layer(
        name, gradient.numel(), tuple(methods), nbytes(methods, shape, dtype),
        losses(gradient, methods), reference, norm, top_norm, weight, rows,
    )  # fmt: skip


def tables(
    named: Iterable[tuple[str, torch.Tensor]], family: Family, most: int | None = None
) -> list[Layer]:
    """The tables of a model's parameters, from their averaged gradients.

    Args:
        most: values of a layer; larger matrices are split into segments of rows.

    Raises:
        ConfigError: as `table`.
    """
    made = []
    for name, gradient in named:
        if most is None or gradient.dim() < 2 or gradient.numel() <= most:
            made.append(table(name, gradient, family))
            continue
        for rows in segments(gradient.shape, most):
            made.append(table(name, gradient[rows[0] : rows[1]], family, rows=rows))
    return made


def segments(shape: Sequence[int], most: int) -> list[tuple[int, int]]:
    """(first, end) of nearly equal segments of rows, of at most `most` values if a row has no more.

    Raises:
        ConfigError: `most` is below 1.
    """
    if most < 1:
        raise ConfigError(f"segments of at most {most} values: give 1 or more")
    rows = shape[0]
    each = max(1, most // max(1, int(np.prod(shape[1:]))))
    count = max(1, -(-rows // each))
    ends = [rows * i // count for i in range(count + 1)]
    return list(itertools.pairwise(ends))


def nbytes(
    methods: Sequence[Aggregator], shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> np.ndarray:
    """Payload bytes of each method per rank and step: int64[methods]."""
    return np.array([method.payload_bytes(shape, dtype) for method in methods], np.int64)
