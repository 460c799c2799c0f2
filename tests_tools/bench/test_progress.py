"""Progress reaches who watches, from cells and from other processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gradwire_tools.bench import workers
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import cells, progress, unwatched, watched

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
