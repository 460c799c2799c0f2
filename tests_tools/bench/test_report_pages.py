"""What the report's pages say of stored rows: headings, sentences, tables, and words in charts;
nothing is fetched, nothing unescaped; and in a browser nothing is wider than the screen.

`report_pages.txt` has all of it; `pytest tests_tools/bench/test_report_pages.py --update-golden`
writes it anew, and its difference is a line of the changelog."""

from __future__ import annotations

import html.parser
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_rows import (
    COLLECTIVE,
    EVERYTHING,
    KERNEL,
    RUN,
    SHAPES,
    SWEPT,
    TRAININGS,
    TRANSPORT,
    stored,
    train_rows,
)

from gradwire.errors import ConfigError
from gradwire_tools import report
from gradwire_tools.bench import quantities
from gradwire_tools.report import page

STORED = Path(__file__).with_name("report_pages.txt")
FILES = (  # of each kind of rows a small file, and how many of its rows
    ("time-to-accuracy", 84), ("train-sharded-lab-40", 24), ("train-thc", 190),
    ("train-validation", 12), ("adapt-layers", 8), ("planner", 26), ("ablation", 12),
    ("error-gain", 16), ("aggregators", 16), ("2026-11-26-nvidia-h100", 40),
)  # fmt: skip
BLOCKS = ("h1", "h2", "h3", "p", "li", "figcaption", "summary", "tr", "svg", "footer")
WORD = re.compile(r"[^\W\d_]{2}")


