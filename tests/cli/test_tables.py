"""Tables for people on terminals of several widths."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from gradwire.cli import tables

STEPS = ["method", "step_seconds", "compute_seconds", "communication_seconds", "exposed_seconds"]
ROWS: list[dict[str, Any]] = [
    {"method": method, **dict.fromkeys(STEPS[1:], 0.0123456)}
    for method in ("torch-fp16-hook", "gradwire-qsgd4")
]
PARTS = [
    {"part": "transport shm", "available": True, "detail": "rings between ranks of one machine"},
    {"part": "lab", "available": False, "detail": "no [network] namespaces here"},
]


def shown(rows: list[dict[str, Any]], columns: list[str], width: int) -> str:
    stream = io.StringIO()
    tables.show(Console(file=stream, width=width), rows, columns)
    return stream.getvalue()


def test_words_stay_whole_at_any_width() -> None:
    words = ["torch-fp16-hook", "gradwire-qsgd4", "communication", "0.01235"]
    parts = [f"{row['part']} {row['available']} {row['detail']}".split() for row in PARTS]
    for width in (8, 20, 40, 45, 60, 80, 200):
        steps = shown(ROWS, STEPS, width)
        table = shown(PARTS, ["part", "available", "detail"], width)
        assert [word for word in words if word not in steps] == [], width
        assert [word for row in parts for word in row if word not in table] == [], width
        if width >= 45:  # a table, which fits the terminal
            lines = table.splitlines()
            assert "┃" in lines[1]
            assert max(map(len, lines)) <= width


def test_a_table_has_a_line_per_row_and_where_none_fits_rows_are_lines() -> None:
    lines = shown(ROWS, STEPS, 80).splitlines()
    assert len([line for line in lines if "gradwire-qsgd4" in line and "0.01235" in line]) == 1
    lines = shown(ROWS, STEPS, 40).splitlines()
    assert lines[:2] == ["method: torch-fp16-hook", "step (s): 0.01235"]
    assert lines[5:7] == ["", "method: gradwire-qsgd4"]


def test_a_table_of_nothing_has_its_headings() -> None:
    assert "wire bytes" in shown([], ["wire_bytes"], 80)
