"""Markdown pages as the checks see them: sections, fenced blocks, commands, links, figures."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

MARKDOWN = MarkdownIt("commonmark").enable("table")
ROOT = Path(__file__).parents[2]
# Variables before a command, such as GRADWIRE_CC=gcc; a program that pages show; its arguments.
VARIABLES = r"^(?:[A-Z][A-Z0-9_]*=(?:\"[^\"]*\"|\S*)\s+)*"
COMMAND = re.compile(VARIABLES + r"(?:gradwire|make|pip|python3?|torchrun|pytest)\s+\S")
NUMBER = r"(?<![\w.,:=/#-])\d+(?:[.,]\d+)*"
# Settings of a network (1gbit,1ms; 10 Gbit/s) are no results, so Gbit/s is not among the units.
UNITS = r"(?: ?(?:ms|s|us|µs|ns|min|minutes|GB/s|MB/s|%|times)|x)"
FIGURE = re.compile(rf"{NUMBER}(?: to {NUMBER})?{UNITS}(?![\w/])")
PROOF = re.compile(r"^(?:src|tests|tests_tools|scripts|examples)/\S+\.(?:py|c|h)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string and text, and the page's line where the text begins."""

    info: str
    text: str
    line: int

    @property
    def kind(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def words(self) -> list[str]:
        """What follows the kind."""
        return self.info.split()[1:]


@dataclass(frozen=True)
class Command:
    """A command that a page shows, and the page's line.

    Attributes:
        output: lines that it prints, where a block shows `$ COMMAND`; else None.
    """

    text: str
    line: int
    output: list[str] | None = None

    @property
    def words(self) -> list[str]:
        """Without variables before it, and without what stands behind a pipe or another command.

        Alternatives stand behind "|", as in --ir | --c.
        """
        alone = re.sub(VARIABLES, "", re.split(r" (?:\|(?! -)|>|&&|;) ", self.text)[0])
        return shlex.split(alone.replace(" | ", " "))


@dataclass(frozen=True)
class Page:
    """A page; or a section of it, what stands between two headings, with its title and line."""

    path: Path
    text: str
    title: str = ""
    line: int = 1

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(path, path.read_text("utf-8"))

    @cached_property
    def tokens(self) -> list[Token]:
        return MARKDOWN.parse(self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(token.info.strip(), token.content, self.line + token.map[0] + 1)
            for token in self.tokens
            if token.type == "fence"
        ]

    @cached_property
    def inline(self) -> list[list[Token]]:
        """Text, code and links of each paragraph, heading and cell of a table."""
        return [token.children or [] for token in self.tokens if token.type == "inline"]

    @cached_property
    def spans(self) -> list[str]:
        """What stands in backticks."""
        return [one.content for part in self.inline for one in part if one.type == "code_inline"]

    @cached_property
    def links(self) -> list[str]:
        """Targets of links and of pictures."""
        found = [one.attrGet("href") or one.attrGet("src") for part in self.inline for one in part]
        return [str(target) for target in found if target]

    @cached_property
    def figures(self) -> list[str]:
        """Numbers with a unit, outside of backticks and blocks."""
        words = {"code_inline": "code", "softbreak": " "}
        parts = ("".join(words.get(one.type, one.content) for one in part) for part in self.inline)
        return FIGURE.findall("\n".join(parts))

    @cached_property
    def headings(self) -> list[tuple[int, Token]]:
        """The first line, from 0, and the title."""
        pairs = itertools.pairwise(self.tokens)
        return [(one.map[0], title) for one, title in pairs if one.type == "heading_open"]

    @cached_property
    def sections(self) -> list[Page]:
        """Of any level."""
        lines = self.text.splitlines(keepends=True)
        starts = [(0, "")] + [(at, title.content) for at, title in self.headings]
        ends = [at for at, _ in starts[1:]] + [len(lines)]
        return [
            Page(self.path, "".join(lines[at:end]), title, at + 1)
            for (at, title), end in zip(starts, ends, strict=True)
        ]

    @cached_property
    def anchors(self) -> set[str]:
        """Of headings, as GitHub makes them."""
        found: set[str] = set()
        for _, title in self.headings:
            plain = "".join(one.content for one in title.children or ())
            slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            n = 0
            while (unique := f"{slug}-{n}" if n else slug) in found:
                n += 1
            found.add(unique)
        return found

    @cached_property
    def commands(self) -> list[Command]:
        """Every command shown, in order: lines of blocks that are no programs, and spans in
        backticks."""
        found: list[Command] = []
        line = self.line
        for token in self.tokens:
            line = self.line + token.map[0] if token.map else line
            if token.type == "fence" and token.info.strip() in ("", "console", "bash", "sh"):
                found += _commands(token.content, line + 1)
            for one in token.children or ():
                line += one.type in ("softbreak", "hardbreak")
                if one.type == "code_inline" and COMMAND.match(one.content):
                    found.append(Command(one.content, line))
        return found

    @property
    def names_its_command(self) -> bool:
        """Whether backticks or a block hold a command, or a file that fixes figures."""
        if any(PROOF.match(span) and (ROOT / span).exists() for span in self.spans):
            return True
        return bool(self.commands) or any(_commands(block.text, 0) for block in self.blocks)


def _commands(block: str, line: int) -> list[Command]:
    """The commands of a block: joined where a backslash ends a line, without comments. What stands
    between one that begins with $ and the next is its output."""
    found: list[Command] = []
    output: list[str] | None = None
    for at, text in enumerate(re.sub(r"\\\n\s*", "", block).splitlines(keepends=True), line):
        bare = re.sub(r"(^|\s)#.*", "", text.strip().removeprefix("$ ")).strip()
        if COMMAND.match(bare) and (output is None or text.startswith("$ ")):
            output = [] if text.startswith("$ ") else None
            found.append(Command(bare, at, output))
        elif output is not None:
            output.append(text)
    return found
