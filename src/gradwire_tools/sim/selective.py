"""Which gradients of a model are worth compressing, and in how many partitions (HIPRESS 3.3).

Each gradient by itself, by Eqs. 1 and 2: `send` is the latency and the bytes over the rate of a
link, `encode` and `decode` are a machine's measured curves. Uncompressed means bf16. The formulas
know nothing of what other gradients hide; gradwire_tools.sim.choice does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.lang import Codec, layout
from gradwire_tools.sim.choice import HALF, Situation
from gradwire_tools.sim.costs import STRATEGIES, Curve, Decision, Strategy, decide, two_level

_FP32, _FP16 = 4, 2  # bytes of a value


@dataclass(frozen=True)
class GradientDecision:
    """What is best for gradients of one size.

    Attributes:
        numel: values of each.
        count: gradients of this size.
        decision: of one of them.
    """

    numel: int
    count: int
    decision: Decision


def decisions(
    where: Situation, codec: Codec, algorithm: str, candidates: Sequence[int] = ()
) -> list[GradientDecision]:
    """A decision for every size of matrices, from the smallest to the largest.

    Args:
        algorithm: a name of `gradwire.algorithms.REGISTRY`.
        candidates: numbers of partitions; 1 to the number of ranks unless given.

    Raises:
        ConfigError: the codec has no curves.
    """
    strategy = strategy_of(algorithm, where.per_node)
    sizes = Counter(math.prod(shape) for shape in where.shapes if len(shape) > 1)
    found = []
    for numel, count in sorted(sizes.items()):
        # In bytes of fp32, as the codec takes them; what is sent uncompressed has half of them.
        half = _FP16 / _FP32
        share = layout(codec, torch.float32).nbytes(numel) / (_FP32 * numel)
        plain, coded = (
            decide(
                strategy, where.ranks, _FP32 * numel, left, _send(where),
                _kernel(where, one, "encode", _FP32), _kernel(where, one, "decode", _FP32 * left),
                candidates,
            )
            for one, left in ((HALF, half), (codec, share))
        )  # fmt: skip
        of_half, of_codec = plain.compressed_seconds, coded.compressed_seconds
        pays = of_codec < of_half
        parts = (coded if pays else plain).partitions
        best = Decision(pays, parts, min(of_half, of_codec), of_half, of_codec)
        found.append(GradientDecision(numel, count, best))
    return found


def strategy_of(algorithm: str, per_node: int) -> Strategy:
    """The coefficients of one of our algorithms."""
    if algorithm == "hierarchical":
        return two_level(per_node)
    return STRATEGIES["colocated" if algorithm == "parameter_server" else algorithm]


def _send(where: Situation) -> Curve:
    """The seconds of a message, by its bytes."""
    link = where.curves.link
    rate = where.net.rate_bits_per_s / 8 * link.goodput
    fixed = where.net.latency_s + link.overhead
    per_byte = (0.0 if math.isinf(rate) else 1 / rate) + link.stack
    return lambda nbytes: fixed + nbytes * per_byte


def _kernel(where: Situation, codec: Codec, form: str, bytes_per_value: float) -> Curve:
    """The seconds of a kernel, by the bytes that it reads."""
    return lambda nbytes: where.curves.seconds(codec, form, nbytes / bytes_per_value, 0)
