"""A plan maps each parameter of a module to a codec, with or without error feedback.

The rules, first match wins (CGX 4.1's layer filters):
  1. `codecs`: a pattern of names -> a codec, a codec's name, or None for dense;
  2. `exclude`: patterns of names that go dense;
  3. `include`: patterns of names that are compressed, whatever their shape;
  4. parameters of fewer than two dimensions (biases, norms) go dense: they are small and sensitive;
  5. the rest goes through the default codec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from gradwire import codecs as codec_table
from gradwire.aggregators import Aggregator, Compressed, Dense, ErrorFeedback
from gradwire.collectives import DTYPES
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.partition import Spec


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is synchronised.

    Attributes:
        name, numel, dtype: of the parameter.
        codec: None sends it uncompressed.
        feedback: whether a residual keeps what was not sent.
        rotation: see gradwire.partition.
    """

    name: str
    numel: int
    dtype: torch.dtype
    codec: Codec | None
    feedback: bool
    rotation: int

    def __str__(self) -> str:
        how = "dense" if self.codec is None else str(self.codec)
        ending = ", error feedback" if self.feedback else ""
        return f"{self.name}: {self.numel} x {self.dtype}, {how}{ending}"

    def aggregator(self) -> Aggregator:
        """A fresh aggregator that does as planned."""
        if self.codec is None:
            return Dense()
        inner = Compressed(self.codec)
        return ErrorFeedback(inner) if self.feedback else inner


@dataclass(frozen=True)
class Plan:
    """Every parameter's plan, in the module's order."""

    parameters: tuple[ParameterPlan, ...]

    def describe(self) -> list[str]:
        """One line a parameter; ranks compare them."""
        return [str(p) for p in self.parameters]


def make_plan(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    codec: str | Codec | None,
    codec_options: Mapping[str, object],
    world_size: int,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    codecs: Mapping[str, str | Codec | None] | None = None,
    error_feedback: bool = False,
) -> Plan:
    """Apply the rules above to the parameters that require gradients.

    Raises:
        ConfigError: unknown codec or option, a pattern that matches nothing, a parameter that is no
            float, or no parameter at all.
    """
    default = None if codec is None else codec_table.get(codec, **codec_options)
    overrides = {
        pattern: None if chosen is None else codec_table.get(chosen)
        for pattern, chosen in (codecs or {}).items()
    }
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    if not trained:
        raise ConfigError(
            "the module has no parameter that requires a gradient: nothing to attach to"
        )
    for argument, patterns in (("include", include), ("exclude", exclude), ("codecs", overrides)):
        if isinstance(patterns, str):
            raise ConfigError(f"{argument}={patterns!r}: give a list of patterns, not one string")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in trained):
                raise ConfigError(
                    f"{argument}: the pattern {pattern!r} matches no parameter; the first names "
                    "are " + ", ".join(name for name, _ in trained[:4])
                )

    def choose(name: str, parameter: torch.Tensor) -> Codec | None:
        for pattern, chosen in overrides.items():
            if fnmatchcase(name, pattern):
                return chosen
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            return None
        if parameter.dim() >= 2 or any(fnmatchcase(name, pattern) for pattern in include):
            return default
        return None

    planned: list[ParameterPlan] = []
    blocks = 0
    for name, parameter in trained:
        if parameter.dtype not in DTYPES:
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}: "
                "gradwire synchronises float32, float16 and bfloat16"
            )
        chosen = choose(name, parameter)
        feedback = error_feedback and chosen is not None
        # Chunks are whole blocks; going on where the last parameter's remainder ended spreads
        # them evenly.
        rotation = blocks % world_size
        one = ParameterPlan(name, parameter.numel(), parameter.dtype, chosen, feedback, rotation)
        blocks += Spec(name, one.numel, one.dtype, chosen or codec_table.Identity()).blocks
        planned.append(one)
    return Plan(tuple(planned))
