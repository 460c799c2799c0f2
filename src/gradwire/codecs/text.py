"""Options written as text: OPTION=VALUE, in method names and environment variables."""

from __future__ import annotations


def value(text: str) -> int | float | bool | str:
    """Parse an option's value: true or false (also capitalised), a number, or a word."""
    if text in ("true", "false", "True", "False"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
