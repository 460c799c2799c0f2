"""What `make docs` builds is complete, and so is its page of errors. One test needs Sphinx."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, Page

import gradwire
from gradwire import errors
from gradwire.aggregators import registry
from products import EXHAUSTIVE

DOCS = ROOT / "docs"


def test_every_page_is_in_the_table_of_contents() -> None:
    trees = [b.text for b in Page.read(DOCS / "index.md").blocks if b.kind == "{toctree}"]
    entries = re.findall(r"^([\w/*-]+)$", "\n".join(trees), re.M)
    pages = {str(p.relative_to(DOCS).with_suffix("")) for p in DOCS.rglob("*.md")} - {"index"}
    assert {name for name in entries if "*" not in name} <= pages
    assert {page for page in pages if not any(fnmatch(page, e) for e in entries)} == set(), (
        "name these pages in docs/index.md"
    )


def test_the_api_page_has_every_public_name() -> None:
    text = (DOCS / "reference" / "api.md").read_text("utf-8")
    named = re.findall(r"^\.\. auto(?:function|class):: (?:[\w.]+\.)?(\w+)$", text, re.M)
    made = [c for c, _ in gradwire.codecs.REGISTRY.values()] + [*registry.REGISTRY.values()]
    expected = {*gradwire.__all__, *gradwire._RENAMED, *(method.__name__ for method in made)}
    assert {*named} == expected - {"LGreco"}
    assert len(named) == len({*named})


def test_every_environment_variable_is_on_its_page() -> None:
    text = (DOCS / "reference" / "environment.md").read_text("utf-8")
    files = [ROOT / "hatch_build.py"]
    files += [p for top in ("src", "scripts", "tests/fuzz") for p in (ROOT / top).rglob("*.py")]
    read = {name for p in files for name in re.findall(r"\bGRADWIRE_\w+", p.read_text("utf-8"))}
    assert set(re.findall(r"^\| `(GRADWIRE_\w+)` \|", text, re.M)) == read


def documented() -> Iterator[tuple[str, Any]]:
    """What the API page shows a signature of: functions, classes, and methods of classes."""
    for name in gradwire.__all__:
        value = getattr(gradwire, name)
        if not (isinstance(value, type) and issubclass(value, Exception)):
            yield name, value
        if isinstance(value, type):
            members = inspect.getmembers(value, inspect.isfunction)
            yield from ((f"{name}.{m}", f) for m, f in members if not m.startswith("_"))


def test_signatures_have_names_and_defaults_that_users_can_give() -> None:
    """As help() and the site show them: the site shows values, not the source's expressions."""
    for name, value in documented():
        shown = str(inspect.signature(value))
        assert not re.search(r" object at |<factory>|\b_\w|\b[A-Z]+_[A-Z]+\b", shown), name
    assert str(inspect.signature(gradwire.Handle)) == "()"  # attach makes it
    assert "codec: 'Method' = unchanged" in str(inspect.signature(gradwire.Handle.update))
    assert len(inspect.signature(gradwire.attach).parameters) <= 13
    assert "autodoc_preserve_defaults" not in runpy.run_path(str(DOCS / "conf.py"))


def test_signatures_of_codecs_and_aggregators_are_their_options() -> None:
    """`__signature__` is what tools look at before the arguments of `Codec.__new__`."""
    codecs = [c for c, _ in gradwire.codecs.REGISTRY.values()] + [gradwire.Codec]
    for made in [*codecs, *registry.REGISTRY.values()]:
        options = {f.name: f.default for f in fields(made)} if is_dataclass(made) else {}
        shown = inspect.signature(made)
        assert {n: p.default for n, p in shown.parameters.items()} == options, made
        assert made not in codecs or made.__signature__ == shown, made


DOCSTRING = """\
It has *stars*, a `code`s and docs/laboratory/lab.md:
- an item
  of two lines

    code(*all)

Args:
    one, *two: what they
        mean.
    three,
        four: the rest.

Returns:
    A value.
"""
RESTRUCTURED = r"""It has \*stars\*, a ``code``\ s and :doc:`/laboratory/lab`:

- an item
  of two lines

.. code-block:: python

    code(*all)

:Args:
   - **one, \*two**: what they
     mean.
   - **three, four**: the rest.

:Returns:
   A value."""


def test_docstrings_for_autodoc() -> None:
    conf = runpy.run_path(str(DOCS / "conf.py"))
    assert conf["restructured"](DOCSTRING) == RESTRUCTURED


@EXHAUSTIVE
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="Sphinx is not installed here: make docs installs it")
    for needed in ("furo", "myst_parser"):
        pytest.importorskip(needed, reason=f"{needed} is not installed here: make docs installs it")
    command = [sys.executable, "-m", "sphinx", "-qW", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
        parts = [
            re.escape(part.strip(" :")) for part in message.split("...") if part.strip(" .,:;")
        ]
        if not re.search("[^\n]*".join(parts), source):
            missing.append(message)
    assert missing == [], "the source has no such messages"


def test_every_class_is_there() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == set(re.findall(r"^\| `(\w+)`", SECTIONS["The classes"].text, re.M))
