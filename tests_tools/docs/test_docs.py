"""README and docs are true: what `make docs-check` runs. rules.py and blocks.py say what holds."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import blocks
import pytest
import rules
import yaml
from pages import Page

import gradwire
from products import EXHAUSTIVE

ROOT = rules.ROOT
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
INTERNALS = ROOT / "docs" / "internals"
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
FOR_USERS = [*OTHERS, *(path for path in PAGES if INTERNALS not in path.parents)]
SOURCES = [
    path
    for folder in ("src", "tests", "tests_tools", "examples", "scripts")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".c", ".h") and path.parent != Path(__file__).parent
]
RULES = [
    (rules.links, [*OTHERS, *PAGES]),
    (rules.includes, PAGES),
    (rules.paths, [*SOURCES, ROOT / "Makefile", ROOT / "hatch_build.py"]),
    (rules.commands, [*OTHERS, *PAGES]),
    (rules.figures_without_command, FOR_USERS),
    (rules.beginning, PAGES[1:]),
]


@pytest.mark.parametrize(("rule", "files"), RULES, ids=lambda one: getattr(one, "__name__", ""))
def test_a_rule_holds(rule: Callable[[Page], Iterator[str]], files: list[Path]) -> None:
    found = [wrong for path in files for wrong in rule(Page.read(path))]
    assert [wrong.replace(f"{ROOT}/", "") for wrong in found] == []


def test_tables_of_results_are_what_the_rows_say() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "results_in_docs.py"))
    assert script["main"](["--check"]) == 0, "run python scripts/results_in_docs.py"


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (cited["version"], cited["license"]) == (gradwire.__version__, "Apache-2.0")


# test_readme.py runs the README's.
PROGRAMS = [path for path in PAGES[1:] if any(b.kind == "python" for b in Page.read(path).blocks)]


@pytest.mark.multiprocess
def test_blocks_run() -> None:
    blocks.run([Page.read(path) for path in PROGRAMS], slow=False)


@EXHAUSTIVE
@pytest.mark.multiprocess
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run_without_other_pages(path: Path) -> None:
    blocks.run([Page.read(path)])
