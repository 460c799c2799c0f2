"""What `make docs` builds is complete. Only the last test needs Sphinx."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from pages import ROOT, Page

import gradwire
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
    named = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, re.M)
    assert sorted(named) == sorted(gradwire.__all__)


def test_every_environment_variable_is_on_its_page() -> None:
    text = (DOCS / "reference" / "environment.md").read_text("utf-8")
    files = [ROOT / "hatch_build.py"]
    files += [p for top in ("src", "scripts", "tests/fuzz") for p in (ROOT / top).rglob("*.py")]
    read = {name for p in files for name in re.findall(r"\bGRADWIRE_\w+", p.read_text("utf-8"))}
    assert set(re.findall(r"^\| `(GRADWIRE_\w+)` \|", text, re.M)) == read


DOCSTRING = """\
It has *stars*, a `code`s and docs/reference/lab.md:
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
RESTRUCTURED = r"""It has \*stars\*, a ``code``\ s and :doc:`/reference/lab`:

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
