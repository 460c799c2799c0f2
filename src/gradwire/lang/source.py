"""Source locations in a codec's file, and the error that reports them."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from gradwire.errors import ConfigError

_LANG = str(Path(__file__).parent)


class LanguageError(ConfigError):
    """A codec is not well formed.

    Attributes:
        location: "file:line" of the error in the codec's source.
        problem: the message without it.
    """

    def __init__(self, location: str, problem: str) -> None:
        super().__init__(f"{location}: {problem}" if location else problem)
        self.location, self.problem = location, problem

    def __reduce__(self) -> tuple[type[LanguageError], tuple[str, str]]:
        # an exception is unpickled from its text alone, which is one argument too few
        return type(self), (self.location, self.problem)


def here() -> str:
    """ "file:line" of the nearest caller outside the language and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _outside(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(error: BaseException, codec: object) -> str:
    """ "file:line" of the last line that an error passed in a file of a codec's methods, or ""."""
    methods = inspect.getmembers(type(codec), inspect.isfunction)
    files = {inspect.unwrap(method).__code__.co_filename for _, method in methods}
    frames = [(f, line) for f, line in walk_tb(error.__traceback__) if _outside(f)]
    lines = [f"{f.f_code.co_filename}:{n}" for f, n in frames if f.f_code.co_filename in files]
    return lines[-1] if lines else ""


def _outside(frame: FrameType) -> bool:
    torchs = str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"
    return not torchs and not frame.f_code.co_filename.startswith(_LANG)


def mistake(problem: str) -> LanguageError:
    """The error of the nearest caller outside the language and torch."""
    return LanguageError(here(), problem)
