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


def broken(rule: Callable[[Page], Iterator[str]], pages: list[Path]) -> list[str]:
    found = [wrong for path in pages for wrong in rule(Page.read(path))]
    return [wrong.replace(f"{ROOT}/", "") for wrong in found]


def test_links_resolve() -> None:
    assert broken(rules.links, [*OTHERS, *PAGES]) == []


def test_included_code_is_there() -> None:
    assert broken(rules.includes, PAGES) == []


def test_paths_of_pages_in_sources_resolve() -> None:
    files = [*SOURCES, ROOT / "Makefile", ROOT / "hatch_build.py"]
    assert [wrong for file in files for wrong in rules.paths(file)] == []


def test_commands_exist() -> None:
    assert broken(rules.commands, [*OTHERS, *PAGES]) == []


def test_figures_name_their_command() -> None:
    assert broken(rules.figures_without_command, FOR_USERS) == []


def test_pages_begin_with_what_the_reader_can_do() -> None:
    assert broken(rules.beginning, PAGES[1:]) == []


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
