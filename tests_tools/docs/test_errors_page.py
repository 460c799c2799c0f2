"""docs/reference/errors.md names every class of errors, and messages that the source has."""

from __future__ import annotations

import ast
import re

from pages import Page
from rules import ROOT

from gradwire import errors

PAGE = ROOT / "docs" / "reference" / "errors.md"
SECTIONS = {section.title: section for section in Page.read(PAGE).sections}
ROWS = [row for row in SECTIONS["Common messages"].text.splitlines() if row.startswith("| `")]


def texts() -> str:
    """Every string of the source, a line each; values in them are "...", as on the page."""
    found = []
    for file in sorted((ROOT / "src" / "gradwire").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


def test_every_message_is_in_the_source() -> None:
    source, missing = texts(), []
    assert len(ROWS) > 15
    for row in ROWS:
        message = row.split("`")[1]
        parts = [re.escape(part.strip()) for part in message.split("...") if part.strip(" .,:;")]
        if not re.search("[^\n]*".join(parts), source):
            missing.append(message)
    assert missing == [], "the source has no such messages"


def test_every_class_is_there() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == set(re.findall(r"^\| `(\w+)`", SECTIONS["The classes"].text, re.M))
