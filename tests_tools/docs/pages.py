"""Markdown pages as the checks see them: sections, fenced blocks, commands, links, figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import dedent

FENCE = re.compile(r"^( *)(`{3,})([^`\n]*)\n(.*?)^\1\2 *$", re.M | re.S)
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
LINK = re.compile(r"(?<!\\)\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
# A variable before a command, such as GRADWIRE_CC=gcc.
VARIABLE = re.compile(r"^[A-Z][A-Z0-9_]*=\S*$")
ROOT = Path(__file__).parents[2]
PROGRAMS = ("gradwire", "make", "pip", "python", "python3", "torchrun", "pytest")
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
class Section:
    """What stands between two headings."""

    title: str
    line: int
    text: str

    @cached_property
    def prose(self) -> str:
        """Without fenced blocks."""
        return FENCE.sub("", self.text)

    @cached_property
    def spans(self) -> list[str]:
        """What stands in backticks, line breaks as spaces; in a table "|" is written "\\|"."""
        return [" ".join(m[2].replace("\\|", "|").split()) for m in SPAN.finditer(self.prose)]


@dataclass(frozen=True)
class Page:
    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(path, path.read_text("utf-8"))

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(m[3].strip(), dedent(m[4]), self.text.count("\n", 0, m.start()) + 2)
            for m in FENCE.finditer(self.text)
        ]

    @cached_property
    def sections(self) -> list[Section]:
        """Of any level; a `#` in a fenced block is no heading."""
        hidden = FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), self.text)
        starts = [(0, "")] + [
            (m.start(), m[1].strip()) for m in re.finditer(r"^#+ (.*)$", hidden, re.M)
        ]
        ends = [at for at, _ in starts[1:]] + [len(self.text)]
        return [
            Section(title, self.text.count("\n", 0, at) + 1, self.text[at:end])
            for (at, title), end in zip(starts, ends, strict=True)
        ]

    @cached_property
    def anchors(self) -> set[str]:
        """Of headings, as GitHub makes them."""
        found: set[str] = set()
        for section in self.sections:
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", section.title).replace("`", "")
            slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            n = 0
            while (unique := f"{slug}-{n}" if n else slug) in found:
                n += 1
            found.add(unique)
        return found

    @cached_property
    def links(self) -> list[str]:
        return [m[1] for m in LINK.finditer(SPAN.sub("code", FENCE.sub("", self.text)))]

    def commands(self) -> Iterator[str]:
        """Every command shown: lines of blocks that are no programs, and spans in backticks."""
        for block in self.blocks:
            if block.kind in ("", "console", "bash", "sh", "shell"):
                yield from _lines(block.text)
        for section in self.sections:
            yield from (span for span in section.spans if is_command(span))


def is_command(text: str) -> bool:
    """Whether its first word, after variables, is a program that pages show, with arguments."""
    words = text.split()
    while words and VARIABLE.match(words[0]):
        words.pop(0)
    return len(words) > 1 and words[0] in PROGRAMS


def figures(section: Section) -> list[str]:
    """Numbers with a unit in a section's prose, outside backticks."""
    return [m[0] for m in FIGURE.finditer(SPAN.sub("code", section.prose))]


def names_its_command(section: Section) -> bool:
    """Whether backticks or a block of the section hold a command, or a file that fixes figures."""
    commands = (line for m in FENCE.finditer(section.text) for line in _lines(m[4]))
    return any(is_command(s) or _fixes(s) for s in section.spans) or any(commands)


def _fixes(span: str) -> bool:
    return bool(PROOF.match(span)) and (ROOT / span).exists()


def _lines(text: str) -> Iterator[str]:
    """The commands of a block: joined where a backslash ends a line, without comments."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        bare = re.sub(r"(^|\s)#.*", "", line.strip().removeprefix("$ ")).strip()
        if is_command(bare):
            yield bare
