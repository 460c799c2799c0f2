"""What scripts of users depend on: commands, options, help texts, exit codes, and keys of rows.

`interface.txt` has all of it; `pytest tests_tools/cli/test_interface.py --update-golden` writes it
anew, and its difference is a line of the changelog.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from command_line import run
from gradwire_tools.cli import program
from gradwire_tools.report.rows import KINDS

STORED = Path(__file__).with_name("interface.txt")


def commands(command: Any, words: tuple[str, ...] = ("gradwire",)) -> Iterator[str]:
    """Lines on a command, and on those below it: its help, and a line per option."""
    yield f"$ {' '.join(words)}"
    yield textwrap.indent(f"{command.help}\n{command.epilog}", "  ")
    for parameter in command.params:
        names = " ".join([*parameter.opts, *parameter.secondary_opts])
        repeated = "..." if parameter.multiple or parameter.nargs == -1 else ""
        needed = "needed" if parameter.required else f"default {parameter.default!r}"
        said = " ".join((getattr(parameter, "help", None) or "").split())
        yield f"  {names}{repeated}: {needed}. {said}"
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


def below(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all below it, by their words."""
    yield words, command
    for name, one in getattr(command, "commands", {}).items():
        yield from below(one, (*words, name))


def test_every_help_ends_in_an_example_that_can_be_run() -> None:
    """And its lines end where sentences of a paragraph do."""
    root = typer.main.get_command(program.app)
    every = dict(below(root))
    assert len(every) > 20
    for words, command in every.items():
        said = command.epilog or ""
        assert said.startswith(" ".join(["Example: gradwire", *words])), words
        assert run(*words, "--help").out.split()[-len(said.split()) :] == said.split()
        assert len(said) < 80
        assert not re.search(r"[^\n]\n[^\n]", command.help), words
        given, named = shlex.split(said)[2:], root
        while given and given[0] in getattr(named, "commands", {}):
            named = named.commands[given.pop(0)]
        assert given or words
        named.make_context("it", given)


@pytest.mark.parametrize(
    ("words", "first"),
    [((), "doctor demo lab plan report codec"), (("bench",), "collectives kernels train")],
)
def test_help_shows_first_what_users_need(words: tuple[str, ...], first: str) -> None:
    users, developers = run(*words, "--help").out.split("For developers")
    listed = [
        {*re.findall(r"^\S (\w+)  ", part, re.MULTILINE)}
        for part in (users.split("Commands")[1], developers)
    ]
    (root,) = [one for path, one in below(typer.main.get_command(program.app)) if path == words]
    assert listed == [{*first.split()}, root.commands.keys() - {*first.split()}]


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
