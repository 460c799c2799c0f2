"""The one grammar for a codec or an aggregator with its options, as text.

    NAME                    qsgd
    NAME:OPTION=VALUE:...   qsgd:bits=4:block=64, topk:density=0.05, powersgd:rank=4

Options may be separated by commas, too, where the text is not itself part of a list.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any

from gradwire.errors import ConfigError

Value = int | float | bool | str


def parse(text: str) -> tuple[str, dict[str, Value]]:
    """Split `text` into the name and its options.

    Raises:
        ConfigError: no name, a part that is not OPTION=VALUE, or an option given twice.
    """
    name, colon, rest = (piece.strip() for piece in text.partition(":"))
    if not name or (colon and not rest):
        raise ConfigError(f"{text!r}: expected NAME or NAME:OPTION=VALUE:...")
    options: dict[str, Value] = {}
    for part in re.split("[:,]", rest) if rest else []:
        option, equals, found = (piece.strip() for piece in part.partition("="))
        if not (option and equals and found):
            raise ConfigError(f"{text!r}: expected OPTION=VALUE, found {part!r}")
        if option in options:
            raise ConfigError(f"{text!r}: option {option!r} is given twice")
        options[option] = value(found)
    return name, options


def spelled(
    name: str, made: Any, always: Collection[str] | None = None, settled: Collection[str] = ()
) -> str:
    """The text of what has a name: options of `always`, or else the first, and those that are not
    its defaults, without the settled ones."""
    fields = [f for f in dataclasses.fields(made) if f.name not in settled]
    always = [f.name for f in fields[:1]] if always is None else always
    parts = [name]
    for f in fields:
        v = getattr(made, f.name)
        if f.name in always or v != f.default:
            parts.append(f"{f.name}={str(v).lower() if isinstance(v, bool) else v}")
    return ":".join(parts)


def merged(text: str, parsed: dict[str, Value], keywords: dict[str, object]) -> dict[str, object]:
    """The options of a name's text and of keywords; raises ConfigError for one given in both."""
    twice = next((option for option in keywords if option in parsed), None)
    if twice is not None:
        raise ConfigError(f"option {twice!r} is given twice: in {text!r} and as a keyword")
    return {**parsed, **keywords}


def value(text: str) -> Value:
    """The value that `text` spells: true or false (also capitalised), a number, or a word."""
    if text in ("true", "false", "True", "False"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
