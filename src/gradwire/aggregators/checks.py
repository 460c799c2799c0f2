"""Checks of aggregators' options; each error names the nearest legal value."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gradwire.aggregators.protocol import Aggregator
from gradwire.codecs.checks import SMALLEST, plain
from gradwire.errors import ConfigError


def check_positive(aggregator: Aggregator, option: str, otherwise: str) -> None:
    """Raise ConfigError, which also offers `otherwise`, unless the option is a finite number above
    0."""
    value = plain(getattr(aggregator, option))
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(
            f"{type(aggregator).__name__}: {option}={value!r} must be above 0 and finite: use "
            f"{SMALLEST:g} or more, or {otherwise}"
        )
    object.__setattr__(aggregator, option, float(value))


def check_choice(aggregator: Aggregator, option: str, known: Iterable[str]) -> None:
    """Raise ConfigError unless the option is one of the known names."""
    value, names = getattr(aggregator, option), list(known)
    if value not in names:
        *others, last = map(repr, names)
        raise ConfigError(
            f"{type(aggregator).__name__}: {option}={value!r} must be {', '.join(others)} or {last}"
        )
