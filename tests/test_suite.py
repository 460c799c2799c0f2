"""scripts/suite.py: failed tests run once more, alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
