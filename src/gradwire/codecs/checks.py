"""What codecs check their options with, so that all of them complain alike."""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.errors import ConfigError
from gradwire.lang.codec import Codec

MAX_BLOCK = 65536  # of g.blocks(n)


def whole(codec: Codec, option: str, least: int, most: int, given: str = "") -> None:
    """The option is an integer from `least` to `most`; `ConfigError` if not.

    `given`: the other option that narrows the range, if one does.
    """
    value = getattr(codec, option)
    if type(value) is not int or not least <= value <= most:
        because = f" for {given}={getattr(codec, given)!r}" if given else ""
        allowed = f"{least} to {most}" if least < most else str(least)
        raise _wrong(codec, option, allowed + because)


def number(codec: Codec, option: str, above: float, most: float) -> None:
    """The option is a number above `above` and at most `most`; `ConfigError` if not."""
    value = getattr(codec, option)
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
        raise _wrong(codec, option, f"above {above:g} and at most {most:g}")


def one_of(codec: Codec, option: str, allowed: Iterable[object]) -> None:
    """The option is one of these; `ConfigError` if not."""
    value, allowed = getattr(codec, option), tuple(allowed)
    if not any(type(value) is type(one) and value == one for one in allowed):
        *others, last = map(repr, allowed)
        raise _wrong(codec, option, f"{', '.join(others)} or {last}")


def _wrong(codec: Codec, option: str, allowed: str) -> ConfigError:
    value = getattr(codec, option)
    return ConfigError(f"{type(codec).__name__}: {option}={value!r} must be {allowed}")
