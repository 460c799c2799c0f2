"""Rows that are not as their kind is, and files that are no rows: one ConfigError, no traceback."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_rows import CHANGED, COLLECTIVE, RUN

from gradwire.errors import ConfigError
from gradwire_tools import report
from gradwire_tools.report import page, rows
from products import one_in

BAD = (None, "text", [], [None], {}, True, -1, 0, 1e308, 5e-324, math.inf, -math.inf, math.nan)


def changes(row: dict[str, Any], turn: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row with each key removed, and with each value replaced by two of `BAD` in rotation."""
    for at, key in enumerate(row):
        yield f"without {key}", {k: v for k, v in row.items() if k != key}
        for value in (BAD[(turn + at) % len(BAD)], BAD[(turn + at + 7) % len(BAD)]):
            yield f"{key}={value!r}", {**row, key: value}


def complaint(row: dict[str, Any]) -> str:
    """What is said of a row; "" if it is as its kind is."""
    try:
        rows.check(row, rows.kind_of(row), "file, line 1")
    except ConfigError as error:
        return str(error)
    return ""


def test_every_kind_is_fuzzed() -> None:
    found = [rows.kind_of(whole[place]) for whole, places in CHANGED.values() for place in places]
    written = [kind for kind in rows.KINDS if kind.marks != {"part", "available", "step_seconds"}]
    assert set(map(id, found)) == set(map(id, written))


@pytest.mark.parametrize("turn", one_in(len(BAD), range(len(BAD))))
def test_a_changed_key_makes_a_page_or_one_error_that_names_it(turn: int) -> None:
    """Each key is removed, or has another bad value than its neighbour; over all turns, every."""
    for name, (whole, places) in CHANGED.items():
        for place in places:
            for what, changed in changes({**whole[place], "run": RUN}, turn):
                told = complaint(changed)
                if told:
                    assert told.startswith("file, line 1")
                    key = what.split("=")[0].removeprefix("without ")
                    assert repr(key) in told, (name, what)
                    continue
                # Raises nothing, ConfigError included.
                made = page.sections([*whole[:place], changed, *whole[place + 1 :]])
                charts = [q.chart for section in made for q in section.questions]
                assert not re.search(r"\b(nan|inf)\b", repr(charts)), (name, what)


WRONG = [
    ("[" * 100_000, "line 1 is nested deeper than 50 levels"),
    ('{"a":' * 100_000, "line 1 is nested deeper than 50"),
    ('{"a": ' + "[" * 200 + "]" * 200 + "}", "line 1 is nested deeper than 50 levels"),
    ("{}", "line 1: the row has no keys"),
    ('{"a": 1}\n{"a": Infinity}', "line 2 is not JSON: Infinity is no number of JSON"),
    ('{"a": NaN}', "line 1 is not JSON: NaN is no number of JSON"),
    ('{"a": 1e999}', "line 1 is not JSON: 1e999 is too large"),
    (f'{{"a": {"9" * 5000}}}', "line 1 is not JSON"),
    ('{"a": 1}\n{"a" 2}', "line 2 is not JSON: Expecting ':' delimiter at column 6$"),
    (r'{"a": "\ud800"}', "line 1 is not JSON"),
    ('{"a": 1, "run": [1]}', r"line 1: 'run' is \[1\]"),
    (b'{"a": 1}\n\xff', "line 2 is not UTF-8 text"),
    ('{"a": 1}\n{"a": 2}\n{"a": 1}', "line 3 is the same as line 1: leave one of them out"),
    ("", "holds no rows"),
    ("[1]", "line 1 is not a JSON object but list"),
    ("null", "line 1 is not a JSON object but NoneType"),
    ("5", "line 1 is not a JSON object but int"),
    ('{"a": "b\n', "line 1 is not JSON: Unterminated string starting at column 7$"),
    *(
        (cut, f"{line} is not JSON: the last line is incomplete: delete it, or run again with --r")
        for cut, line in (('{"a": 1}\n{"a": "b', "line 2"), ('{"a": {"b": 1}', "line 1"))
    ),
]


def test_files_that_hold_no_rows_are_named(tmp_path: Path) -> None:
    file, made = tmp_path / "rows.jsonl", tmp_path / "report.html"
    for content, told in WRONG:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError, match=told) as error:
            report.write([file], made)
        assert str(file) in str(error.value)
    for path, told in (
        (Path("/dev/zero"), "/dev/zero, line 1 is longer than 16 MiB: not a row"),
        (tmp_path, f"^cannot read rows from {tmp_path}: is a directory$"),
        (tmp_path / "none.jsonl", "cannot read rows from .*none.jsonl"),
    ):
        with pytest.raises(ConfigError, match=told):
            report.write([path], made)
    assert not made.exists()


def test_an_error_names_file_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    bad = {**COLLECTIVE, "wire_bytes": -1}
    file.write_text(f"{json.dumps(COLLECTIVE)}\n\n{json.dumps(bad)}\n")
    with pytest.raises(ConfigError) as error:
        report.write([file], tmp_path / "page.html")
    assert str(error.value) == (
        f"{file}, line 3, a row of `gradwire bench collectives`: 'wire_bytes' is -1, "
        "where a number of 0 or more is needed"
    )
    # A line may hold every character of json.
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": "one\u2028line, \\ud83d\\ude00"}\n', encoding="utf-8")
    assert rows.read(file) == [{"a": "one\u2028line, \U0001f600"}]


def test_a_line_is_in_one_file_only(tmp_path: Path) -> None:
    """Or tells no run, and so may be of two: examinations of one machine find the same."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"

    def complaint(*files: Path) -> str:
        with pytest.raises(ConfigError) as error:
            report.write(files, tmp_path / "page.html")
        with pytest.raises(ConfigError, match=re.escape(str(error.value))):
            report.table(files)
        return str(error.value)

    shared = json.dumps({**COLLECTIVE, "run": RUN})
    first.write_text(f"{shared}\n")
    second.write_text(f'{{"a": 1}}\n{shared}')
    ending = f"is the same as {first}, line 1: leave one of them out"
    assert complaint(first, second) == f"{second}, line 2 {ending}"
    assert complaint(first, first) == f"{first}, line 1 {ending}"
    for file in (first, second):
        file.write_text('{"a": 1}\n')
    assert rows.read(first, second) == [{"a": 1}] * 2
    assert complaint(first, first) == f"{first}, line 1 {ending}"
