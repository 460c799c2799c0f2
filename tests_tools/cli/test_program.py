"""The program: version, completion, exit codes, progress; and Ctrl-C or SIGTERM in the midst of a
long command: one line, an exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_line import run
from gradwire import __version__
from gradwire_tools.bench.progress import progress
from gradwire_tools.bench.train import run as training
from gradwire_tools.bench.workers import WorkerError
from gradwire_tools.cli import output as output_module
from gradwire_tools.cli import program
from gradwire_tools.cli.output import output
from leftovers import marked, network_namespaces, until
from products import EXHAUSTIVE

GRADWIRE = [sys.executable, "-m", "gradwire_tools.cli"]


def test_version_and_completion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run("--version")
    assert (ran.code, ran.out) == (0, f"gradwire {__version__}\n")

    def completed(instruction: str) -> str:
        monkeypatch.setenv("_GRADWIRE_COMPLETE", instruction)
        with pytest.raises(SystemExit) as ended:
            program.run([])
        assert ended.value.code == 0
        return capsys.readouterr().out

    for shell in ("bash", "zsh", "fish"):
        assert "_GRADWIRE_COMPLETE" in completed(f"source_{shell}")
    monkeypatch.setenv("COMP_WORDS", "gradwire bench c")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert completed("complete_bash").split() == ["collectives"]


def test_how_work_ends_is_the_exit_code_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(work: Any) -> tuple[int, str]:
        monkeypatch.setattr(training, "run", lambda *_, **__: work())
        ran = run("bench", "train", "--quick", "--net", "none")
        return ran.code, ran.err.splitlines()[-1]

    def fail(error: BaseException) -> None:
        raise error

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    failed = ends(lambda: fail(WorkerError("rank 1 failed")))
    assert failed == (program.FAILED, "gradwire: rank 1 failed")
    assert ends(lambda: fail(KeyboardInterrupt())) == (130, "gradwire: interrupted")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert ends(terminated) == (143, "gradwire: terminated")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # once for all
    finally:
        signal.signal(signal.SIGTERM, before)


def terminated() -> None:
    assert callable(signal.getsignal(signal.SIGTERM)), "SIGTERM would end the process"
    signal.raise_signal(signal.SIGTERM)


def test_a_reader_that_leaves_is_no_traceback() -> None:
    for words in (["codec", "list", "--json", "-"], ["codec", "show", "qsgd"]):
        reading, writing = os.pipe()
        os.close(reading)
        to = {"stdout": writing, "stderr": subprocess.PIPE}
        left = subprocess.run([*GRADWIRE, *words], **to, check=False, timeout=60)
        os.close(writing)
        assert (left.returncode, left.stderr) == (141, b"")


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    with output(str(tmp_path / "rows")) as out:
        out.row({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": float("-inf")}})
    row = json.loads((tmp_path / "rows").read_text())
    assert row == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_a_full_disk_names_the_file() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here, on which nothing can be written")
    ran = run("codec", "list", "--json", "/dev/full")
    assert (ran.code, ran.out) == (program.BAD_INPUT, "")
    said = "gradwire: --json /dev/full: cannot be written (No space left on device)\n"
    assert ran.err == said


def test_progress_without_a_terminal_is_a_line_at_once_and_every_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(output_module, "time", SimpleNamespace(monotonic=lambda: now))

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal now
        for index, codec in enumerate(["fp16", "qsgd", "topk", "dgc"]):
            progress(f"kernels of {codec}", index, 4)
            now += 1.0
        yield {"a": 1}

    with output("-") as out:
        out.measured(rows(), ["a"])
    printed = capsys.readouterr()
    assert printed.out == '{"a": 1}\n'
    lines = [line for line in printed.err.splitlines() if " of " in line]
    assert lines == ["kernels of fp16: 0 of 4", "kernels of topk: 2 of 4"]


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    shown: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(ours, 4096):
                shown.append(chunk)
        except OSError:  # the other end is closed
            os.close(ours)

    def rows() -> Iterator[dict[str, Any]]:
        progress("turns", 0, 2)
        progress("turns", 1, 2)
        yield {"a": 1}

    reader = threading.Thread(target=read)
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        reader.start()
        with output("-") as out:
            out.measured(rows(), ["a"])
    reader.join(60)
    assert "━".encode() in b"".join(shown)
    assert b": 0 of " not in b"".join(shown)


LONG = [
    ["codec", "build", "--codec", "fp16", "--output", "made", "--isa", "x86-64-v2"],
    ["bench", "kernels", "--codec", "fp16", "--target", "eager", "--quick"],
    ["bench", "transports", "--bytes", "64", "--quick"],
    ["bench", "collectives", "--ranks", "2", "--net", "none", "--numel", "1000", "--quick"],
    ["bench", "profile", "--numel", "2000", "--quick"],
    ["bench", "aggregators", "--task", "image", "--methods", "powersgd", "--quick"],
]


@EXHAUSTIVE
@pytest.mark.multiprocess
@pytest.mark.parametrize("command", LONG)
def test_long_commands_have_progress(command: list[str], tmp_path: Path) -> None:
    """Rows alone on standard output; progress on standard error, as lines or bars (above)."""
    plain = subprocess.run(
        [*GRADWIRE, *command, "--json", "-"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    assert all(isinstance(json.loads(row), dict) for row in plain.stdout.splitlines())
    assert ": 0 of " in plain.stderr
    assert "1 methods" not in plain.stderr
    assert "\x1b[" not in plain.stderr


# A shell has Ctrl-C ignored by what it starts in the background, such as these tests.
START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from gradwire_tools.cli import main
main()
"""
RANKS = " nodes on "  # what is printed once the lab stands
SLEEP = ["lab", "run", "--nodes", "2", "--net", "none", "--", "sleep", "600"]
SHAPED = ["lab", "run", "--nodes", "2", "--net", "10mbit,1ms", "--", "sleep", "600"]
ENDINGS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
# (signal, command, what it prints before the signal, processes that it then has)
CASES = [
    pytest.param(signal.SIGINT, SLEEP, RANKS, 4, marks=EXHAUSTIVE),
    (signal.SIGTERM, SLEEP, RANKS, 4),
    pytest.param(signal.SIGINT, SHAPED, RANKS, 4, marks=pytest.mark.lab),
]
MORE = [
    (signal.SIGINT, ["bench", "collectives", "--ranks", "2", "--net", "none"], "turns of ", 3),
    (signal.SIGINT, ["demo", "--net", "none", "--json", "-"], RANKS, 3),
    (signal.SIGINT, ["bench", "train", "--net", "none", "--nodes", "2"], RANKS, 3),
    (signal.SIGINT, ["bench", "kernels", "--codec", "topk", "--target", "eager"], "kernels of", 1),
    (signal.SIGINT, ["codec", "build", "--output", "made"], "x86-64", 1),
    (signal.SIGINT, ["doctor", "--ranks", "2", "--numel", "20000000"], RANKS, 3),
    (signal.SIGINT, ["sim", "--fresh"], "kernels of ", 1),
    (signal.SIGTERM, ["bench", "train", "--net", "none", "--nodes", "2"], RANKS, 3),
    (signal.SIGTERM, ["bench", "error", "--quick"], "gpt, ", 1),
]
ON_LINKS = ["bench", "collectives", "--ranks", "2", "--net", "1gbit,1ms"]
CASES += [pytest.param(*case, marks=EXHAUSTIVE) for case in MORE]
marks = [EXHAUSTIVE, pytest.mark.lab]
CASES += [pytest.param(signal.SIGINT, ON_LINKS, "turns of ", 3, marks=marks)]


