"""Commands run in this process: what they return, print and refuse; and calls that are refused.

Typer builds all commands anew for each call, which takes longer than a short command does; here
they are built once.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import typer.main

from gradwire.errors import ConfigError
from gradwire_tools.cli import program

built = cache(typer.main.get_command)


@dataclass(frozen=True)
class Ran:
    """A command's exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def run(*words: str) -> Ran:
    """Run a command of gradwire, given by its words."""
    out, err = io.StringIO(), io.StringIO()
    building = mock.patch.object(typer.main, "get_command", built)
    with building, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = program.run(words)
    return Ran(code, out.getvalue(), err.getvalue())


def rows_of(*words: str) -> list[dict[str, Any]]:
    """The rows that a command writes to standard output, where nothing else may be."""
    ran = run(*words, "--json", "-")
    assert ran.code == program.OK, ran
    return [json.loads(line) for line in ran.out.splitlines()]


def refusal(*words: str) -> tuple[str, str]:
    """The complaint of a command that is refused; and a fault, or "".

    It is a fault unless the complaint is one line, alone, with the exit code of bad input.
    """
    try:
        ran = run(*words)
    except Exception as error:  # the loop over commands goes on
        return "", f"{words}: {type(error).__name__}: {error}"
    lines = ran.err.splitlines()
    if ran.code != program.BAD_INPUT or ran.out or len(lines) != 1:
        return "", f"{words}: {ran}"
    return lines[0], "" if lines[0].startswith("gradwire: ") else f"{words}: {lines[0]}"


def wrongly_refused(mistakes: Iterable[tuple[list[str], str]], *more: str) -> list[str]:
    """Of (words, what the complaint says): the commands that are not refused so."""
    faults = []
    for words, expected in mistakes:
        complaint, fault = refusal(*words, *more)
        if not fault and expected not in complaint:
            fault = f"{words}: {complaint!r} does not say {expected!r}"
        faults += [fault] if fault else []
    return faults


def refused(call: Callable[[Any], object], cases: Iterable[tuple[Any, str]]) -> None:
    """Assert that `call` refuses every input with a ConfigError of its complaint, a pattern."""
    faults = []
    for given, complaint in cases:
        try:
            call(given)
        except ConfigError as error:
            if not re.search(complaint, str(error)):
                faults.append(f"{given!r}: {error}")
        else:
            faults.append(f"{given!r} is accepted")
    assert not faults, "\n".join(faults)
