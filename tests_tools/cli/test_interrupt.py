"""Ctrl-C or SIGTERM in the midst of a long command: one line, an exit code, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from leftovers import marked, network_namespaces, until
from products import EXHAUSTIVE

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