def check(
    number: signal.Signals, command: list[str], once: str, processes: int, folder: Path
) -> None:
    """A command, its exit code and standard error, and what it leaves."""
    mark = f"GRADWIRE_TEST_{uuid.uuid4().hex}"
    environment = {**os.environ, mark: "1", "TMPDIR": str(folder)}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    process = subprocess.Popen(
        [sys.executable, "-c", START, *command],
        env=environment, cwd=folder, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    said: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()))
    reader.start()
    try:
        begun = until(lambda: once in "".join(said) or process.poll() is not None, 120)
        assert begun, said
        running = until(lambda: len(marked(mark)) >= processes or process.poll() is not None)
        assert running, marked(mark)
        made = network_namespaces(marked(mark)) - {os.readlink("/proc/self/ns/net")}
        process.send_signal(number)
        code = process.wait(60)
    finally:
        process.kill()
        reader.join(10)
    assert until(lambda: not marked(mark)), "processes are left"
    assert not list(folder.glob("gradwire-*")), "temporary files are left"
    assert until(lambda: not made & network_namespaces()), "namespaces are left"
    assert bool(made) == any("bit," in word for word in command)
    expected, ending = ENDINGS[number]
    assert code == expected, "".join(said)
    assert "Traceback" not in "".join(said)
    assert said[-1] == f"gradwire: {ending}\n"


@pytest.mark.multiprocess
@pytest.mark.parametrize(("number", "command", "once", "processes"), CASES)
def test_one_line_and_nothing_is_left(
    number: signal.Signals, command: list[str], once: str, processes: int, tmp_path: Path
) -> None:
    check(number, command, once, processes, tmp_path)
