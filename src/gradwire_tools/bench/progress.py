"""How far a measurement is, told to whoever watches it: a bar of the terminal, or rank 0's parent.

The papers' grids measure their cells one after the other (`cells`). A command checks what it is
given and yields the rows of its grid, stamped from before the first measurement:

    @stamped
    def run(nets, sizes):
        def rows(net, size): ...
        yield from cells("{1} bytes on {0}", rows, nets, sizes)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from gradwire_tools.bench.rows import Row

Advance = Callable[[str, int, int], None]  # what is measured, how much is done, of how much


def _nobody(what: str, done: int, total: int) -> None:
    pass


_watching: ContextVar[Advance] = ContextVar("watching", default=_nobody)


def progress(what: str, done: int, total: int) -> None:
    """So much of what is measured is done."""
    _watching.get()(what, done, total)


@contextmanager
def watched(advance: Advance) -> Iterator[None]:
    """Until the end, `advance` is called with all progress."""
    before = _watching.set(advance)
    try:
        yield
    finally:
        _watching.reset(before)


def unwatched(rows: Iterable[Row]) -> list[Row]:
    """Rows, while nobody is told how far they are: they are part of a cell."""
    with watched(_nobody):
        return list(rows)


def cells(name: str, rows: Callable[..., Iterable[Row]], *axes: Iterable[Any]) -> Iterator[Row]:
    """The rows of every combination of the axes' values, the last axis first.

    Args:
        name: of a cell, as progress has it: {0}, {1}, ... are its values.
        rows: measures a cell, given its values.
    """
    every = list(itertools.product(*axes))
    for done, cell in enumerate(every):
        progress(name.format(*cell), done, len(every))
        yield from rows(*cell)
