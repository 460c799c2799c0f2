"""scripts/quoted.py: pages quote the figures of the stored rows that they name, and are read again
when these change."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import ROOT

from gradwire.errors import ConfigError

quoted: Any = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "quoted.py")))

ROW = {"value": 12.34, "step_seconds": -0.0567, "share": [{"of": 0.891}], "numel": 2_345_678}


def test_figures_of_pages_are_those_of_their_rows() -> None:
    told = "read them against the rows, correct the pages, then run scripts/quoted.py --read"
    assert quoted.complaints() == [], told


class Copy:
    """A small repository: README.md with a paragraph that quotes figures of the rows x."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "docs").mkdir()
        (root / "bench" / "results").mkdir(parents=True)
        (root / "bench" / "quoted.json").write_text("{}")
        self.has_rows("x", ROW)

    def has_rows(self, name: str, *rows: dict[str, Any]) -> None:
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (self.root / "bench" / "results" / f"{name}.jsonl").write_text(lines)

    def says(self, text: str, rows: str = "x") -> None:
        page = f"# Page\n\nNo row has 77.7.\n\n<!-- rows: {rows} -->\n{text}\n\nNor 88.8.\n"
        (self.root / "README.md").write_text(page)

    def complaints(self) -> list[str]:
        for cached in (quoted._known, quoted._digest):  # by path: the files have changed
            cached.cache_clear()
        found: list[str] = quoted.complaints(self.root)
        return found

    def lacks(self) -> list[str]:
        """Complaints of figures: not that nobody has read the page."""
        return [one for one in self.complaints() if "was not read" not in one]

    def read(self) -> None:
        self.complaints()
        quoted.write(self.root)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [("12.3", "12.4"), ("56.7", "56.8"), ("89.1", "89.2"), ("2.35", "2.34")],
    ids=["as it is", "in thousandths", "in per cent", "in millions"],
)
def test_a_value_is_found_at_its_rounding(copy: Copy, found: str, wrong: str) -> None:
    copy.says(f"It took {found} of 4.")
    assert copy.lacks() == []
    copy.says(f"It took {wrong} of 4.")
    assert copy.lacks() == [f"README.md: 'It took {wrong} of 4.' quotes {wrong}, which x lack"]


def test_names_code_and_links_quote_nothing(copy: Copy) -> None:
    copy.says("`make 91.1` of ResNet-92 and fp93, [here](page.md#94-95): 12.3.")
    assert copy.lacks() == []


def test_evaluations_and_curves_are_not_quoted(copy: Copy) -> None:
    copy.has_rows("x", ROW, {"row": "step", "value": 43.21}, {"curve": [43.21] * 13})
    copy.says("It took 43.2.")
    assert len(copy.lacks()) == 1


def test_what_a_table_prints_is_found_as_it_is_printed(copy: Copy) -> None:
    """By --parts, of how many times faster: no row has that."""
    rows = "ablation.jsonl"
    shutil.copy(ROOT / "bench" / "results" / rows, copy.root / "bench" / "results" / rows)
    copy.says("It is 9.46 and .860 times as fast.", "ablation")
    assert copy.lacks() == []
    copy.says("It is 9.460 times as fast.", "ablation")
    assert len(copy.lacks()) == 1


def test_a_claim_names_its_rows_in_its_cells(copy: Copy) -> None:
    page = copy.root / quoted.CLAIMS
    page.parent.mkdir()
    copy.says("It took 12.3.")
    page.write_text("| 66.6 fold | 6.1 | `x`, `none` | 12.3, 12.4 | 12.5 |\n| a | b | c | 99 | d |")
    of_rows = ["12.4", "12.5"]
    assert copy.lacks() == [
        f"{quoted.CLAIMS}: '66.6 fold' quotes {figure}, which x lack" for figure in of_rows
    ]


def test_a_page_is_read_again_when_its_rows_change(copy: Copy) -> None:
    copy.says("It is 3.21 times 12.3.")
    where = "README.md: 'It is 3.21 times 12.3.'"
    unread = f"{where} was not read against these rows of x"
    assert copy.complaints() == [unread, f"{where} quotes 3.21, which x lack"]
    copy.read()
    assert copy.complaints() == []
    copy.has_rows("x", {**ROW, "value": 12.31})  # where all figures still are
    assert copy.complaints() == [unread]
    copy.read()
    assert copy.complaints() == []
    copy.has_rows("x", {**ROW, "value": 3.21}, {"value": 12.3})
    no_longer = f"{where} no longer quotes 3.21, or no longer has to derive it"
    assert copy.complaints() == [unread, no_longer]


def test_it_was_read_against_the_rows_that_are_named(copy: Copy) -> None:
    copy.has_rows("y", {"value": 45.6})
    copy.says("It is 3.21.")
    copy.read()
    copy.says("It is 3.21.", "x y")
    unread = ["README.md: 'It is 3.21.' was not read against these rows of y"]
    assert copy.complaints() == unread
    copy.says("It is 3.21.", "y")
    (copy.root / "bench" / "results" / "x.jsonl").unlink()
    assert copy.complaints() == unread


def test_what_is_derived_is_quoted(copy: Copy) -> None:
    begins = "One two three four five six seven eight"
    copy.says(f"{begins} is 3.21.")
    copy.read()
    copy.says(f"{begins} is 3.22.")
    assert copy.complaints() == [
        f"README.md: '{begins}' quotes 3.22, which x lack",
        f"README.md: '{begins}' no longer quotes 3.21, or no longer has to derive it",
    ]
    copy.says("It took 12.3.")
    assert copy.lacks() == [f"README.md has no passage '{begins}'"]


def test_rows_that_are_named_are_there(copy: Copy) -> None:
    copy.says("It took 12.3.", "x gone")
    with pytest.raises(ConfigError, match=r"README\.md: '<!-- rows: gone -->'"):
        copy.complaints()
