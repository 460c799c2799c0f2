"""The program: version, completion, exit codes, progress."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradwire import __version__
from gradwire.bench import train
from gradwire.bench.workers import WorkerError
from gradwire.cli import program
from gradwire.cli.output import output
from products import one_in

GRADWIRE = [sys.executable, "-m", "gradwire.cli"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run(["--version"]) == 0
    assert capsys.readouterr().out == f"gradwire {__version__}\n"


@pytest.mark.parametrize("shell", one_in(3, ["bash", "zsh", "fish"]))
def test_completion_names_the_program(shell: str) -> None:
    environment = {**os.environ, "_GRADWIRE_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        GRADWIRE, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert "_GRADWIRE_COMPLETE" in done.stdout


def test_completion_knows_the_commands() -> None:
    environment = {**os.environ, "_GRADWIRE_COMPLETE": "complete_bash"}
    environment |= {"COMP_WORDS": "gradwire bench c", "COMP_CWORD": "2"}
    done = subprocess.run(
        GRADWIRE, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["collectives"]


def test_work_that_fails_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise WorkerError("rank 1 failed")

    monkeypatch.setattr(train, "run", fail)
    assert program.run(["bench", "train", "--quick", "--net", "none"]) == program.FAILED
    assert capsys.readouterr().err.splitlines()[-1] == "gradwire: rank 1 failed"


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = " ".join(GRADWIRE) + " codec list --json - | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["codec"] == "identity"
    assert "Error" not in done.stderr


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    with output(str(tmp_path / "rows")) as out:
        out.row({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": float("-inf")}})
    row = json.loads((tmp_path / "rows").read_text())
    assert row == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def measured(advance: Any) -> list[dict[str, Any]]:
    advance("turns", 0, 2)
    advance("turns", 1, 2)
    return [{"a": 1}]


def test_progress_is_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with output("-") as out:
        out.measured(measured, ["a"])
    printed = capsys.readouterr()
    assert printed.out == '{"a": 1}\n'
    assert printed.err.splitlines()[0] == "turns: 0 of 2"


def test_a_full_disk_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here, on which nothing can be written")
    assert program.run(["codec", "list", "--json", "/dev/full"]) == program.BAD_INPUT
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "gradwire: --json /dev/full: cannot be written (No space left on device)"
    ]


def test_lines_name_what_runs_and_are_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    codecs = ["fp16", "qsgd", "topk"]

    def measure(advance: Any) -> list[dict[str, Any]]:
        for index, codec in enumerate(codecs):
            advance(f"kernels of {codec}", index, len(codecs))
        return [{"a": 1}]

    with output("-") as out:
        out.measured(measure, ["a"])
    lines = [line for line in capsys.readouterr().err.splitlines() if " of " in line]
    assert lines == ["kernels of fp16: 0 of 3"]


LONG = [
    ["bench", "kernels", "--codec", "fp16", "--target", "eager", "--quick"],
    ["bench", "transports", "--bytes", "64", "--quick"],
    ["bench", "collectives", "--ranks", "2", "--net", "none", "--numel", "1000", "--quick"],
    ["bench", "profile", "--numel", "2000", "--quick"],
    ["bench", "aggregators", "--task", "image", "--methods", "powersgd", "--quick"],
    ["codec", "build", "--codec", "fp16", "--output", "made", "--isa", "x86-64-v2"],
]


@pytest.mark.multiprocess
@pytest.mark.parametrize("command", one_in(6, LONG))
def test_long_commands_have_lines_or_bars(command: list[str], tmp_path: Path) -> None:
    """Rows alone on standard output; on standard error lines, or a bar on a terminal."""
    plain = subprocess.run(
        [*GRADWIRE, *command, "--json", "-"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    assert all(isinstance(json.loads(row), dict) for row in plain.stdout.splitlines())
    assert ": 0 of " in plain.stderr
    assert "\x1b[" not in plain.stderr
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*GRADWIRE, *command], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(240) == 0, shown
    assert "━".encode() in shown
    assert b": 0 of " not in shown
