"""What holds for every page; each rule yields what is wrong, with page and line.

1. A link to a file resolves, its anchor too. So does a path such as docs/laboratory/lab.md in a
   docstring, a comment or a message. What a page includes of a file is there, in its order.
2. A command that is shown exists: a gradwire command with the options shown, a target of make, an
   extra of `pip install gradwire[...]`, a script with a folder in its path.
3. A figure (a number with a unit of time, speed, share or ratio, outside blocks and backticks)
   stands in a section that names, in backticks or in a block, the command that prints it; or, where
   nothing is measured and the figure is fixed, the file in src, tests, tests_tools, scripts or
   examples that fixes it. A section ends where the next heading begins. Internals and the changelog
   are free.
4. A page of docs says at its start what the reader can do after it.

That every Python block runs is for blocks.py, that commands of pages for users run for commands.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pages import ROOT, Command, Page

import command_line
from gradwire_tools.cli.program import app

FIRST = "After this page you"


def links(page: Page) -> Iterator[str]:
    """Rule 1."""
    for target in page.links:
        name, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (page.path.parent / name).resolve() if name else page.path
        if not file.exists():
            yield f"{page.path}: a link to {target}: no such file"
        elif anchor and anchor not in Page.read(file).anchors:
            yield f"{page.path}: a link to {target}: {file.name} has no such heading"


def paths(file: Page) -> Iterator[str]:
    """Rule 1, of a source file."""
    for found in re.findall(r"docs/[\w/-]+\.(?:md|svg)", file.text):
        if not (ROOT / found).exists():
            yield f"{file.path}: {found}: no such page"


def includes(page: Page) -> Iterator[str]:
    """Rule 1, of code that Sphinx takes from a file."""
    for block in page.blocks:
        if block.kind == "{literalinclude}":
            file = page.path.parent / block.words[0]
            text = file.read_text("utf-8") if file.exists() else ""
            for mark in re.findall(r"^:(?:start-at|end-at): (.+)$", block.text, re.M):
                _, found, text = text.partition(mark)
                if not found:
                    yield f"{page.path}:{block.line}: {file.name} has no {mark!r}"


def commands(page: Page) -> Iterator[str]:
    """Rule 2."""
    for command in page.commands:
        wrong = command_error(command)
        if wrong:
            yield f"{page.path}:{command.line}: `{command.text}`: {wrong}"


def command_error(command: Command) -> str | None:
    """What is wrong with a command; None if nothing is."""
    try:
        program, *arguments = command.words
    except ValueError as error:
        return str(error)
    if program == "gradwire" or arguments[:2] in (["-m", "gradwire"], ["-m", "gradwire_tools.cli"]):
        return _gradwire(arguments if program == "gradwire" else arguments[2:])
    if program == "make":
        return _make(arguments)
    if program == "pip":
        return _extras(arguments) or _unquoted(command.text)
    if program == "torchrun" and (wrong := _nodes(arguments)):
        return wrong
    for word in arguments:  # scripts of the repository, by their folder
        if re.match(r"(?:examples|scripts|src|tests|tests_tools|bench)/\S*\.py$", word):
            return None if (ROOT / word).exists() else f"{word}: no such file"
    return None


def _gradwire(words: list[str]) -> str | None:
    """Through the command line's own parser, which runs nothing; COMMAND stands for any."""
    group: Any = command_line.built(app)
    while hasattr(group, "commands") and words and not words[0].startswith("-"):
        if words[0].isupper():
            return None
        if words[0] not in group.commands:
            return f"gradwire has no command {words[0]!r}"
        group, words = group.commands[words[0]], words[1:]
    context = group.context_class(group, info_name="gradwire", **group.context_settings)
    try:
        _, rest, _ = group.make_parser(context).parse_args(list(words))
    except Exception as error:  # of typer's click, which is private
        return str(error) or type(error).__name__
    more = [] if context.allow_extra_args else [word for word in rest if word != "..."]
    return f"{' '.join(more)}: it takes no such argument" if more else None


def _make(words: list[str]) -> str | None:
    targets = [word for word in words if "=" not in word and not word.startswith("-")]
    missing = sorted(set(targets) - _make_targets())
    return f"make has no target {', '.join(missing)}" if missing else None


@cache
def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.M))


def _nodes(words: list[str]) -> str | None:
    """torchrun on several machines that do not know which they are: it waits, since rendezvous is
    static by default, and both take rank 0."""
    given = [word for one in words for word in one.split("=")]
    if "--nnodes" not in given or given[given.index("--nnodes") + 1] == "1":
        return None
    known = "--node-rank" in given or "--rdzv-backend" in given
    return None if known else "it hangs: give --node-rank, or --rdzv-backend c10d"


def _extras(words: list[str]) -> str | None:
    for word in words:
        named = re.match(r"(?:gradwire|\.)\[([\w,-]+)\]", word)
        missing = set(named[1].split(",")) - _known_extras() if named else ()
        if missing:
            return f"pyproject.toml has no extra {', '.join(sorted(missing))}"
    return None


def _unquoted(command: str) -> str | None:
    """An extra that zsh would take for a pattern."""
    found = re.search(r"(?<![\"'\w.])[\w.]+\[[^]]*\]", command)
    return None if found is None else f'quote the extra: "{found[0]}"'


@cache
def _known_extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return set(re.findall(r"^([\w-]+) = \[", section, re.M))


def figures_without_command(page: Page) -> Iterator[str]:
    """Rule 3."""
    for part in page.sections:
        if part.figures and not part.names_its_command:
            yield f"{page.path}:{part.line}: {part.title!r}: no command for {part.figures}"


def beginning(page: Page) -> Iterator[str]:
    """Rule 4."""
    if FIRST not in page.text[:800]:
        yield f'{page.path}: does not say "{FIRST} ..." at its start'
