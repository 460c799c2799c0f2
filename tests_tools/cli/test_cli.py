"""The command line: rows for programs, tables for people on terminals of several widths."""

from __future__ import annotations

import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from command_line import rows_of, run
from gradwire import codecs
from gradwire.aggregators import registry
from gradwire.lang import gpu
from gradwire.lang.native import jit
from gradwire_tools import doctor
from gradwire_tools.cli import main, tables


def test_doctor_says_what_is_there_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("doctor")
    assert all(row.keys() == {"part", "available", "detail"} for row in rows)
    parts = {row["part"]: row for row in rows}
    assert parts["target eager"]["available"]
    assert parts["transport torch_p2p"]["available"]
    monkeypatch.setenv("GRADWIRE_CC", "no-such-compiler")
    parts = {row["part"]: row for row in rows_of("doctor")}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lacking = {row["part"]: row for row in doctor.examine()}
    for part, said in (
        ("report", 'jinja2 and matplotlib not installed: pip install "gradwire[report]"'),
        ("gw.keras", 'keras not installed: pip install "gradwire[keras]"'),
        ("--plot", 'matplotlib not installed: pip install "gradwire[report]"'),
        (
            "policies bayes, flexible",
            'optuna and pymoo not installed: pip install "gradwire[adapt]"',
        ),
    ):
        assert (lacking[part]["available"], lacking[part]["detail"]) == (False, said)
    for part in ("compiler", "target c"):
        assert not parts[part]["available"]
        assert "no-such-compiler" in parts[part]["detail"]
    said = parts["target c"]["detail"]
    assert "; attach sends bf16 in place of codecs on the CPU: install a C compiler (apt " in said


def test_codec_list_has_a_row_for_each(tmp_path: Path) -> None:
    found = rows_of("codec", "list")
    rows = {row["codec"]: row for row in found}
    assert {"identity", "fp16", "bf16", "qsgd", "terngrad"} <= rows.keys()
    for row in rows.values():
        assert row.keys() == {"codec", "kind", "operators", "lines", "options"}
        assert row["lines"] <= (25 if row["kind"] == "codec" else 60)
        assert len(row["operators"]) <= 6
    assert rows["qsgd"]["options"]["bits"] == 4
    assert rows["qsgd"]["kind"] == "codec"
    assert rows["powersgd"]["kind"] == rows["artopk"]["kind"] == "aggregator"
    assert rows["powersgd"]["options"] == {"rank": 8, "warm": True, "orthogonal": "cholesky"}
    # The same rows go to a file, and then a table to people.
    file = tmp_path / "rows.jsonl"
    said = run("codec", "list", "--json", str(file)).out
    assert "qsgd" in said
    assert "unbiased=false" in said, "as users write it"
    assert [json.loads(line) for line in file.read_text().splitlines()] == found


def test_codec_show_fits_on_a_screen_and_prints_stages() -> None:
    for name in [*codecs.REGISTRY, *registry.REGISTRY]:
        lines = run("codec", "show", name).out.splitlines()
        assert len(lines) <= 24, name
        assert max(map(len, lines)) < 80, name
        options = {row["codec"]: row["options"] for row in [*codecs.listing(), *registry.listing()]}
        for option, default in options[name].items():
            assert f" {option}={default}" in "\n".join(lines), name
    shown = run("codec", "show", "qsgd:bits=2").out
    for part in (
        "qsgd:bits=2: codec\n", "  bits=2 (default 4): of a code, 1 to 8 ", "  block=128: values",
        "bits per value: 2.25 of ", "bias: unbiased", "paper: CGX 2.3 and 4.3; Alistarh",
    ):  # fmt: skip
        assert part in shown
    shown = run("codec", "show", "powersgd:rank=2").out
    assert "bits per value: 0.125 of " in shown
    assert "bias: biased, and so always with error feedback\npaper: THESIS 2.2.3, UTIL" in shown
    # The stages of its compilation.
    shown = run("codec", "show", "qsgd:bits=2", "--ir").out
    assert "reduce[min]" in shown
    assert "uint2" in shown
    assert "int encode(" not in shown
    assert "int encode(" in run("codec", "show", "qsgd:bits=2", "--c").out


def test_codec_cache_clears_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    kept = [tmp_path / name for name in ("probe-1.json", "libmine.so", "notes")]
    for path in kept:
        path.write_text("not a kernel")
    library = jit.load("int answer(void) { return 42; }\n")
    gpu.load("answer = 42\n")
    made = set(tmp_path.rglob("*.*")) - {*kept, tmp_path / "__pycache__"}
    nbytes = sum(path.stat().st_size for path in made)
    assert {path.suffix for path in made} >= {".so", ".lock", ".py"}
    row = {"folder": str(tmp_path), "files": len(made), "bytes": nbytes}
    assert rows_of("codec", "cache") == [{**row, "removed": False}]
    assert rows_of("codec", "cache", "--clear") == [{**row, "removed": True}]
    assert {*kept} == {path for path in tmp_path.rglob("*") if path.is_file()}
    assert library.answer() == 42
    assert rows_of("codec", "cache")[0]["files"] == 0


@pytest.mark.parametrize("module", ["gradwire", "gradwire_tools.cli"])
def test_the_program_ends_with_the_exit_code(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python -m gradwire`."""
    monkeypatch.setattr(sys, "argv", ["gradwire", "codec", "show", "qsdg"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    (said,) = told.err.splitlines()
    assert "qsdg" in said


def test_without_its_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n.startswith("gradwire_tools.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "gradwire: the command line needs typer, which is not installed: pip install "
        '"gradwire[cli]", or in a clone pip install ".[cli]"\n'
    )


def test_lab_run_passes_the_exit_code_on() -> None:
    script = "echo rank $RANK; exit 3"
    ran = run("lab", "run", "--nodes", "2", "--net", "none", "--", "sh", "-c", script)
    assert ran.code == 3
    assert "[node 1] rank 1" in ran.out


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
    assert "sent (MB)" in shown([], ["wire_bytes"], 80)  # of no rows the headings
    # What all rows share is told once where the table would not fit.
    lines = shown(ROWS, STEPS, 40).splitlines()
    assert "".join(lines[:3]).startswith("In all rows: step (ms) 12.35, compute (ms) 12.35")
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
    "rate": ["10gbit", "1gbit"], "best_method": ["qsgd:bits=4", "bf16"], "ranks": [4, 4],
    "transport": ["shm", "shm"], "part": ["a long part of it", "wire"],
}  # fmt: skip
COMMANDS = {
    "doctor": "method step_seconds compute_seconds communication_seconds exposed_seconds",
    "kernels": "codec target threads op numel seconds gbps of_limit",
    "collectives": "method net numel seconds wire_bytes of_limit nmse",
    "profile": "method part seconds steps transport ranks numel",
    "sim": "rate codec algorithm seconds wire_bytes of_limit exact",
    "sharded": "rate method seconds weights_wire_bytes gradients_wire_bytes ratio of_limit",
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
