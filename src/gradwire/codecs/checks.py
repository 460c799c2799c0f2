"""Checks of options, with uniform error messages.

What passes is stored as a plain int, float, bool or str, since ranks compare options by their text:
TopK(1), TopK(1.0) and TopK(np.float64(1)) are the same codec. Errors name a class, or its `called`.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable
from typing import Any

from gradwire.errors import ConfigError

MAX_BLOCK = 65536  # the largest n of g.blocks(n)
SMALLEST = 1e-6  # the density that is named where one of 0 or less was given


def plain(value: object) -> Any:
    """The Python value of a scalar of numpy or torch; anything else as it is."""
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except RuntimeError:  # of a tensor without memory, on "meta"
        return value


def integer(
    codec: object, option: str, least: int, most: int | None = None, given: str = ""
) -> None:
    """Raise `ConfigError` unless the option is an integer from `least` to `most`, if that is given.

    `given` names another option that narrows the range, if there is one.
    """
    value = plain(getattr(codec, option))
    if type(value) is not int or value < least or (most is not None and value > most):
        because = f" for {given}={getattr(codec, given)!r}" if given else ""
        one = str(least) if most == least else f"{least} to {most}"
        allowed = f"at least {least}" if most is None else one
        if type(value) is not int:
            allowed = f"a whole number, {allowed}"
        raise _wrong(codec, option, allowed + because)
    object.__setattr__(codec, option, value)


def number(
    codec: object,
    option: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Raise `ConfigError` unless the option is a number within the given bounds."""
    value = plain(getattr(codec, option))
    if type(value) is int and abs(value) > sys.float_info.max:
        value = math.inf if value > 0 else -math.inf
    bounds = [
        (words, bound, holds)
        for words, bound, holds in (
            ("above", above, operator.gt),
            ("at least", least, operator.ge),
            ("below", below, operator.lt),
            ("at most", most, operator.le),
        )
        if bound is not None
    ]
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not all(holds(value, bound) for _, bound, holds in bounds):
        allowed = " and ".join(f"{words} {bound:g}" for words, bound, _ in bounds)
        raise _wrong(codec, option, f"{allowed}: {_nearest(value, above, least, below, most)}")
    object.__setattr__(codec, option, float(value))


def _nearest(
    value: object,
    above: float | None,
    least: float | None,
    below: float | None,
    most: float | None,
) -> str:
    """What to give in place of a value that is out of bounds, or no number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        return "give a number"
    if least is not None and value < least:
        return f"use {least:g} or more"
    if above is not None and value <= above:
        return f"use {above + SMALLEST:g} or more" if above < 1 else f"give more than {above:g}"
    return f"use {most:g}" if most is not None else f"give a number below {below:g}"


def one_of(codec: object, option: str, allowed: Iterable[object]) -> None:
    """Raise `ConfigError` unless the option is one of the allowed values."""
    value, allowed = plain(getattr(codec, option)), tuple(allowed)
    if not any(type(value) is type(one) and value == one for one in allowed):
        *others, last = map(repr, allowed)
        raise _wrong(codec, option, f"{', '.join(others)} or {last}")
    object.__setattr__(codec, option, value)


def _wrong(codec: object, option: str, allowed: str) -> ConfigError:
    shown = " ".join(repr(getattr(codec, option)).split())  # of a parameter, two lines
    name = getattr(codec, "called", type(codec).__name__)
    return ConfigError(f"{name}: {option}={shown} must be {allowed}")
