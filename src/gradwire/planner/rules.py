"""Rules: what a user says of a module's parameters, before these are known.

First match wins (CGX 4.1's layer filters):
  1. `codecs`: a pattern of names -> a codec or aggregator, or None for dense;
  2. `exclude`: patterns of names that go dense;
  3. `include`: patterns of names that are compressed, whatever their shape;
  4. parameters of fewer than two dimensions (biases, norms) go dense: they are small and sensitive;
  5. the rest goes through the default.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from gradwire.aggregators import Aggregator, Dense, registry
from gradwire.errors import ConfigError

_DENSE = Dense()


@dataclass(frozen=True)
class Rules:
    """How gradients are averaged, by name of their parameters.

    Attributes:
        default: of rules 3 and 5.
        include, exclude: patterns.
        overrides: patterns, with what rule 1 gives them.
        feedback: whether all that is compressed keeps what was not sent.
    """

    default: Aggregator = _DENSE
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    overrides: tuple[tuple[str, Aggregator], ...] = ()
    feedback: bool = False

    def changed(self, options: Mapping[str, Any] | None = None, **arguments: Any) -> Rules:
        """These rules with other arguments of `attach`: codec, include, exclude, codecs or
        error_feedback.

        Args:
            options: of the codec; without a `codec`, of the default that there is.
            arguments: `codecs` come before those that there are; the others replace.

        Raises:
            ConfigError: an argument of a wrong type, an unknown codec or option.
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
        """Raises ConfigError unless every pattern matches one of the parameters, whose names these
        are."""
        known = list(names)
        overridden = tuple(pattern for pattern, _ in self.overrides)
        for argument, patterns in (
            ("include", self.include), ("exclude", self.exclude), ("codecs", overridden)
        ):  # fmt: skip
            for pattern in patterns:
                if not any(matches(names, pattern) for names in known):
                    raise ConfigError(
                        f"{argument}: the pattern {pattern!r} matches no parameter; the first "
                        "names are " + ", ".join(names[0] for names in known[:4])
                    )

    def choose(self, names: tuple[str, ...], dimensions: int) -> tuple[Aggregator, str]:
        """(what averages a parameter, the argument that says so, in words; "" for other rules).

        Args:
            names: of one that is tied several; a pattern that matches one of them matches it.
        """
        for pattern, aggregator in self.overrides:
            if matches(names, pattern):
                return aggregator, f"codecs: the pattern {pattern!r}"
        if any(matches(names, pattern) for pattern in self.exclude):
            return _DENSE, ""
        for pattern in self.include:
            if matches(names, pattern):
                return self.default, f"include: the pattern {pattern!r}"
        return (self.default if dimensions >= 2 else _DENSE), ""


def check_coalesce_bytes(coalesce_bytes: object) -> None:
    """Raises ConfigError unless it is a number of bytes."""
    if type(coalesce_bytes) is not int or coalesce_bytes < 0:
        raise ConfigError(f"coalesce_bytes={coalesce_bytes!r}: give a number of bytes, 0 or more")


def matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _patterns(argument: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ConfigError(f"{argument}={given!r}: give a list of patterns, not one string")
    if not isinstance(given, Collection) or not all(isinstance(p, str) for p in given):
        raise ConfigError(f"{argument}={given!r}: give a list of patterns, which are strings")
    return tuple(given)
