"""Ctrl-C or SIGTERM in the midst of a long command: one line, an exit code, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from gradwire import lab
from leftovers import marked, network_namespaces, until
from products import one_in

# A shell has Ctrl-C ignored by what it starts in the background, such as these tests.
START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from gradwire.cli import main
main()
"""
RANKS = " nodes on "  # what is printed once the lab stands
COMMANDS = [
    (["bench", "collectives", "--ranks", "2", "--net", "none"], "turns of "),
    (["demo", "--net", "none", "--json", "-"], RANKS),  # all but rows on standard error
    (["bench", "train", "--net", "none", "--nodes", "2"], RANKS),
    (["bench", "kernels", "--codec", "topk", "--target", "eager"], "kernels of topk"),
    (["codec", "build", "--output", "made"], "x86-64"),
    (["doctor", "--ranks", "2", "--numel", "20000000"], RANKS),
    (["sim", "--fresh"], "kernels of "),
    (["lab", "run", "--nodes", "2", "--net", "none", "--", "sleep", "60"], RANKS),
]
SHAPED = [
    (["bench", "collectives", "--ranks", "2", "--net", "10mbit,1ms"], "turns of "),
    (["lab", "run", "--nodes", "2", "--net", "1gbit,1ms", "--", "sleep", "60"], RANKS),
]


def interrupted(
    command: list[str], once: str, folder: Path, number: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """Exit code and standard error of a command that gets a signal after it printed `once`."""
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
        assert until(lambda: once in "".join(said) or process.poll() is not None, 120), said
        time.sleep(0.5)
        process.send_signal(number)
        code = process.wait(60)
    finally:
        process.kill()
        reader.join(10)
    assert until(lambda: not marked(mark)), "processes are left"
    assert not list(folder.glob("gradwire-*")), "temporary files are left"
    return code, "".join(said)


def check(command: list[str], once: str, folder: Path) -> None:
    code, said = interrupted(command, once, folder)
    assert code == 130, said
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "gradwire: interrupted"


@pytest.mark.multiprocess
@pytest.mark.parametrize(("command", "once"), one_in(7, COMMANDS))
def test_one_line_and_nothing_is_left(command: list[str], once: str, tmp_path: Path) -> None:
    check(command, once, tmp_path)


TERMINATED = [
    (["bench", "train", "--net", "none", "--nodes", "2"], RANKS),
    (["bench", "error", "--quick"], "gpt, "),
    (["lab", "run", "--nodes", "2", "--net", "none", "--", "sleep", "60"], RANKS),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("command", "once"), TERMINATED)
def test_sigterm_leaves_nothing(command: list[str], once: str, tmp_path: Path) -> None:
    code, said = interrupted(command, once, tmp_path, signal.SIGTERM)
    assert code == 143, said
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "gradwire: terminated"


@pytest.mark.lab
@pytest.mark.multiprocess
@pytest.mark.parametrize(("command", "once"), one_in(2, SHAPED))
def test_no_namespace_is_left(command: list[str], once: str, tmp_path: Path) -> None:
    reason = lab.available()
    if reason is not None:
        pytest.skip(f"no lab: {reason}")
    before = network_namespaces()
    check(command, once, tmp_path)
    assert until(lambda: not network_namespaces() - before)
