"""Rows say what made them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire_tools.bench import provenance

KEYS = {"command", "gradwire", "commit", "machine", "torch", "python", "load", "date"}


@provenance.stamped
def rows(count: int) -> Iterator[dict[str, Any]]:
    yield from ({"place": place} for place in range(count))


def test_every_row_has_the_same_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(rows(3))
    assert [row["place"] for row in found] == [0, 1, 2]
    stamps = [row["run"] for row in found]
    assert stamps[0].keys() == KEYS
    assert stamps[0] == stamps[1] == stamps[2]
    assert stamps[0]["torch"] == torch.__version__
    assert " cores, " in stamps[0]["machine"]
    # The command is as it was typed.
    for path, name in (
        ("/usr/bin/gradwire", "gradwire"),
        ("/some/where/gradwire/__main__.py", "gradwire"),
        ("/some/where/gradwire_tools/cli/__main__.py", "gradwire"),
        ("/home/me/mine.py", "mine.py"),
    ):
        monkeypatch.setattr(sys, "argv", [path, "sim", "--codec", "qsgd, topk"])
        assert provenance.here()["command"] == f"{name} sim --codec 'qsgd, topk'"


def _git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("place", ["src/gradwire", "environment/gradwire"])
def test_the_commit_is_that_of_gradwires_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """And not that of a repository into which gradwire was installed."""
    package = tmp_path / place
    package.mkdir(parents=True)
    file = package / "__init__.py"
    file.write_text("")
    monkeypatch.setattr(provenance.gradwire, "__file__", str(file))
    own = place.startswith("src")

    def commit() -> str | None:
        provenance._commit.cache_clear()
        found: str | None = provenance.here()["commit"]
        provenance._commit.cache_clear()
        return found

    assert commit() is None  # no git
    _git(tmp_path, "init", "--quiet")
    assert commit() is None  # no commit
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "--message", "first")
    made = _git(tmp_path, "rev-parse", "HEAD")[:12]
    assert commit() == (made if own else None)
    file.write_text("changed")
    assert commit() == (f"{made}+changes" if own else None)
