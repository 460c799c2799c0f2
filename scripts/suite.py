"""Run pytest; run each test that fails once more, alone, before it counts.

    scripts/suite.py [arguments of pytest]

A test that fails on busy cores and passes on quiet ones says nothing against the code. So at most
MOST failed tests run again after the parallel run, one at a time, each in a fresh process. One that
fails again fails the command. One that passes is printed under `flaky:`, with the last lines of
both runs, to be mended. More than MOST failures fail at once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

MOST = 10


class Failures:
    """A plug-in that notes which tests failed, and how: text by node id."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for report in (
            *terminalreporter.stats.get("failed", ()),
            *terminalreporter.stats.get("error", ()),
        ):
            test = re.sub(r"@[\w-]+$", "", report.nodeid)  # xdist appends the group
            self.texts.setdefault(test, report.longreprtext)


def main(arguments: list[str]) -> int:
    failures = Failures()
    code = int(pytest.main(arguments, plugins=[failures]))
    if code != pytest.ExitCode.TESTS_FAILED:  # 0, or it could not run them
        return code
    if len(failures.texts) > MOST:
        print(f"{len(failures.texts)} tests failed; up to {MOST} would run once more")
        return code
    options = [one for one in arguments if one == "--exhaustive"]
    flaky = []
    for test, first in failures.texts.items():
        passed, second = alone([*options, test])
        if passed:
            runs = f"  in parallel:\n{last_lines(first)}\n  alone:\n{last_lines(second)}"
            flaky.append(f"\nflaky: {test}\n{runs}")
        else:
            print(f"\nfails alone, too: {test}\n{second}")
    broken = len(failures.texts) - len(flaky)
    print(*flaky, f"\n{len(flaky)} flaky, {broken} failed twice", sep="\n")
    return code if broken or not flaky else 0


def alone(arguments: list[str]) -> tuple[bool, str]:
    """Whether pytest passes in a process of its own, and its output."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode == 0, done.stdout


def last_lines(output: str, count: int = 8) -> str:
    return "\n".join(f"    {line}" for line in output.rstrip().splitlines()[-count:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
