"""Options written as text: OPTION=VALUE, in methods' names and in the environment."""

from __future__ import annotations


def value(text: str) -> int | float | bool | str:
    """What an option's value stands for: true, false (also capitalised), a number, or a word."""
    if text in ("true", "false", "True", "False"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
