"""A plan maps each parameter of a module to a codec, with or without error feedback.

The rules, first match wins (CGX 4.1's layer filters):
  1. `codecs`: a pattern of names -> a codec, a codec's name, or None for dense;
  2. `exclude`: patterns of names that go dense;
  3. `include`: patterns of names that are compressed, whatever their shape;
  4. parameters of fewer than two dimensions (biases, norms) go dense: they are small and sensitive;
  5. the rest goes through the default codec.

Codecs take fp32, fp16 and bf16. A parameter of another dtype (float64, complex) is averaged by
torch's own all-reduce, beside the others; rules 1 and 3 must not give it a codec.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
        feedback: whether a residual keeps what was not sent; one rank alone needs none.
        rotation: see gradwire.partition.
    """

    name: str
    numel: int
    dtype: torch.dtype
    codec: Codec | None
    feedback: bool
    rotation: int

    @property
    def by_torch(self) -> bool:
        """Whether torch's own all-reduce averages it: no codec takes its dtype."""
        return self.dtype not in DTYPES

    @property
    def how(self) -> str:
        """The codec as text, or "dense", or "torch's all-reduce"."""
        if self.by_torch:
            return "torch's all-reduce"
        return "dense" if self.codec is None else str(self.codec)

    def __str__(self) -> str:
        ending = ", error feedback" if self.feedback else ""
        return f"{self.name}: {self.numel} x {self.dtype}, {self.how}{ending}"

    def facts(self) -> dict[str, str | int | bool]:
        """What a saved state must share with the plan that loads it."""
        return {
            "numel": self.numel,
            "dtype": str(self.dtype),
            "codec": self.how,
            "feedback": self.feedback,
        }

    def aggregator(self) -> Aggregator:
        """A fresh aggregator that does as planned; of no use to what goes by torch."""
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
    """Apply the rules above to the parameters that are synchronised.

    Args:
        named_parameters: a tied parameter comes with each of its names. A pattern that matches one
            of them matches the parameter; the plan knows it by the first.

    Raises:
        ConfigError: an argument of a wrong type, unknown codec or option, a pattern that matches
            nothing, one that gives a codec to a dtype that codecs do not take, or no parameter at
            all.
    """
    if not isinstance(error_feedback, bool):
        raise ConfigError(f"error_feedback={error_feedback!r}: use True or False")
    if not (codecs is None or isinstance(codecs, Mapping)):
        raise ConfigError(f"codecs={codecs!r}: give a dict, name pattern -> codec, or None")
    if codec is None and codec_options:
        raise ConfigError(
            f"options {', '.join(codec_options)} go with a codec's name, not with codec=None"
        )
    default = None if codec is None else codec_table.get(codec, **codec_options)
    overrides = {
        pattern: None if chosen is None else codec_table.get(chosen)
        for pattern, chosen in (codecs or {}).items()
    }
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in named_parameters:
        names.setdefault(parameter, []).append(name)
    if not names:
        raise ConfigError(
            "the module has no parameter that requires a gradient: nothing to attach to"
        )
    for argument, patterns in (("include", include), ("exclude", exclude), ("codecs", overrides)):
        if isinstance(patterns, str):
            raise ConfigError(f"{argument}={patterns!r}: give a list of patterns, not one string")
        if not isinstance(patterns, Collection) or not all(isinstance(p, str) for p in patterns):
            raise ConfigError(
                f"{argument}={patterns!r}: give a list of patterns, which are strings"
            )
        for pattern in patterns:
            if not any(_matches(known, pattern) for known in names.values()):
                raise ConfigError(
                    f"{argument}: the pattern {pattern!r} matches no parameter; the first names "
                    "are " + ", ".join(known[0] for known in list(names.values())[:4])
                )

    def choose(parameter: torch.Tensor) -> Codec | None:
        known, possible = names[parameter], parameter.dtype in DTYPES
        for pattern, chosen in overrides.items():
            if _matches(known, pattern):
                if not (possible or chosen is None):
                    remedy = (
                        f"give it None, before that pattern: codecs={{{known[0]!r}: None, ...}}"
                    )
                    raise _no_codec(f"codecs: the pattern {pattern!r}", known[0], parameter, remedy)
                return chosen
        if any(_matches(known, pattern) for pattern in exclude):
            return None
        for pattern in include:
            if _matches(known, pattern):
                if not (possible or default is None):
                    remedy = f"leave it out: exclude=[{known[0]!r}]"
                    raise _no_codec(
                        f"include: the pattern {pattern!r}", known[0], parameter, remedy
                    )
                return default
        return default if parameter.dim() >= 2 and possible else None

    planned: list[ParameterPlan] = []
    blocks = 0
    for parameter, (name, *_) in names.items():
        chosen = choose(parameter)
        # One rank alone encodes nothing, so there is no error to keep.
        feedback = error_feedback and chosen is not None and world_size > 1
        # Chunks are whole blocks; going on where the last parameter's remainder ended spreads
        # them evenly.
        rotation = blocks % world_size
        one = ParameterPlan(name, parameter.numel(), parameter.dtype, chosen, feedback, rotation)
        if not one.by_torch:
            blocks += Spec(name, one.numel, one.dtype, chosen or codec_table.Identity()).blocks
        planned.append(one)
    return Plan(tuple(planned))


def _no_codec(what: str, name: str, parameter: torch.Tensor, remedy: str) -> ConfigError:
    return ConfigError(
        f"{what} asks to compress parameter {name}, which is {parameter.dtype}: codecs take "
        f"float32, float16 and bfloat16, and torch's own all-reduce averages the rest; {remedy}"
    )


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
