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

    # For errors that pass from one process group to another:
    _in_global_ranks = False  # the text has the ranks' numbers in the whole job
    _responsible: int | None = None  # the peer's number there, once the text has such numbers
    _origin: tuple[int, str] | None = None  # of a peer that has told of its failure; its text


class ConfigError(GradwireError, ValueError):
    """The user can fix this: an unknown codec, a bad option, ranks that disagree on a plan."""


class CodecError(GradwireError):
    """A payload is not what the plan says: foreign, truncated or corrupted."""


class TransportError(GradwireError):
    """A peer or a link failed.

    Attributes:
        peer: the rank held responsible, by its number within the process group whose operation
            raises this; None if unknown, or if it is not in this group. The message has its number
            in the whole job.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


_SAME = range(1 << 31)  # the numbers of a group's ranks, where they are those in the whole job
_RANKS = re.compile(r"\b([Rr]anks? )(\d+(?:(?:, | and )\d+)*)")


def in_global_ranks(error: E, ranks: Sequence[int] | None) -> E:
    """An error as users of a process group see it: its text has the ranks' numbers in the whole
    job, its `peer` is the number in the group.

    An error that another group has shown keeps its text.

    Args:
        error: of this group, or of another in which it was shown.
        ranks: of the group's members, in its order; None: they are equal.
    """
    if not isinstance(error, GradwireError):
        return error
    if not error._in_global_ranks:
        text = text_in_global_ranks(str(error), ranks)
        return already_global(error if text == str(error) else _copied(error, args=(text,)), ranks)
    if isinstance(error, TransportError) and error._responsible is not None:
        numbers = _SAME if ranks is None else ranks
        known = error._responsible in numbers
        peer = numbers.index(error._responsible) if known else None
        return error if peer == error.peer else _copied(error, peer=peer)
    return error


def already_global(error: E, ranks: Sequence[int] | None) -> E:
    """An error whose text has the numbers in the whole job, and whose `peer` is one of `ranks`."""
    if isinstance(error, GradwireError):
        error._in_global_ranks = True
        if isinstance(error, TransportError) and error.peer is not None:
            error._responsible = (_SAME if ranks is None else ranks)[error.peer]
    return error


def _copied(error: E, **changed: object) -> E:
    copied = copy.copy(error).with_traceback(error.__traceback__)
    for name, value in changed.items():
        setattr(copied, name, value)
    return copied


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


def of_file(error: Exception) -> str:
    """An error's text; of a file that cannot be opened, or a folder that cannot be made, in words
    that name it."""
    if isinstance(error, FileNotFoundError):
        return f"there is no file {error.filename}"
    if isinstance(error, IsADirectoryError):
        return f"{error.filename} is a directory"
    if isinstance(error, FileExistsError):
        return f"{error.filename} is a file, not a folder"
    return str(error)


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
    near = None if near == given else near  # it is known, but not here
    listed = f"use one of {', '.join(known)}" if known else "it takes none"
    return listed if near is None else f"did you mean {near!r}? Else {listed}"


def check_keywords(
    call: Callable[..., object],
    keywords: Iterable[str],
    options: Collection[str],
    others: Iterable[str] = (),
) -> None:
    """Raise ConfigError if a keyword that `call` takes for an option of a codec is probably one of
    its own arguments, or of `others`, misspelt; `options` are those of all codecs."""
    named = inspect.signature(call).parameters.values()
    own = [*(p.name for p in named if p.kind != p.VAR_KEYWORD), *others]
    for keyword in keywords:
        if keyword not in options and (near := nearest(keyword, own)) is not None:
            raise ConfigError(
                f"{call.__name__} has no argument {keyword!r}: did you mean {near!r}?"
            )
