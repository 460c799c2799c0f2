"""The report's page: every row in one section, what was run, nothing fetched, nothing unescaped."""

from __future__ import annotations

import html.parser
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_rows import COLLECTIVE, EVERYTHING, KERNEL, RUN, SWEPT, TRANSPORT, UNKNOWN, train_rows

from gradwire.errors import ConfigError
from gradwire_tools import report
from gradwire_tools.bench import quantities
from gradwire_tools.report import page


class Page(html.parser.HTMLParser):
    """Checks that tags nest, and collects tags, text and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.titled = 0
        self.names: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open
        assert len(set(self.names)) == len(self.names)
        assert {link.removeprefix("#") for link in self.links} <= {*self.names}  # nothing else
        assert self.titled == text.count(' role="img"')

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        self.names += [str(v) for k, v in attrs if k == "id"]
        self.titled += tag == "title" and "svg" in self.open

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    files = []
    for name, rows in {"train": train_rows(), "other": [COLLECTIVE, KERNEL, *UNKNOWN]}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
        files.append(file)
    made = tmp_path / "report.html"
    report.write(files, made, "A <title>")
    text = made.read_text()
    parsed = Page(text)
    assert "url(" not in text
    assert "script" not in parsed.tags
    for expected in ("A <title>", "Training gpt", "All-reduce of 25.0 M values", "Kernels"):
        assert expected in parsed.text
    assert "16 rows" in parsed.text
    assert parsed.tags.count("svg") == 7


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
    assert not {"script", "img", "iframe"} & set(parsed.tags)
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


def test_the_picture_is_the_curves_of_one_run(tmp_path: Path) -> None:
    file, drawn = tmp_path / "rows.jsonl", tmp_path / "picture.svg"
    file.write_text("\n".join(json.dumps(row) for row in train_rows()))
    report.picture([file], drawn)
    text = drawn.read_text()
    parsed = Page(text)
    assert text.startswith("<svg ")
    assert "training time, s" in parsed.text
    assert "gpt, 4 ranks, 300 Mbit/s, 1 ms latency" in parsed.text
    assert "prefers-color-scheme: dark" in text
    assert re.search(r'width="\d+(\.\d+)?" height="\d', text)
    again = [{**row, "run": {**RUN, "date": "later"}} for row in train_rows()]
    other = [{**row, "task": "image"} for row in train_rows("none")]
    for rows, runs in (([KERNEL], 0), ([*train_rows(), *again], 2), ([*train_rows(), *other], 2)):
        file.write_text("\n".join(json.dumps(row) for row in rows))
        with pytest.raises(ConfigError, match=f"these files have {runs} such runs"):
            report.picture([file], drawn)


def test_of_several_networks_the_picture_is_the_map_of_gains(tmp_path: Path) -> None:
    file, drawn = tmp_path / "rows.jsonl", tmp_path / "picture.svg"
    rows = [*train_rows("none"), *train_rows()]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    report.picture([file], drawn)
    text = Page(drawn.read_text()).text
    assert "gpt, 4 ranks: gain over 16 bit" in text
    assert "▼ 4 times slower, or more" in text
    assert text.index("300 Mbit/s") < text.index("loopback")


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
