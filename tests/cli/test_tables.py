"""Tables for people on terminals of several widths."""

from __future__ import annotations

import io
from typing import Any

import pytest
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


@pytest.mark.parametrize("width", [8, 20, 40, 60, 80, 200])
def test_words_stay_whole(width: int) -> None:
    steps = shown(ROWS, STEPS, width)
    for word in ("torch-fp16-hook", "gradwire-qsgd4", "communication", "0.01235"):
        assert word in steps
    parts = shown(PARTS, ["part", "available", "detail"], width)
    for row in PARTS:
        for word in f"{row['part']} {row['available']} {row['detail']}".split():
            assert word in parts


@pytest.mark.parametrize("width", [45, 60, 80, 200])
def test_a_table_fits_the_terminal(width: int) -> None:
    lines = shown(PARTS, ["part", "available", "detail"], width).splitlines()
    assert "┃" in lines[1]
    assert max(map(len, lines)) <= width


def test_a_terminal_of_80_has_a_line_per_method() -> None:
    lines = shown(ROWS, STEPS, 80).splitlines()
    assert len([line for line in lines if "gradwire-qsgd4" in line and "0.01235" in line]) == 1


def test_rows_are_lines_where_no_table_fits() -> None:
    lines = shown(ROWS, STEPS, 40).splitlines()
    assert lines[:2] == ["method: torch-fp16-hook", "step (s): 0.01235"]
    assert lines[5:7] == ["", "method: gradwire-qsgd4"]


def test_a_table_of_nothing_has_its_headings() -> None:
    assert "wire bytes" in shown([], ["wire_bytes"], 80)
