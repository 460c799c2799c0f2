"""The tests' own tools: samples of products that `make test` runs cover every value; failed tests
run once more, alone (scripts/suite.py); and workers do not meet on the network, where what needs
the host's can return."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from products import in_turn


def test_values_of_the_second_axis_take_turns() -> None:
    cases = in_turn("abcd", [0, 1, 2])
    assert [case.values for case in cases] == list(product("abcd", [0, 1, 2]))
    kept = [case.values for case in cases if not case.marks]
    assert kept == [("a", 0), ("b", 1), ("c", 2), ("d", 0)]


SUITE = Path(__file__).parents[1] / "scripts" / "suite.py"
TESTS = """
import pathlib
import pytest

def test_passes():
    pass

@pytest.mark.xdist_group("some")
def test_chance():  # fails once
    mark = pathlib.Path("mark")
    failed = mark.exists()
    mark.touch()
    assert failed, "busy"

@pytest.mark.parametrize("n", range({broken}))
def test_broken(n):
    assert n < 0
"""


def suite(folder: Path, broken: int) -> tuple[int, str]:
    (folder / "test_some.py").write_text(TESTS.format(broken=broken))
    command = [sys.executable, SUITE, "-n", "1", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    few = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    done = subprocess.run(
        [*command, folder],
        check=False, cwd=folder, env={**os.environ, **few}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_what_passes_alone_is_flaky_and_what_fails_again_fails(tmp_path: Path) -> None:
    code, said = suite(tmp_path, broken=1)
    assert code == 1
    assert "flaky: test_some.py::test_chance" in said
    assert "AssertionError: busy" in said.split("flaky: ")[1]
    assert "fails alone, too: test_some.py::test_broken[0]" in said
    assert "1 flaky, 1 failed twice" in said
    (tmp_path / "mark").unlink()
    code, said = suite(tmp_path, broken=0)
    assert code == 0
    assert "1 flaky, 0 failed twice" in said


def test_many_failures_fail_at_once(tmp_path: Path) -> None:
    code, said = suite(tmp_path, broken=11)
    assert code == 1
    assert "12 tests failed; up to 10 would run once more" in said
    assert "flaky" not in said


SCRIPT = """
import socket, sys, threading
from loopback import host_network, own_loopback

def reaches(port):
    with socket.socket() as s:
        s.settimeout(5)
        return s.connect_ex(("127.0.0.1", port)) == 0

port = int(sys.argv[1])
before = reaches(port)
own_loopback()
with socket.create_server(("127.0.0.1", port)) as server:  # the host has a listener there, too
    inside = []
    thread = threading.Thread(target=lambda: inside.append(reaches(port)))
    thread.start()
    thread.join()
    server.settimeout(5)
    server.accept()[0].close()
with host_network():
    outside = reaches(port)
print(before, inside[0], reaches(port), outside)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: a worker has no network of its own")
def test_a_worker_has_loopback_for_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, port], capture_output=True, text=True, check=False,
            timeout=60, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )  # fmt: skip
    assert done.stdout.split() == ["True", "True", "False", "True"], done.stderr
