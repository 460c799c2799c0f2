"""The runner of the papers' grids, whose cells are measured one after the other.

A command checks what it is given and yields the rows of its grid; `stamped` (bench/provenance)
stands around all of it, so that the stamp is from before the first measurement:

    @stamped
    def run(nets, sizes, advance=unseen):
        def rows(net, size): ...
        yield from measured("{1} bytes on {0}", rows, advance, nets, sizes)

What cells share and takes long, such as a machine's curves, is a cached function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gradwire_tools.bench.workers import Advance

Row = dict[str, Any]


def measured(
    name: str, rows: Callable[..., Iterable[Row]], advance: Advance, *axes: Iterable[Any]
) -> Iterator[Row]:
    """The rows of every combination of the axes' values, the last axis first.

    Args:
        name: of a cell, as progress has it: {0}, {1}, ... are its values.
        rows: measures a cell, given its values.
    """
    cells = list(itertools.product(*axes))
    for done, cell in enumerate(cells):
        advance(name.format(*cell), done, len(cells))
        yield from rows(*cell)
