"""The report: every row in one place, losses told, nothing fetched, nothing unescaped."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gradwire.bench import plots, report, report_format, report_train
from gradwire.errors import ConfigError

METHODS = ("torch-fp32", "torch-fp16-hook", "gradwire-qsgd4")


def train_rows(net: str = "300mbit,1ms", gradwire_step: float = 0.2) -> list[dict[str, Any]]:
    """Rows as `bench train` makes them."""
    common = {"task": "gpt", "net": net, "ranks": 4, "parameters": 10, "metric_name": "bits"}
    steps = dict(zip(METHODS, (1.0, 0.5, gradwire_step), strict=True))
    rows: list[dict[str, Any]] = []
    for method, seconds in steps.items():
        for step in (0, 10, 20):
            rows.append(
                {
                    **common,
                    "row": "evaluation",
                    "method": method,
                    "seed": 0,
                    "step": step,
                    "seconds": step * seconds,
                    "metric": 1.0,
                    "loss": 5.0 - step / 10,
                    "wire_bytes": step,
                    "link_bytes": None,
                    "peak_extra_bytes": None,
                }
            )
    for method, seconds in steps.items():
        late = method == "gradwire-qsgd4" and gradwire_step > 0.5
        rows.append(
            {
                **common,
                "row": "summary",
                "method": method,
                "seeds": [0],
                "steps": 20,
                "target": 3.03,
                "target_from": "torch-fp32",
                "time_to_target": None if late else 20 * seconds,
                "final_metric": 1.0,
                "final_loss": 3.5 if late else 3.0,
                "seconds": 20 * seconds,
                "step_seconds": seconds,
                "ideal_step_seconds": 0.1,
                "wire_bytes": 2_350_000_000,
                "link_bytes": None,
                "peak_extra_bytes": None,
            }
        )
    return rows


COLLECTIVE = {
    "method": "qsgd",
    "algorithm": "sra",
    "transport": "torch_p2p",
    "ranks": 4,
    "net": "1gbit,1ms",
    "numel": 25_000_000,
    "seconds": 0.2,
    "wire_bytes": 19_000_000,
    "limit_seconds": 0.15,
    "of_limit": 0.75,
    "nmse": 0.01,
}
KERNEL = {
    "codec": "qsgd",
    "target": "c",
    "device": "cpu",
    "threads": 1,
    "numel": 1 << 24,
    "op": "encode",
    "seconds": 0.0057,
    "gbps": 11.8,
    "limit_seconds": 0.003,
    "of_limit": 0.5,
}


class Page(html.parser.HTMLParser):
    """Checks that tags nest, and collects text and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href") and v]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    files = []
    for name, rows in {"train": train_rows(), "other": [COLLECTIVE, KERNEL, {"x": 1}]}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
        files.append(file)
    page = tmp_path / "report.html"
    report.write(files, page, "A <title>", ["A & note"])
    text = page.read_text()
    parsed = Page(text)
    assert all(link.startswith("#") for link in parsed.links)
    assert not re.search(r"url\((?!#)", text)
    assert "<script" not in text
    for expected in ("A <title>", "A & note", "Training gpt", "All-reduce of 25.0 M", "Kernels"):
        assert expected in parsed.text
    assert "15 rows" in parsed.text
    assert text.count("<svg") == 4


def test_every_row_lands_in_one_section() -> None:
    odd = [{"transport": "shm", "bytes": 8, "latency_us": 1.5}, {"a": None, "b": True}]
    made = report.sections([*train_rows(), *train_rows("none"), COLLECTIVE, KERNEL, *odd])
    titles = [section.title for section in made]
    assert titles == [
        "Training gpt: 4 ranks, 300mbit,1ms",
        "Training gpt: 4 ranks, loopback, nothing shaped",
        "All-reduce of 25.0 M values: 4 ranks, 1gbit,1ms",
        "Kernels",
        "Other rows",
    ]
    assert [len(table.rows) for section in made for table in section.tables] == [3, 3, 1, 1, 1, 1]
    for section in made:
        for table in section.tables:
            assert all(len(row) == len(table.headings) for row in table.rows)


def test_gains_are_told() -> None:
    told = " ".join(report_train.findings(train_rows()[-3:]))
    assert "gradwire-qsgd4 is first to the target loss of 3.030: 4.00 s" in told
    assert "torch-fp16-hook takes 10.0 s" in told
    assert "0.40 of the step time of torch-fp16-hook: faster than 16 bit here" in told


def test_losses_are_told_as_plainly() -> None:
    rows = train_rows(gradwire_step=0.8)
    told = " ".join(report_train.findings(rows[-3:]))
    assert "gradwire-qsgd4 did not reach the target in 20 steps" in told
    assert "1.60 of the step time of torch-fp16-hook: no faster than 16 bit here" in told
    cells = [cell for row in report.sections(rows)[0].tables[0].rows for cell in row]
    bad = {cell.text for cell in cells if cell.verdict == "bad"}
    assert bad == {"1.60×", "+16.67 %", "not reached"}


def test_rows_without_values_are_drawn_all_the_same() -> None:
    rows = train_rows()
    for row in rows:
        for key in ("loss", "final_loss", "target", "time_to_target", "ideal_step_seconds"):
            if key in row:
                row[key] = None
    Page(report.render(rows))
    Page(report.render([row for row in train_rows() if row["row"] == "evaluation"]))
    Page(report.render([{**COLLECTIVE, "net": "none", "limit_seconds": None, "of_limit": None}]))


def test_plots_take_the_pages_colour_and_differ_in_ids() -> None:
    rows = train_rows()
    first = plots.curves(rows[:9], 3.03)
    assert first == plots.curves(rows[:9], 3.03)
    assert "currentColor" in first
    assert "#010203" not in first
    ids = [
        set(re.findall(r'id="(clip|[a-z]\w{10,})"', svg))
        for svg in (first, plots.step_times(rows[-3:]))
    ]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot read rows from"),
        ("", "holds no rows"),
        ('{"a": 1}\n{"a"', "line 2 is not JSON"),
        ("[1]", "line 1 is not a JSON object but list"),
        (b"\xff\xfe", "cannot read rows from"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, content: Any, complaint: str) -> None:
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=complaint) as error:
        report.write([file], tmp_path / "report.html")
    assert "rows.jsonl" in str(error.value)
    assert not (tmp_path / "report.html").exists()


def test_missing_packages_are_told_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'gradwire\[report\]'"):
        report.check_packages()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0 s"), (12.345, "12.3 s"), (0.0456, "45.6 ms"), (7.8e-6, "7.80 µs")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert report_format.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0 B"), (999, "999 B"), (2_350_000_000, "2.35 GB")]
)
def test_sizes(value: float | None, text: str) -> None:
    assert report_format.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234.5, "1234"), (0.00123, "0.00123"), (1e-9, "1.00e-09"), (float("inf"), "inf")],
)
def test_digits(value: float, text: str) -> None:
    assert report_format.digits(value) == text
