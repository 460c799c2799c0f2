"""Rows say what made them, and progress reaches who watches, from cells and other processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire_tools.bench import provenance, workers
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import cells, progress, unwatched, watched

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


Told = list[tuple[str, int, int]]


def counted(upto: int) -> list[dict[str, Any]]:
    for done in range(upto):
        progress("turns", done, upto)
    return [{"loss": float("nan"), "upto": upto}]


def test_cells_say_where_they_are_and_their_parts_are_silent() -> None:
    told: Told = []

    def part(size: int) -> Iterator[dict[str, Any]]:
        yield from counted(size)

    def rows(net: str, size: int) -> Iterator[dict[str, Any]]:
        progress("links", 0, 2)
        yield from unwatched(part(size))

    with watched(lambda *one: told.append(one)):
        found = list(cells("{1} bytes on {0}", rows, ["none"], [4, 8]))
    progress("nobody watches", 0, 1)
    links = ("links", 0, 2)
    assert told == [("4 bytes on none", 0, 2), links, ("8 bytes on none", 1, 2), links]
    assert [row["upto"] for row in found] == [4, 8]


@pytest.mark.multiprocess
def test_the_progress_and_rows_of_rank_0_are_those_of_all_ranks() -> None:
    told: Told = []
    with watched(lambda *one: told.append(one)):
        rows = workers.measured(World.here(2, "none"), 60.0, counted, 2)
    assert told == [("turns", 0, 2), ("turns", 1, 2)]
    assert rows == [{"loss": None, "upto": 2}]
