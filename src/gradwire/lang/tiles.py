"""How the rows of a call on a GPU are divided among programs, and where their workspace lies.

A row's part of the workspace, in words of four bytes:

| part | words | holds |
| --- | --- | --- |
| partials | (blocks + 1) * reductions | blocks' shares of reductions over the row; results |
| state | 264 | where a selection's radix passes are: emit/triton_selection.py |
| before | (1 + ranks) * (blocks + 1) | entries before a block; in the own payload, in peers' |
| tied | blocks | elements of the cut key before a block |
| keys | numel | of elements, or of a sample |
| staged | capacity * columns | of entries: their places, and codes to be packed |

Codecs of payloads of a known length have the first only, and need no keys where nothing is ranked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.lang import ir
from gradwire.lang.emit import triton_rows
from gradwire.lang.forms import Field
from gradwire.lang.ir import Scope
from gradwire.lang.layout import COUNT_NBYTES, Layout, element_nbytes
from gradwire.lang.rows import ROW

# Columns of a table of rows, int64: those of ROW, then these. triton_prelude.py numbers them alike.
ADDED = (
    "tiles", "partials", "number", "capacity", "counted", "tail",
    "state", "before", "tied", "keys", "staged",
    *(f"size{i}" for i in range(triton_rows.STATISTICS)),
)  # fmt: skip
GIVEN = ROW.itemsize // 8
COLUMN = {name: GIVEN + i for i, name in enumerate(ADDED)}
STATE = 8 + 256


@dataclass(frozen=True)
class Tiles:
    """How a call's rows are divided.

    Attributes:
        table: int64[rows, columns], for the device.
        number: of tiles of all rows.
        blocks: of the longest row.
        words: of the workspace, for all rows.
    """

    table: np.ndarray
    number: int
    blocks: int
    words: int


def divide(
    rows: np.ndarray,
    layout: Layout,
    ranks: int = 1,
    statistics: Sequence[tuple[int, ir.Size]] = (),
) -> Tiles:
    """Tiles of full blocks and, for a ragged last block, one of its own.

    `statistics`: (one of how many values is sampled, which is asked for), of order statistics.
    """
    numels = rows["numel"]
    table = np.zeros((rows.size, GIVEN + len(ADDED)), np.int64)
    table[:, :GIVEN] = rows.view(np.int64).reshape(rows.size, GIVEN)
    full, rest = np.divmod(numels, layout.block)
    group = triton_rows.group(layout)
    tiles = np.cumsum((full + group - 1) // group + (rest > 0))
    table[1:, COLUMN["tiles"]] = tiles[:-1]
    table[:, COLUMN["number"]] = np.arange(1, rows.size + 1)
    table[:, COLUMN["capacity"]] = _capacity(layout, numels)
    known = np.zeros_like(numels)
    for f in layout.fields:
        if f.capacity is not None or any(other.flag == f.name for other in layout.fields):
            table[:, COLUMN["counted"]] = known
        known = known + _known_nbytes(f, layout, numels)
    table[:, COLUMN["tail"]] = known
    for i, (every, size) in enumerate(statistics):
        table[:, COLUMN[f"size{i}"]] = _of(size, -(-numels // every))
    at = np.zeros_like(numels)
    parts = _parts(layout, numels, ranks)
    ends = np.cumsum(np.sum(list(parts.values()), axis=0))
    at[1:] = ends[:-1]
    for name, words in parts.items():
        table[:, COLUMN[name]] = at
        at = at + words
    if not rows.size:
        return Tiles(table, 0, 0, 0)
    return Tiles(table, int(tiles[-1]), int(full.max()) + 1, int(ends[-1]))


def workspace_nbytes(layout: Layout, numels: np.ndarray, ranks: int = 1) -> int:
    """Bytes of scratch memory that a call over rows of these sizes needs, with so many ranks."""
    return 4 * int(np.sum(list(_parts(layout, np.asarray(numels, np.int64), ranks).values())))


def _parts(layout: Layout, numels: np.ndarray, ranks: int) -> dict[str, np.ndarray]:
    """Words of every part of the workspace, for every row, in their order."""
    blocks, none = -(-numels // layout.block), np.zeros_like(numels)
    selects = layout.staged > 0
    columns = sum(f.dtype in (*ir.CODES, "selection") for f in _of_entries(layout))
    samples = -(-numels // layout.samples) if layout.samples else none
    return {
        "partials": (blocks + 1) * layout.partials,
        "state": none + (STATE if selects or layout.samples else 0),
        "before": (1 + ranks) * (blocks + 1) if layout.variable else none,
        "tied": blocks if selects else none,
        "keys": numels if selects else samples,
        "staged": _capacity(layout, numels) * columns,
    }


def _of_entries(layout: Layout) -> list[Field]:
    return [f for f in layout.fields if f.scope is Scope.SELECTION]


def _capacity(layout: Layout, numels: np.ndarray) -> np.ndarray:
    sizes = [_of(f.capacity, numels) for f in layout.fields if f.capacity is not None]
    return sizes[0] if sizes else numels


def _of(size: ir.Size, n: np.ndarray) -> np.ndarray:
    """`Size.of`, of every row."""
    share: np.ndarray = (size.fraction * n).astype(np.int64)
    return np.asarray(np.minimum(n, np.maximum(size.least, share)))


def _known_nbytes(f: Field, layout: Layout, numels: np.ndarray) -> np.ndarray:
    """Bytes of a field's part of known length, of every row."""
    blocks = -(-numels // layout.block)
    if f.capacity is not None:
        return blocks * COUNT_NBYTES
    if f.scope is Scope.SELECTION or f.flag is not None:
        return blocks * 0
    if f.scope is Scope.TENSOR:
        return blocks * 0 + f.item_nbytes
    if f.scope is Scope.BLOCK:
        return blocks * f.item_nbytes
    full = numels // layout.block * element_nbytes(f.dtype, layout.block)
    rest: Any = numels % layout.block  # the same arithmetic, on arrays
    return np.asarray(full + element_nbytes(f.dtype, rest))
