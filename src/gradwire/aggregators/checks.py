"""Checks of aggregators' options; each error names the nearest legal value."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gradwire.aggregators.protocol import Aggregator
from gradwire.codecs.checks import SMALLEST
from gradwire.errors import ConfigError


def check_density(aggregator: Aggregator, density: object) -> None:
    """Raise ConfigError unless it is above 0 and at most 1."""
    what = f"{type(aggregator).__name__}: density={density!r} must be above 0 and at most 1"
    if not _is_number(density):
        raise ConfigError(f"{what}: give a number")
    assert isinstance(density, (int, float))
    if not 0 < density <= 1:
        near = 1 if density > 1 else SMALLEST
        raise ConfigError(f"{what}: use {near:g}" + ("" if density > 1 else " or more"))


def check_number(
    aggregator: Aggregator, option: str, least: float, below: float = math.inf
) -> None:
    """Raise ConfigError unless the option is a number of at least `least` and below `below`."""
    value = getattr(aggregator, option)
    bounds = f"at least {least:g}" + (f" and below {below:g}" if below < math.inf else "")
    if not _is_number(value) or not least <= value < below:
        near = f"use {least:g}" if _is_number(value) and value < least else "give such a number"
        raise ConfigError(
            f"{type(aggregator).__name__}: {option}={value!r} must be {bounds}: {near}"
        )


def check_positive(aggregator: Aggregator, option: str, otherwise: str) -> None:
    """Raise ConfigError, which also offers `otherwise`, unless the option is a finite number above
    0."""
    value = getattr(aggregator, option)
    if not _is_number(value) or not 0 < value < math.inf:
        raise ConfigError(
            f"{type(aggregator).__name__}: {option}={value!r} must be above 0 and finite: use "
            f"{SMALLEST:g} or more, or {otherwise}"
        )


def check_choice(aggregator: Aggregator, option: str, known: Iterable[str]) -> None:
    """Raise ConfigError unless the option is one of the known names."""
    value, names = getattr(aggregator, option), list(known)
    if value not in names:
        *others, last = map(repr, names)
        raise ConfigError(
            f"{type(aggregator).__name__}: {option}={value!r} must be {', '.join(others)} or {last}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
