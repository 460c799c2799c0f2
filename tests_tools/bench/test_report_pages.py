"""What the report's pages say of stored rows: headings, sentences, tables, and words in charts.

`report_pages.txt` has all of it; `pytest tests_tools/bench/test_report_pages.py --update-golden`
writes it anew, and its difference is a line of the changelog.
"""

from __future__ import annotations

import html.parser
import itertools
import json
import re
from pathlib import Path

import pytest
from report_rows import (
    ABLATED,
    ADAPTED,
    COLLECTIVE,
    COMPARED,
    DECISION,
    DOCTOR,
    ERRORS,
    EVERYTHING,
    KERNEL,
    METHODS,
    PROBED,
    RUN,
    SIMULATED,
    SIMULATED_SHARDED,
    adapted,
    aggregator_row,
    error_row,
    sharded_rows,
    train_rows,
)

from gradwire_tools import report

STORED = Path(__file__).with_name("report_pages.txt")
RESULTS = Path(__file__).parents[2] / "bench" / "results"
FILES = (  # of each kind of rows a small file, and how many of its rows
    ("time-to-accuracy", 84), ("train-sharded-lab-40", 24), ("train-thc", 190),
    ("train-validation", 12), ("adapt-layers", 8), ("planner", 26), ("ablation", 12),
    ("error-gain", 16), ("aggregators", 16), ("2026-11-26-nvidia-h100", 40),
)  # fmt: skip
SHAPES = (  # kinds of rows that no file has, and parts of sections
    *EVERYTHING, *ADAPTED, *PROBED, *train_rows("1gbit,1ms", losses=(3.0, 3.01, 3.02)),
    {**DECISION, "step": 1009, "line": "qsgd:bits=4 by ring"}, {**DECISION, "method": "policy=it"},
    {**COMPARED, "method": "torch-fp32", "error": 0.25}, {**ABLATED, "part": "b", "cut": -0.25},
    *(error_row(f"qsgd:bits={b}", at=at, bits=b, nmse=at / 1e3) for b in (3, 5) for at in (1, 3)),
    *(error_row(f"codec{at}", bits=1 + at) for at in range(12)),
    error_row("thc", of_sum=0.1), error_row("thc", feedback=True, of_sum=0.2),
    {**aggregator_row(seconds=-0.001), "ranks": 4}, adapted(at=None),
    *({**row, "net": "as it is"} if "net" in row else row for row in DOCTOR), DOCTOR[0], DOCTOR[-1],
    {**COLLECTIVE, "method": METHODS[1], "net": "none"}, {**COLLECTIVE, "ranks": 8, "nmse": 1.2},
    {**COLLECTIVE, "method": METHODS[1], "seconds": 0.1, "seconds_quartiles": [0.1, 0.11]},
    {**COLLECTIVE, "net": "2gbit,1ms"}, {**COLLECTIVE, "net": "2gbit,1ms", "method": METHODS[1]},
    SIMULATED, SIMULATED_SHARDED, {**SIMULATED_SHARDED, "net": "2gbit,1ms", "ratio": None},
    *({**SIMULATED, "sweep": "bits", "value": f"w{bits}"} for bits in (4, 8)),
    *(
        {**SIMULATED, "sweep": "rate", "value": net.split(",")[0], "net": net}
        for net in ("1gbit,1ms", "10gbit,1ms")
    ),
    {**COMPARED, "run": {**RUN, "date": "later"}},  # another run; another recording, and commit
    {**ERRORS[0], "run": {**RUN, "commit": "a"}}, {**ERRORS[0], "recorded": {**RUN, "commit": "a"}},
    {**KERNEL, "run": {**RUN, "machine": "a processor, 2 cores", "load": 14.39}},
)  # fmt: skip
_FINE = (3.0, 3.0, 3.01)
TRAININGS = {  # what may be said of a method: rows of a task of this name
    "near": train_rows(step=0.47, losses=(2.99, 3.02, 2.995), baseline=(3.0, 3.01, 3.0)),
    "worse": train_rows(step=0.8, losses=(3.5, 3.51, 3.49), baseline=_FINE),
    "few": train_rows(losses=(3.1, 3.5, 3.8), baseline=(3.0, 3.0, 3.0), spread=None),
    "lower": train_rows(losses=(2.5,), composed=True),
    "ended": [
        {**row, "steps_by_seed": [20, 40], "wire_bytes_per_step": 3_750_000,
         "target_from": "torch-fp32 at 0.6 of its run", "timing_only": row["method"] == METHODS[1]}
        for row in train_rows(losses=(3.0, 3.5)) if row["row"] == "summary"
    ],
    "near sharded": sharded_rows(0.4, losses=_FINE),
    "few sharded": sharded_rows(0.6, losses=_FINE),
}  # fmt: skip
BLOCKS = ("h1", "h2", "h3", "p", "li", "figcaption", "summary", "tr", "svg", "footer")
WORD = re.compile(r"[^\W\d_]{2}")


class Words(html.parser.HTMLParser):
    """A line for each heading, sentence and row of a table; of a chart its words, sorted, without
    the numbers along its axes and without what has no room."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.lines: list[str] = []
        self.cells: list[str] = []
        self.tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tag = tag
        if "svg" not in self.inside and tag in BLOCKS:
            self.inside.append(tag)
            self.cells = []
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()
            if tag == "svg":
                words = {cell for cell in self.cells if WORD.search(cell) and "…" not in cell}
                self.cells = sorted(words)
            self.lines.append(f"{tag}: {' | '.join(self.cells)}")

    def handle_data(self, data: str) -> None:
        told = " ".join(data.split())
        if not self.inside or not told or self.tag == "title":
            return
        if self.inside[-1] in ("svg", "tr") and not self.cells:
            self.cells.append("")
        if self.inside[-1] == "svg":
            self.cells.append(told)
        elif self.cells:
            self.cells[-1] = f"{self.cells[-1]} {told}".strip()
        else:
            self.cells.append(told)


def stored(name: str, count: int) -> list[dict[str, object]]:
    with (RESULTS / f"{name}.jsonl").open() as lines:
        return [json.loads(line) for line in itertools.islice(lines, count)]


def test_pages_say_what_they_said(pytestconfig: pytest.Config) -> None:
    pages = {name: stored(name, count) for name, count in FILES} | {"shapes": list(SHAPES)}
    pages["trainings"] = [
        {**row, "task": name.split()[0]} for name, rows in TRAININGS.items() for row in rows
    ]
    found = "".join(
        "\n".join([f"==== {name}", *Words(report.render(rows)).lines, ""])
        for name, rows in pages.items()
    )
    if pytestconfig.getoption("update_golden"):
        STORED.write_text(found)
    assert found.splitlines() == STORED.read_text().splitlines()
