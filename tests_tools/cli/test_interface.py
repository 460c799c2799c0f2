"""What scripts of users depend on: commands, options, help texts, exit codes, and keys of rows.

`interface.txt` has all of it; `pytest tests_tools/cli/test_interface.py --update-golden` writes it
anew, and its difference is a line of the changelog.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gradwire_tools.cli import program
from gradwire_tools.report.rows import KINDS

STORED = Path(__file__).with_name("interface.txt")


def commands(command: Any, words: tuple[str, ...] = ("gradwire",)) -> Iterator[str]:
    """Lines on a command, and on those below it: its help, and a line per option."""
    yield f"$ {' '.join(words)}"
    yield textwrap.indent((command.help or "").strip(), "  ")
    for parameter in command.params:
        names = " ".join([*parameter.opts, *parameter.secondary_opts])
        repeated = "..." if parameter.multiple or parameter.nargs == -1 else ""
        needed = "needed" if parameter.required else f"default {parameter.default!r}"
        said = " ".join((getattr(parameter, "help", None) or "").split())
        yield f"  {names}{repeated}: {needed}. {said}"
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


def exit_codes() -> Iterator[str]:
    for name in ("OK", "FAILED", "BAD_INPUT", "INTERRUPTED", "READER_LEFT", "TERMINATED"):
        yield f"exit code {name}: {getattr(program, name)}"


def keys() -> Iterator[str]:
    """A line per kind of rows: what tells it, and its keys, `key?` where rows may lack it."""
    for kind in KINDS:
        told = " ".join([*sorted(kind.marks - kind.values.keys()), *_given(kind.values)])
        yield f"rows of `gradwire {kind.name}` with {told}:"
        every = [f"{key}: {value.words}" for key, value in sorted(kind.keys.items())]
        every += [f"{key}?: {value.words}" for key, value in sorted(kind.more.items())]
        yield textwrap.indent("\n".join(every), "  ")


def _given(values: Any) -> list[str]:
    return [f"{key}={value}" for key, value in sorted(values.items())]


def test_the_command_line_is_as_it_was(pytestconfig: pytest.Config) -> None:
    root = typer.main.get_command(program.app)
    found = "\n".join([*commands(root), *exit_codes(), *keys()]) + "\n"
    if pytestconfig.getoption("update_golden"):
        STORED.write_text(found)
    assert found == STORED.read_text()
