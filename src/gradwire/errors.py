"""The errors that gradwire raises. Each message says what was wrong, where, and what to do."""

from __future__ import annotations

import copy
import re
import typing

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

E = typing.TypeVar("E", bound=BaseException)


class GradwireError(Exception):
    """The base class of all gradwire errors."""

    _in_global_ranks = False
    _origin: tuple[int, str] | None = None  # the rank in the whole job that failed, and its text


class ConfigError(GradwireError, ValueError):
    """The user can fix this: an unknown codec, a bad option, ranks that disagree on a plan."""


class CodecError(GradwireError):
    """A payload is not what the plan says: foreign, truncated or corrupted."""


class TransportError(GradwireError):
    """A peer or a link failed.

    Attributes:
        peer: the rank held responsible, by its number within the process group, whose message
            has the number in the whole job; None if unknown.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


_RANKS = re.compile(r"\b([Rr]anks? )(\d+(?:(?:, | and )\d+)*)")


def in_global_ranks(error: E, ranks: Sequence[int] | None) -> E:
    """An error of a process group as users see it: with the ranks' numbers in the whole job.

    Args:
        ranks: of the group's members, in its order; None: they are equal.
    """
    if ranks is None or not isinstance(error, GradwireError) or error._in_global_ranks:
        return error
    shown = copy.copy(error).with_traceback(error.__traceback__)
    shown.args = (text_in_global_ranks(str(error), ranks),)
    return already_global(shown)


def already_global(error: E) -> E:
    """An error whose text has the numbers in the whole job."""
    if isinstance(error, GradwireError):
        error._in_global_ranks = True
    return error


def text_in_global_ranks(text: str, ranks: Sequence[int] | None) -> str:
    """As `in_global_ranks`, of a text."""
    if ranks is None:
        return text

    def renamed(number: re.Match[str]) -> str:
        rank = int(number[0])
        return str(ranks[rank] if rank < len(ranks) else rank)

    return _RANKS.sub(lambda found: found[1] + re.sub(r"\d+", renamed, found[2]), text)
