"""Tutorial pages: their files are written, their commands run, their outputs compared."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT, Page

from products import EXHAUSTIVE

# programs that a page calls by name run with this Python
PROGRAMS = {
    "python": [sys.executable],
    "gradwire": [sys.executable, "-m", "gradwire_tools.cli"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d",
                 "--rdzv-endpoint", "localhost:0"],
}  # fmt: skip
LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, expected output) of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


# A C++ thread that was not joined when the process ended: torch's, since gradwire has none. Seen
# once, in the run without gradwire; a second time in a row needs an investigation.
ABORTED = "terminate called without an active exception"


def outcome(command: str, folder: Path) -> str:
    done = run(command, folder)
    if ABORTED in done.stderr:
        done = run(command, folder)
    lines = done.stdout.splitlines(keepends=True)
    said = "".join(line for line in lines if not line.startswith("[Gloo]"))  # torch 2.9 says so
    return said if done.returncode == 0 else said + done.stderr


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    source = str(ROOT / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    return subprocess.run(
        [*PROGRAMS[program], *arguments], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip


@EXHAUSTIVE
@pytest.mark.multiprocess
@pytest.mark.timeout(900)  # a dozen programs, some of which compile kernels
@pytest.mark.parametrize(
    ("page", "least"), [("writing-a-codec.md", 8), ("writing-an-aggregator.md", 3)]
)
def test_the_page_is_exact(page: str, least: int, tmp_path: Path) -> None:
    programs = 0
    for block in Page.read(ROOT / "docs" / "how-to" / page).blocks:
        if block.kind == "python":
            (tmp_path / block.words[0]).write_text(block.text, "utf-8")
            continue
        if block.kind == "text":  # calls, not programs
            continue
        assert block.kind == "console", block.info
        for command, expected in commands(block.text):
            said = outcome(command, tmp_path)
            assert doctest.OutputChecker().check_output(expected, said, LIKE), (
                f"$ {command}\n{said}\n--- but the page says\n{expected}"
            )
            programs += 1
    assert programs >= least
