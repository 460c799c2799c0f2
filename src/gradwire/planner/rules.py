"""Rules: the user's choice of codecs by parameter name.

The first match wins (CGX 4.1's layer filters):
  1. `codecs`: a name pattern -> a codec or aggregator, or None for uncompressed;
  2. `exclude`: name patterns of parameters that are sent uncompressed;
  3. `include`: name patterns of parameters that are compressed, whatever their shape;
  4. parameters of fewer than two dimensions (biases, norms) are sent uncompressed, since they are
     small and sensitive; in outer synchronisation small matrices, too, and all of them in bf16;
  5. all others use the default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from gradwire.aggregators import Aggregator, Compressed, Dense, registry
from gradwire.codecs import Cast
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.lang.kernels import MEND, needs_compiling

_DENSE = Dense()


@dataclass(frozen=True)
class Rules:
    """How gradients are averaged, by parameter name.

    Attributes:
        default: the aggregator of rules 3 and 5.
        include, exclude: patterns.
        overrides: (pattern, aggregator) of rule 1.
        feedback: whether error feedback applies to all compressed parameters.
        plain: the aggregator of rule 4.
        smallest: values of a matrix to which rule 4 does not apply.
        uncompiled: why some rank has no compiled kernels, if codecs are replaced therefore.
    """

    default: Aggregator = _DENSE
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    overrides: tuple[tuple[str, Aggregator], ...] = ()
    feedback: bool = False
    plain: Aggregator = _DENSE
    smallest: int = 0
    uncompiled: str = ""

    def changed(self, options: Mapping[str, Any] | None = None, **arguments: Any) -> Rules:
        """These rules, changed by arguments of `attach`: codec, include, exclude, codecs or
        error_feedback.

        Args:
            options: of the codec; without a `codec`, of the present default.
            arguments: new `codecs` precede the present ones; other arguments replace.

        Raises:
            ConfigError: an argument has a wrong type, or a codec or an option is unknown.
        """
        options = dict(options or {})
        rules = self
        if "codec" in arguments:
            rules = replace(rules, default=registry.get(arguments["codec"], **options))
        elif options:
            rules = replace(rules, default=registry.changed(rules.default, options))
        include = _patterns("include", arguments.get("include", rules.include))
        exclude = _patterns("exclude", arguments.get("exclude", rules.exclude))
        codecs = arguments.get("codecs")
        if not (codecs is None or isinstance(codecs, Mapping)):
            raise ConfigError(f"codecs={codecs!r}: give a dict, name pattern -> codec, or None")
        if codecs:
            _patterns("codecs", codecs)
            given = {pattern: registry.get(method) for pattern, method in codecs.items()}
            kept = [pair for pair in rules.overrides if pair[0] not in given]
            rules = replace(rules, overrides=(*given.items(), *kept))
        feedback = arguments.get("error_feedback", rules.feedback)
        if not isinstance(feedback, bool):
            raise ConfigError(f"error_feedback={feedback!r}: use True or False")
        return replace(rules, include=include, exclude=exclude, feedback=feedback)

    def check(self, names: Iterable[tuple[str, ...]]) -> None:
        """Raise ConfigError unless every pattern matches a parameter; `names` has the names of
        each."""
        known = list(names)
        check_patterns("include", self.include, known)
        check_patterns("exclude", self.exclude, known)
        check_patterns("codecs", (pattern for pattern, _ in self.overrides), known)

    def choose(self, names: tuple[str, ...], shape: Sequence[int]) -> tuple[Aggregator, str]:
        """(the aggregator of a parameter, the argument that selects it or "" for rules 2, 4 and 5).

        Args:
            names: all names of the parameter; several if it is tied. One must match.
        """
        for pattern, aggregator in self.overrides:
            if matches(names, pattern):
                return aggregator, f"codecs: the pattern {pattern!r}"
        if any(matches(names, pattern) for pattern in self.exclude):
            return _DENSE, ""
        for pattern in self.include:
            if matches(names, pattern):
                return self.default, f"include: the pattern {pattern!r}"
        is_small = len(shape) < 2 or math.prod(shape) < self.smallest
        return (self.plain if is_small else self.default), ""

    def available(self, chosen: Aggregator, dtype: torch.dtype) -> Aggregator:
        """`chosen`; or, if its kernels would be interpreted, what averages a parameter of this
        dtype in 16 bits.

        Raises:
            ConfigError: an average of `chosen` includes momentum, which no other has.
        """
        if not self.uncompiled or not any(map(needs_compiling, chosen.encoders)):
            return chosen
        if chosen.replaces_momentum:
            raise ConfigError(
                f"{chosen} needs compiled kernels, and nothing stands in for it, since it replaces "
                f"the optimizer's momentum: {self.uncompiled}; {MEND}, or let it be slow: "
                'options=gw.Options(target="eager")'
            )
        codec = in_16_bits(dtype)
        return _DENSE if codec is None else Compressed(codec)


def in_16_bits(dtype: torch.dtype) -> Codec | None:
    """The codec that stores values of a dtype in 16 bits; None, if that is what they have."""
    return None if dtype.itemsize <= 2 else Cast("bf16")


def exactly(name: str) -> str:
    """The pattern that matches this name alone."""
    return re.sub(r"([*?[])", r"[\1]", name)


def matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def check_patterns(
    argument: str, patterns: Iterable[str], names: Sequence[tuple[str, ...]]
) -> None:
    """Raise ConfigError unless every pattern matches a parameter; `names` has the names of each."""
    for pattern in patterns:
        if not any(matches(of, pattern) for of in names):
            raise ConfigError(
                f"{argument}: the pattern {pattern!r} matches no parameter; the first names are "
                + ", ".join(of[0] for of in names[:4])
            )


def _patterns(argument: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ConfigError(f"{argument}={given!r}: give a list of patterns, not one string")
    if not isinstance(given, Collection) or not all(isinstance(p, str) for p in given):
        raise ConfigError(f"{argument}={given!r}: give a list of patterns, which are strings")
    return tuple(given)
