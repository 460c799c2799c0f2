"""The command line: rows for programs, tables for people, one line for mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.errors import ConfigError


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    """The rows on standard output, on which there may be nothing else."""
    result = CliRunner().invoke(app, [*arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_doctor_says_what_is_there() -> None:
    rows = rows_of("doctor")
    assert all(row.keys() == {"part", "available", "detail"} for row in rows)
    parts = {row["part"]: row for row in rows}
    assert parts["target eager"]["available"]
    assert parts["transport torch_p2p"]["available"]


def test_doctor_says_what_is_missing_and_why() -> None:
    command = [sys.executable, "-m", "gradwire.cli", "doctor", "--json", "-"]
    environment = {**os.environ, "GRADWIRE_CC": "no-such-compiler"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = {row["part"]: row for row in map(json.loads, done.stdout.splitlines())}
    for part in ("compiler", "target c"):
        assert not rows[part]["available"]
        assert "no-such-compiler" in rows[part]["detail"]


def test_codec_list_has_a_row_for_each() -> None:
    rows = {row["codec"]: row for row in rows_of("codec", "list")}
    assert {"identity", "fp16", "bf16", "qsgd", "terngrad"} <= rows.keys()
    for row in rows.values():
        assert row.keys() == {"codec", "kind", "operators", "lines", "options"}
        assert row["lines"] <= (25 if row["kind"] == "codec" else 60)
        assert len(row["operators"]) <= 6
    assert rows["qsgd"]["options"]["bits"] == 4
    assert rows["qsgd"]["kind"] == "codec"
    assert rows["powersgd"]["kind"] == rows["artopk"]["kind"] == "aggregator"
    assert rows["powersgd"]["options"] == {"rank": 2, "warm": True, "orthogonal": "cholesky"}


def test_codec_show_prints_stages() -> None:
    shown = CliRunner().invoke(app, ["codec", "show", "qsgd:bits=2", "--ir"])
    assert "reduce[min]" in shown.output
    assert "uint2" in shown.output
    assert "int encode(" not in shown.output
    shown = CliRunner().invoke(app, ["codec", "show", "qsgd:bits=2", "--c"])
    assert "int encode(" in shown.output


def test_rows_go_to_a_file_and_a_table_to_people(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    result = CliRunner().invoke(app, ["codec", "list", "--json", str(file)])
    assert "qsgd" in result.stdout
    assert [json.loads(line)["codec"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["codec", "show", "qsdg"], "qsdg"),
        (["codec", "show", "qsgd:bitz=2"], "bitz"),
        (["codec", "show", ""], "'': expected NAME or NAME:OPTION=VALUE:..."),
        (["codec", "show", "powersgd:rank=2"], "aggregator, which has no stages"),
        (["bench", "kernels", "--codec", "qsdg"], "qsdg"),
        (["bench", "kernels", "--target", "cuda"], "cuda"),
        (["bench", "collectives", "--methods", "magic"], "magic"),
        (["bench", "collectives", "--net", "1gbyte"], "1gbyte"),
        (["bench", "collectives", "--ranks", "1", "--net", "none"], "one rank sends nothing"),
        (["bench", "profile", "--ranks", "1"], "one rank sends nothing"),
        (["bench", "collectives", "--codec", "qsdg", "--net", "none"], "qsdg"),
        (["bench", "collectives", "--methods", "gradwire:qsgd:bits=99"], "bits=99"),
        (["bench", "collectives", "--numel", "0", "--net", "none"], "--numel 0"),
        (["bench", "kernels", "--threads", "0"], "--threads 0"),
        (["bench", "kernels", "--threads", "99999"], "--threads 99999"),
        (["bench", "collectives", "--ranks", "4", "--per-node", "4"], "share one machine"),
        (["bench", "profile", "--numel", "29"], "--numel 29"),
        (["bench", "profile", "--methods", "gradwire:powersgd"], "several collectives"),
        (["bench", "aggregators", "--ranks", "1"], "one rank sends nothing"),
        (["bench", "aggregators", "--methods", "powersgd:rank=0"], "rank=0"),
        (["bench", "train", "--nodes", "1"], "one node sends nothing"),
        (["bench", "train", "--seeds", "0,-1"], "seed -1"),
        (["sim", "--model", "1e30"], "1e30"),
        (["sim", "--model", "1e999"], "1e999"),
        (["sim", "--ranks", "1"], "one rank sends nothing"),
        (["bench", "kernels", "--threads", ""], "--threads is empty"),
        (["bench", "train", "--seeds", ""], "--seeds is empty"),
        (["bench", "train", "--methods", ","], "--methods is empty"),
        (["bench", "train", "--net", ""], "network ''"),
        (["bench", "kernels", "--threads", "a"], "'a' is not a whole number"),
        (["bench", "kernels", "--threads", "1,1.5"], "'1.5' is not a whole number"),
        (["bench", "train", "--seeds", "0,x"], "--seeds 0,x: 'x'"),
        (["bench", "train", "--nodes", "0"], "nodes is 0"),
        (["bench", "profile", "--bucket-mb", "-1"], "--bucket-mb -1"),
        (["bench", "profile", "--numel", "0"], "--numel 0"),
        (["lab", "run", "--net", "none", "--timeout", "-1", "--", "true"], "timeout=-1"),
        (["doctor", "--ranks", "1"], "one rank sends nothing"),
        (["doctor", "--numel", "5"], "give --ranks too"),
        (["sim", "--threads", "0"], "--threads 0"),
        (["bench", "train", "--task", "chess"], "chess"),
        (["report", "no-such-file"], "no-such-file"),
    ],
)
def test_mistakes_are_named(arguments: list[str], match: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError), result.output
    assert match in str(result.exception)


def test_a_mistake_is_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "gradwire.cli", "codec", "show", "qsdg"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "qsdg" in done.stderr


def test_lab_run_passes_the_exit_code_on() -> None:
    script = "import os; print('rank', os.environ['RANK']); raise SystemExit(3)"
    command = [sys.executable, "-m", "gradwire.cli", "lab", "run", "--nodes", "2", "--net", "none"]
    command += ["--", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "[node 1] rank 1" in done.stdout
