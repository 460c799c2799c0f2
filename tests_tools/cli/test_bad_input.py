"""What holds of every command, found by walking the program, so that a new one is tested without an
edit here: it refuses bad input in one line, with exit code 2, before any work; and what scripts of
users depend on is as it was: commands, options, help texts, exit codes, and keys of rows.

`interface.txt` has all of these; `pytest tests_tools/cli/test_bad_input.py --update-golden` writes
it anew, and its difference is a line of the changelog.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import typer.main
from typer.models import ArgumentInfo

from command_line import refusal, run
from gradwire.lang.native import jit
from gradwire.planner import kernel_costs
from gradwire_tools.bench import interleaved
from gradwire_tools.bench.adapt.record import Recording
from gradwire_tools.cli import program
from gradwire_tools.cli.program import FAILED, app
from gradwire_tools.lab import Lab
from gradwire_tools.report.rows import KINDS

HUGE = "1000000000000000"
# of commands, by their names
ARGUMENTS = {"name": "qsgd", "command": "true", "files": "{rows}", "folders": "{recorded}"}
ARGUMENTS |= {"a": "{plan}", "b": "{plan}", "file": "{plan}"}
NEEDED = {  # without which other options mean nothing
    "doctor": ["--ranks", "2"],
    "bench record": ["--output", "recorded anew"],
}
BAD = {
    "integer": ["x", "1.5", "0", "-1", HUGE],
    "float": ["x", "nan", "inf", "-1"],
    "text": ["", "no-such-thing"],
    "file": ["{file}/below", "{folder}", "/proc/gradwire", "no such folder/file", "{locked}"],
}
RIGHT = {  # what looks wrong, and is not
    ("bench train", "--steps", HUGE),
    ("bench train", "--patience", HUGE),
    ("bench grid", "--steps", HUGE),
    ("codec build", "--jobs", HUGE),
    ("bench record", "--seed", "0"),
    ("bench record", "--seed", HUGE),
    ("bench record", "--output", "no such folder/file"),  # is made
    ("bench adapt", "--seed", "0"),
    ("sim", "--segments", HUGE),  # as many as there are blocks
    ("sim", "--per-node", HUGE),  # all ranks on one node
    ("codec build", "--output", "{folder}"),
    ("codec build", "--output", "no such folder/file"),  # is made
}


@dataclass(frozen=True)
class Verb:
    """A command by its words, the names of its arguments, and its options; those with a key of
    `BAD`, or "flag"."""

    words: str
    arguments: list[str]
    options: dict[str, str]

    def line(self, *options: str) -> list[str]:
        """The command with options, and what it cannot do without."""
        needed = NEEDED.get(self.words, [])
        return [*self.words.split(), *needed, *options, *(ARGUMENTS[a] for a in self.arguments)]


def verbs(program: typer.Typer = app, before: tuple[str, ...] = ()) -> Iterator[Verb]:
    for group in program.registered_groups:
        assert group.typer_instance is not None
        yield from verbs(group.typer_instance, (*before, str(group.name)))
    for command in program.registered_commands:
        assert command.callback is not None
        verb = Verb(" ".join((*before, str(command.name))), [], {})
        hints = typing.get_type_hints(command.callback, include_extras=True)
        del hints["return"]
        for name, hint in hints.items():
            if hint is typer.Context:
                continue
            plain, told = typing.get_args(hint)
            if isinstance(told, ArgumentInfo):
                verb.arguments.append(name)
                continue
            # In Annotated, Typer takes the first name for the default until it builds the command.
            given = [told.default, *(told.param_decls or ()), f"--{name.replace('_', '-')}"]
            spelt = next(one for one in given if isinstance(one, str) and one.startswith("--"))
            verb.options[spelt] = kind(plain, told.metavar)
        yield verb


def kind(hint: Any, metavar: str | None) -> str:
    for type_, name in ((bool, "flag"), (int, "integer"), (float, "float"), (Path, "file")):
        if hint is type_ or type_ in typing.get_args(hint):
            return name
    return "file" if metavar == "FILE" else "text"


def wrong(verb: Verb, folder: Path) -> Iterator[list[str]]:
    """Lines of a command that are to be refused; paths that this machine cannot make are left out.

    Root may write in a folder without permission, so for root none is locked.
    """
    paths = {name: folder / name for name in ("file", "rows", "recorded", "plan")}
    paths |= {"folder": folder, "locked": folder / "locked" / "file"}
    lacking = [] if Path("/proc/self").exists() else ["/proc/"]
    if os.access(folder / "locked", os.W_OK):
        lacking.append("{locked}")
    for option, of_kind in verb.options.items():
        if of_kind == "flag":
            continue
        for value in BAD[of_kind]:
            if (verb.words, option, value) not in RIGHT:
                line = verb.line(option, value)
                if not any(place in word for place in lacking for word in line):
                    yield [word.format(**paths) for word in line]
        yield [*verb.words.split(), option]
    yield [word.format(**paths) for word in verb.line("--no-such-option")]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test whose command starts a rank, times a kernel or compiles."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(Lab, "spawn", refuse)
    monkeypatch.setattr(interleaved, "medians", refuse)
    monkeypatch.setattr(kernel_costs, "kernel_curves", refuse)
    said = jit.run
    known: dict[str, Any] = {}  # of calls that compile nothing, such as for a compiler's version

    def once(command: Any, *given: Any) -> Any:
        if "-c" in command:
            refuse()
        key = repr((command, given))
        if key not in known:
            known[key] = said(command, *given)
        return known[key]

    monkeypatch.setattr(jit, "run", once)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that commands name."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "rows").write_text('{"a": 1}\n')
    (tmp_path / "plan").write_text('{"gradwire_plan": 1, "parameters": {}}')
    (tmp_path / "locked").mkdir(0o500)
    (tmp_path / "recorded").mkdir()
    weight = ("weight", (4, 4))
    made = Recording(tmp_path / "recorded", "gpt", {}, 0, 2, (0,), 1, (weight,), {})
    made.save(0, 0, [torch.ones(16), torch.ones(16)])
    made.write()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("verb", list(verbs()), ids=lambda verb: verb.words)
@pytest.mark.usefixtures("no_work")
def test_bad_input_is_one_line_and_leaves_no_file(verb: Verb, folder: Path) -> None:
    before, faults = sorted(folder.rglob("*")), []
    for line in wrong(verb, folder):
        complaint, fault = refusal(*line)
        if "No such option" in complaint and "--no-such-option" not in line:
            fault = f"{line}: the option is spelt otherwise"
        faults += [fault] if fault else []
        if sorted(folder.rglob("*")) != before:
            before = sorted(folder.rglob("*"))
            faults.append(f"{line}: leaves a file")
    assert not faults, "\n".join(faults)


def test_a_group_that_cannot_be_joined_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    ran = run("doctor")
    assert ran.code == FAILED
    assert "MASTER_" in ran.err.splitlines()[-1]


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


def every_command(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all below it, by their words."""
    yield words, command
    for name, one in getattr(command, "commands", {}).items():
        yield from every_command(one, *words, name)


def test_every_help_ends_in_an_example_that_can_be_run() -> None:
    """And its lines end where sentences of a paragraph do."""
    root = typer.main.get_command(program.app)
    every = dict(every_command(root))
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
    every = dict(every_command(typer.main.get_command(program.app)))
    assert listed == [{*first.split()}, every[words].commands.keys() - {*first.split()}]


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