class Page(html.parser.HTMLParser):
    """Checks that tags nest, that names differ, and that nothing is fetched or runs.

    It has a line for each heading, sentence and row of a table; of a chart its words, sorted,
    without the numbers along its axes and without what has no room.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.names: list[str] = []
        self.text = ""
        self.inside: list[str] = []
        self.lines: list[str] = []
        self.cells: list[str] = []
        self.titled = 0
        self.feed(page)
        assert not self.open
        assert len(set(self.names)) == len(self.names)
        assert {link.removeprefix("#") for link in self.links} <= {*self.names}  # nothing else
        assert self.titled == page.count(' role="img"')
        assert not {"script", "img", "iframe"} & {*self.tags}
        assert "url(" not in page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        self.names += [str(v) for k, v in attrs if k == "id"]
        self.titled += tag == "title" and "svg" in self.open
        if "svg" not in self.inside and tag in BLOCKS:
            self.inside.append(tag)
            self.cells = []
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()
            if tag == "svg":
                words = {cell for cell in self.cells if WORD.search(cell) and "…" not in cell}
                self.cells = sorted(words)
            self.lines.append(f"{tag}: {' | '.join(self.cells)}")

    def handle_data(self, data: str) -> None:
        self.text += data
        told = " ".join(data.split())
        if not self.inside or not told or self.tags[-1] == "title":
            return
        if self.inside[-1] in ("svg", "tr") and not self.cells:
            self.cells.append("")
        if self.inside[-1] == "svg":
            self.cells.append(told)
        elif self.cells:
            self.cells[-1] = f"{self.cells[-1]} {told}".strip()
        else:
            self.cells.append(told)


def test_pages_say_what_they_said(pytestconfig: pytest.Config) -> None:
    pages = {name: stored(name, count) for name, count in FILES} | {"shapes": list(SHAPES)}
    pages |= {"a run": train_rows(), "no gain": TRAININGS["near"]}  # whose results are told first
    pages["trainings"] = [
        {**row, "task": name.split()[0]} for name, rows in TRAININGS.items() for row in rows
    ]
    found = "".join(
        "\n".join([f"==== {name}", *Page(report.render(rows)).lines, ""])
        for name, rows in pages.items()
    )
    if pytestconfig.getoption("update_golden"):
        STORED.write_text(found)
    assert found.splitlines() == STORED.read_text().splitlines()


KEPT = ("evaluation", "summary", "validation", "total", "layer", "300mbit,1ms")


def _hostile(value: Any) -> Any:
    if isinstance(value, str) and value not in KEPT:
        return f"{value}</td></svg></style><script>alert(1)</script>\"' onload=x &amp;"
    if isinstance(value, dict):
        return {key: _hostile(one) for key, one in value.items()}
    return value


def test_hostile_strings_stay_text() -> None:
    rows = [{key: _hostile(value) for key, value in row.items()} for row in EVERYTHING]
    rows.append({"<script>alert(2)</script>": "<img src=x onerror=alert(3)>"})
    parsed = Page(page.render(rows, _hostile("title")))
    assert "<script>alert(2)</script>" in parsed.text


def test_rows_without_values_are_drawn_all_the_same() -> None:
    rows = train_rows()
    for row in rows:
        for key in (
            *("loss", "final_loss", "target", "time_to_target", "ideal_step_seconds"),
            *("step_seconds", "wire_bytes", "step_seconds_quartiles"),
        ):
            if key in row:
                row[key] = None
        for key in ("time_to_target_by_seed", "final_loss_by_seed", "parameters", "run"):
            row.pop(key, None)
    assert "not finite" in Page(page.render(rows)).text
    Page(page.render([row for row in train_rows() if row["row"] == "evaluation"]))
    Page(page.render([row for row in train_rows() if row["row"] == "summary"]))
    Page(page.render([{**COLLECTIVE, "net": "none", "limit_seconds": None, "of_limit": None}]))
    zero = {**COLLECTIVE, "seconds": 0.0, "limit_seconds": 0.0, "method": "torch-fp16-hook"}
    Page(page.render([zero, {**COLLECTIVE, "seconds": 0.0}]))
    Page(page.render([{**KERNEL, "of_limit": 0.0}]))
    Page(page.render([{**TRANSPORT[0], "latency_us": 0.0, "bytes": 1}]))
    Page(page.render([{**SWEPT[0], "seconds": 0.0, "limit_seconds": None}]))
    Page(page.render([{**SWEPT[0], "value": "fp16"}, {**SWEPT[1], "value": "fp32"}]))


def test_a_page_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no rows to report on"):
        page.render([])
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(KERNEL))
    with pytest.raises(ConfigError, match=r"cannot write .*no-folder"):
        report.write([file], tmp_path / "no-folder" / "report.html")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "gradwire\[report\]"'):
        report.check_packages()


def test_the_picture_is_of_one_run(tmp_path: Path) -> None:
    """What it shows, docs/pictures/ has."""
    file, drawn = tmp_path / "rows.jsonl", tmp_path / "picture.svg"
    again = [{**row, "run": {**RUN, "date": "later"}} for row in train_rows()]
    other = [{**row, "task": "image"} for row in train_rows("none")]
    for rows, runs in (
        ([KERNEL], 0),
        ([*train_rows(), *again], 2),
        ([*train_rows(), *other], 2),
    ):
        file.write_text("\n".join(json.dumps(row) for row in rows))
        with pytest.raises(ConfigError, match=f"these files have {runs} such runs"):
            report.picture([file], drawn)
    file.write_text("\n".join(json.dumps(row) for row in train_rows()))
    report.picture([file], drawn)
    assert "gpt, 4 ranks, 300 Mbit/s, 1 ms latency" in Page(drawn.read_text()).text


QUANTITIES: dict[Callable[[Any], str], list[tuple[Any, str]]] = {
    quantities.seconds: [
        (None, "–"), (0, "0 s"), (12.345, "12.3 s"), (0.0456, "45.6 ms"), (7.8e-6, "7.80 µs")
    ],
    quantities.size: [(None, "–"), (0, "0 B"), (999, "999 B"), (2_350_000_000, "2.35 GB")],
    quantities.digits: [
        (0, "0"), (1234.5, "1234"), (0.00123, "0.00123"), (1e-9, "1.00e-09"), (math.inf, "inf")
    ],
    quantities.network: [
        ("300mbit,1ms", "300 Mbit/s, 1 ms latency"), ("none", "loopback, no network emulated"),
        ("1.5gbit,200us", "1.5 Gbit/s, 200 µs latency"), ("<odd>", "<odd>"),
    ],
    quantities.short: [
        (0.0, "0"), (0.001, "0.001"), (1e-4, "1e-4"), (2.5e-5, "2.5e-5"), (2500.0, "2.5k")
    ],
}  # fmt: skip


def test_quantities_are_short() -> None:
    for spelled, cases in QUANTITIES.items():
        assert [(value, spelled(value)) for value, _ in cases] == cases


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# Put into the page for the test: the report itself has no script. A frame has the width of a phone,
# since a window of headless Chromium is never narrower than 500 pixels.
MEASURE = """
<script>
addEventListener("load", () => {
  const view = frames[0], root = view.document.documentElement, wide = [];
  for (const one of view.document.querySelectorAll("body *")) {
    const box = one.getBoundingClientRect();
    if (box.width && box.right > view.innerWidth + 0.5) wide.push(one.tagName);
  }
  for (const one of view.document.querySelectorAll(".wide"))
    if (one.scrollWidth > one.clientWidth) wide.push(one.textContent.trim().slice(0, 40));
  const heights = [...view.document.querySelectorAll("svg text")].map(
    (one) => one.getBoundingClientRect().height);
  const outside = [...view.document.querySelectorAll("svg text")].filter((one) => {
    const svg = one.closest("svg").getBoundingClientRect(), box = one.getBoundingClientRect();
    return box.right > svg.right + 6 || box.left < svg.left - 6;
  }).map((one) => one.textContent);
  const style = view.getComputedStyle(view.document.body);
  document.title = "measured";
  document.body.textContent = JSON.stringify({
    scroll: root.scrollWidth, inner: view.innerWidth, wide, outside, least: Math.min(...heights),
    ground: style.backgroundColor, ink: style.color,
  });
});
</script>
"""


def measured(folder: Path, text: str, width: int, scheme: str) -> dict[str, Any]:
    (folder / "report.html").write_text(text, encoding="utf-8")
    frame = f'<iframe src="report.html" width="{width}" height="900" style="border:0"></iframe>'
    (folder / "frame.html").write_text(f"<body>{frame}{MEASURE}</body>")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={['light', 'dark'].index(scheme) ^ 1}"]
    command += ["--window-size=1800,1000", "--virtual-time-budget=5000"]
    command.append((folder / "frame.html").as_uri())
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<body>(\{.*\})</body>", dom, re.DOTALL)
    assert found is not None, dom[:2000]
    told: dict[str, Any] = json.loads(found[1])
    return told


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian package chromium)")
def test_nothing_is_wider_than_the_screen(tmp_path: Path) -> None:
    long = "gradwire:topk:density=0.01:error_feedback=true:algorithm=hierarchical"
    rows = [
        *EVERYTHING,
        *train_rows("none", losses=(3.0, 3.1)),
        *({**KERNEL, "codec": f"codec{at}", "of_limit": 0.001 * 2**at} for at in range(30)),
    ]
    rows = [{**r, "method": long} if r.get("method") == "gradwire-qsgd4" else r for r in rows]
    text = page.render(rows, "w" * 300)
    for width, scheme in ((400, "light"), (400, "dark"), (1600, "light")):
        found = measured(tmp_path, text, width, scheme)
        assert found["inner"] == width
        assert found["scroll"] <= width
        assert found["wide"] == found["outside"] == []
        assert found["least"] >= 9  # pixels of a line of text in a figure
        dark = sum(map(int, re.findall(r"\d+", found["ground"])[:3])) < 3 * 128
        assert dark == (scheme == "dark")
        assert (sum(map(int, re.findall(r"\d+", found["ink"])[:3])) > 3 * 128) == dark
