"""Tables for people on terminals of several widths."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from gradwire_tools.cli import tables

STEPS = ["method", "step_seconds", "compute_seconds", "communication_seconds", "exposed_seconds"]
ROWS: list[dict[str, Any]] = [
    {"method": method, **dict.fromkeys(STEPS[1:], 0.0123456)}
    for method in ("torch-fp16-hook", "qsgd:bits=4")
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
    words = ["torch-fp16-hook", "qsgd:bits=4", "network", "12.35"]
    said = {True: "yes", False: "no"}
    parts = [f"{row['part']} {said[row['available']]} {row['detail']}".split() for row in PARTS]
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
    assert len([line for line in lines if "qsgd:bits=4" in line and "12.35" in line]) == 1
    lines = shown(ROWS, [*STEPS, "method"], 30).splitlines()
    assert lines[:2] == ["method: torch-fp16-hook", "step (ms): 12.35"]
    assert lines[6:8] == ["", "method: qsgd:bits=4"]


def test_a_table_of_nothing_has_its_headings() -> None:
    assert "sent (MB)" in shown([], ["wire_bytes"], 80)


def test_what_all_rows_share_is_told_once_where_the_table_would_not_fit() -> None:
    lines = shown(ROWS, STEPS, 40).splitlines()
    words = " ".join(lines[:3]).split()
    assert words[:8] == ["In", "all", "rows:", "step", "(ms)", "12.35,", "compute", "(ms)"][:8]
    assert any(line.startswith("┏") for line in lines)
    assert "In all rows" not in shown(ROWS, STEPS, 80)


def test_units_are_the_same_everywhere() -> None:
    cells = {
        "seconds": (1.5, "time (ms)", "1500"), "step_seconds": (0.0123, "step (ms)", "12.3"),
        "latency_us": (120.5, "latency (ms)", "0.1205"), "bandwidth": (2e8, "Mbit/s", "200"),
        "bytes": (1024, "size (MB)", "0.001024"), "wire_bytes": (15e7, "sent (MB)", "150"),
        "peak_extra_bytes": (5, "peak extra (MB)", "5e-06"), "exact": (True, "exact", "yes"),
        "alpha": (2e-3, "latency (ms)", "2"), "beta": (8e-9, "1 MB (ms)", "8"),
        "state_bytes_per_value": (4.0, "state bytes per value", "4"),
    }  # fmt: skip
    for key, (value, heading, cell) in cells.items():
        table = shown([{key: value}], [key], 80)
        assert heading in table, key
        assert f" {cell} " in table, key


# What the widest cells of commands are; other columns have numbers.
WIDEST: dict[str, list[Any]] = {
    "method": ["qsgd:bits=4", "torch-fp16-hook"], "net": ["100mbit,1ms", "1gbit,1ms"],
    "numel": [16777216, 100000], "codec": ["hardthreshold", "qsgd"], "target": ["eager", "c"],
    "op": ["decode_add", "encode_ef"], "algorithm": ["hierarchical", "sra"], "exact": [True, False],
    "value": ["10gbit,50us", "1gbit"], "best_method": ["qsgd:bits=4", "bf16"], "ranks": [4, 4],
    "transport": ["shm", "shm"], "part": ["a long part of it", "wire"],
}  # fmt: skip
COMMANDS = {
    "doctor": "method step_seconds compute_seconds communication_seconds exposed_seconds",
    "kernels": "codec target threads op numel seconds gbps of_limit",
    "collectives": "method net numel seconds wire_bytes of_limit nmse",
    "profile": "method part seconds steps transport ranks numel",
    "sim": "value codec algorithm ranks seconds wire_bytes of_limit exact",
    "sharded": "value method seconds weights_wire_bytes gradients_wire_bytes ratio of_limit",
    "validate": "ranks net method algorithm measured_seconds simulated_seconds error",
    "planner": "net nbytes method seconds best_method ratio partition_ratio",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_hold_at_80_columns(command: str) -> None:
    columns = COMMANDS[command].split()
    rows = [{c: WIDEST.get(c, [0.9876, 0.0123])[n] for c in columns} for n in (0, 1)]
    lines = shown(rows, columns, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("┏" in line or line.count("  ") > 3 for line in lines), "a list of lines, no table"
