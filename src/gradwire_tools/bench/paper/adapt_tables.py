"""The tables that `gradwire bench adapt` decides on: of recorded gradients, and seeded ones.

Seeded tables have the shapes of a model (`sim.models`), and errors from formulas:

    norm of a layer's gradient    exp(sigma z), z standard normal, whatever its size
    values                        Laplace, so that topk leaves sqrt(1 - d (t^2 + 2 t + 2) / 2) of
                                  the norm at density d, t = -ln d; qsgd leaves what the mean
                                  square range of a block of such values gives
    singular values               proportional to 1 / i

Gradients recorded of `gpt` and `image` are close to that: at density 0.01 topk leaves 0.6 to 0.93
of most layers' norms (Laplace: 0.92), and rank 4 leaves 0.12 to 0.62 (1 / i: 0.37).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

from gradwire.aggregators import Aggregator, Compressed, Dense, PowerSGD
from gradwire.codecs import QSGD, TopK
from gradwire.controllers import Family, Layer, tables
from gradwire.controllers.families import FLAT
from gradwire.controllers.tables import nbytes
from gradwire_tools.bench.adapt.record import Named
from gradwire_tools.sim import models

_BLOCKS = 4096  # of Laplace values, from which mean square ranges are taken
_BF16 = 2**-9 / math.sqrt(3)  # relative error of rounding, root mean square, about
_TOP = math.sqrt(0.01 * (math.log(100) ** 2 + 2 * math.log(100) + 2) / 2)  # of the norm, in 1 %


def recorded_layers(named: Named, family: Family) -> list[Layer]:
    """The tables of averaged gradients, by one thread: small products are slower on several, by
    far on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tables(named, family)
    finally:
        torch.set_num_threads(before)


def seeded_layers(model: str, sigma: float, family: Family, seed: int) -> list[Layer]:
    """The tables of a model's shapes; see above.

    Raises:
        ConfigError: an unknown model.
    """
    shapes = models.shapes(model)
    norms = np.exp(sigma * np.random.default_rng(seed).standard_normal(len(shapes)))
    made = []
    for i, (shape, norm) in enumerate(zip(shapes, norms.tolist(), strict=True)):
        flat = len(shape) < 2
        methods: list[Aggregator] = [FLAT] if flat else family.methods(shape)
        reference = 0 if flat else methods.index(family.reference(shape))
        errors = norm * np.array([_left(method, shape) for method in methods])
        made.append(
            Layer(
                f"{i}", math.prod(shape), tuple(methods), nbytes(methods, shape), errors, reference,
                norm, norm * _TOP,
            )
        )  # fmt: skip
    return made


def _left(method: Aggregator, shape: tuple[int, ...]) -> float:
    """The error of a gradient of norm 1."""
    if isinstance(method, PowerSGD):
        side = min(shape[0], math.prod(shape[1:]))
        squares = _spectrum(side)
        return math.sqrt(max(0.0, 1 - float(squares[min(method.rank, side) - 1])))
    if isinstance(method, Dense):
        return 0.0 if method.dtype is None else _BF16
    assert isinstance(method, Compressed), method
    codec = method.codec
    if isinstance(codec, TopK):
        t = -math.log(codec.density)
        return math.sqrt(max(0.0, 1 - codec.density * (t * t + 2 * t + 2) / 2))
    assert isinstance(codec, QSGD), codec
    return math.sqrt(_square_range(codec.block) / 12) / codec.top


@cache
def _spectrum(side: int) -> np.ndarray:
    """The share of the norm's square in the first singular values, summed up: float64[side]."""
    squares = 1 / np.arange(1, side + 1, dtype=np.float64) ** 2
    shares: np.ndarray = np.cumsum(squares) / squares.sum()
    return shares


@cache
def _square_range(block: int) -> float:
    """The mean square range of blocks of Laplace values of variance 1."""
    count = max(16, _BLOCKS * 128 // block)
    values = np.random.default_rng(0).laplace(scale=math.sqrt(0.5), size=(count, block))
    return float((np.ptp(values, axis=1) ** 2).mean())
