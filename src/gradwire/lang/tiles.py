"""How the rows of a GPU call are divided among programs, and the layout of their workspace.

A row's part of the workspace, in 4-byte words:

| part | words | holds |
| --- | --- | --- |
| partials | blocks * reductions | partial results per block, if one is a sum |
| state | 6152 + (1 + ranks) * chunks | of a selection, and sums: emit/triton_selection.py |
| before | (1 + ranks) * (blocks + 1) | entries before a block, in the own and in peers' payloads |
| tied | 3 * blocks | earlier keys equal to the threshold; first candidate; number of candidates |
| keys | 1.5 * numel | of candidates, then their positions in 16 bits; or only keys, of a sample |
| staged | capacity * columns | per entry, its position, codes to be packed, patched elements |
| totals | numel | of a sum of payloads, the sum |

Codecs whose payloads have a fixed length only need the first, and keys and state if they sample.
A chunk is CHUNK blocks, or fewer at the end of the row.

What depends on the row alone is in its line of the table, or behind the table where its size
depends on the codec: the results of the row's reductions, of extremes their keys, which kernels
raise; then the words of its streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.lang import ir, rng
from gradwire.lang.call import ROW
from gradwire.lang.emit import triton_rows
from gradwire.lang.ir import Scope
from gradwire.lang.layout import Layout

# Columns of the int64 table of rows: those of ROW, then these. triton_prelude.py has the same
# indices.
EXTRA = (
    "tiles", "partials", "number", "capacity", "counted", "tail",
    "state", "before", "tied", "keys", "staged",
    *(f"size{i}" for i in range(triton_rows.STATISTICS)),
    "full_tiles", "other_tiles", "first_other", "totals", "blocks", "behind",
    "found", "floor", "closed",
)  # fmt: skip
ROW_COLUMNS = ROW.itemsize // 8
COLUMN = {name: ROW_COLUMNS + i for i, name in enumerate(EXTRA)}
STATE = 8 + 3 * 2048
CHUNK = 2048  # blocks whose counts one program sums
PATCHED = 2  # values and residual: what elements that are selected hold instead


@dataclass(frozen=True)
class Tiles:
    """How a call's rows are divided.

    Attributes:
        table: int64[rows, columns], for the device.
        behind: int64[rows, numbers], which comes behind it.
        number: number of tiles of all rows.
        full: number of those that are full: GROUP whole blocks, in a row whose addresses all are
            aligned. They are the first of their row.
        blocks: number of blocks of the longest row.
        words: number of words of the workspace, for all rows.
    """

    table: np.ndarray
    behind: np.ndarray
    number: int
    full: int
    blocks: int
    words: int


def divide(
    rows: np.ndarray,
    layout: Layout,
    ranks: int = 1,
    stride: int = 0,
    statistics: Sequence[tuple[int, ir.Size]] = (),
    streams: Sequence[ir.Stream] = (),
) -> Tiles:
    """Divide rows into tiles of whole blocks; a ragged last block is its own tile.

    `stride`: distance between the payloads of a sum. `statistics`: (sampling interval, size) of
    the order statistics. `streams`: those of the rows' random numbers.
    """
    numels = rows["numel"]
    table = np.zeros((rows.size, ROW_COLUMNS + len(EXTRA)), np.int64)
    table[:, :ROW_COLUMNS] = rows.view(np.int64).reshape(rows.size, ROW_COLUMNS)
    blocks, rest = np.divmod(numels, layout.block)
    group = triton_rows.group(layout)
    tiles = (blocks + group - 1) // group + (rest > 0)
    full = np.where(_aligned(rows, stride), blocks // group, 0)
    counts = {"tiles": tiles, "full_tiles": full, "other_tiles": tiles - full}
    for name, count in counts.items():
        table[1:, COLUMN[name]] = np.cumsum(count)[:-1]
    table[:, COLUMN["first_other"]] = full
    row = np.arange(rows.size)
    table[:, COLUMN["number"]] = row + 1
    behind = np.zeros((rows.size, layout.partials + len(streams)), np.int64)
    for i, s in enumerate(streams, layout.partials):  # a stream's words have the bits of such a key
        keys = rng.origin_keys(rows["shared" if s.shared else "key"], s.number)
        behind[:, i] = keys.view(np.int64)
    table[:, COLUMN["behind"]] = (rows.size - row) * table.shape[1] + row * behind.shape[1]
    table[:, COLUMN["blocks"]] = -(-numels // layout.block)
    table[:, COLUMN["capacity"]] = _capacity(layout, numels)
    known = np.zeros_like(numels)
    for f in layout.fields:
        if f.capacity is not None or any(other.flag == f.name for other in layout.fields):
            table[:, COLUMN["counted"]] = known
        known = known + layout.known_nbytes(f, numels)
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
        return Tiles(table, behind, 0, 0, 0, 0)
    number, whole = int(tiles.sum()), int(full.sum())
    return Tiles(table, behind, number, whole, int(blocks.max()) + 1, int(ends[-1]))


def _aligned(rows: np.ndarray, stride: int) -> np.ndarray:
    """Which rows have all of their memory aligned, so that a thread accesses several numbers."""
    addresses = [rows[name] for name in ("values", "residual", "payload", "source")]
    together = np.bitwise_or.reduce(addresses)
    return np.asarray((together | np.uint64(stride % 2**64)) % triton_rows.ALIGNED == 0)


def workspace_nbytes(layout: Layout, numels: np.ndarray, ranks: int = 1) -> int:
    """Bytes of scratch memory that a call over rows of these sizes and `ranks` ranks needs."""
    return 4 * int(np.sum(list(_parts(layout, np.asarray(numels, np.int64), ranks).values())))


def _parts(layout: Layout, numels: np.ndarray, ranks: int) -> dict[str, np.ndarray]:
    """Words per row of every part of the workspace, in order."""
    blocks, none = -(-numels // layout.block), np.zeros_like(numels)
    selects = layout.staged > 0
    counts = layout.variable or layout.samples > 0
    sent = [f.dtype for f in layout.fields if f.scope is Scope.SELECTION]
    columns = sum(dtype in (*ir.CODES, "selection") for dtype in sent)
    samples = -(-numels // layout.samples) if layout.samples else none
    return {
        "partials": blocks * layout.sums,
        "state": STATE + (1 + ranks) * (blocks // CHUNK + 1) if counts else none,
        "before": (1 + ranks) * (blocks + 1) if layout.variable else none,
        "tied": 3 * blocks if selects else none,
        "keys": numels + (numels + 1) // 2 if selects else samples,
        "staged": _capacity(layout, numels) * (columns + PATCHED if selects else columns),
        "totals": numels if selects and ranks > 1 else none,
    }


def _capacity(layout: Layout, numels: np.ndarray) -> np.ndarray:
    sizes = [_of(f.capacity, numels) for f in layout.fields if f.capacity is not None]
    return sizes[0] if sizes else numels


def _of(size: ir.Size, n: np.ndarray) -> np.ndarray:
    """`Size.of` for every row."""
    share: np.ndarray = (size.fraction * n).astype(np.int64)
    return np.asarray(np.minimum(n, np.maximum(size.least, share)))
