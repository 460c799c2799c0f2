"""The errors that gradwire raises. Each message says what was wrong, where, and what to do."""

from __future__ import annotations

import copy
import inspect
import re
import typing
from difflib import get_close_matches

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

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


def again(error: E) -> E:
    """An error that may have been raised before, to raise again. One of gradwire's loses the
    frames of the times before, which say nothing, pile up and keep their tensors alive."""
    return error.with_traceback(None) if isinstance(error, GradwireError) else error


def nearest(given: object, known: Iterable[str], elsewhere: Mapping[str, str] = {}) -> str | None:
    """The name that was probably meant; None: none is near.

    Args:
        known: names.
        elsewhere: what other libraries call something -> the name here.
    """
    text = str(given).lower()
    by_text = {name.lower(): name for name in known} | dict(elsewhere)
    found = [text] if text in by_text else get_close_matches(text, by_text, 1, 0.7)
    return by_text[found[0]] if found else None


def use_one_of(given: object, known: Iterable[str], elsewhere: Mapping[str, str] = {}) -> str:
    """The end of an error about a name that is not one of `known`: what to do. See `nearest`."""
    known = list(known)
    near = nearest(given, known, elsewhere)
    listed = f"use one of {', '.join(known)}" if known else "it takes none"
    return listed if near is None else f"did you mean {near!r}? Else {listed}"


def check_keywords(
    call: Callable[..., object], keywords: Iterable[str], options: Collection[str]
) -> None:
    """Raise ConfigError if a keyword that `call` takes for an option of a codec is probably one of
    its own arguments, misspelt; `options` are those of all codecs."""
    own = [p.name for p in inspect.signature(call).parameters.values() if p.kind != p.VAR_KEYWORD]
    for keyword in keywords:
        if keyword not in options and (near := nearest(keyword, own)) is not None:
            raise ConfigError(
                f"{call.__name__} has no argument {keyword!r}: did you mean {near!r}?"
            )
