"""The wire layout of a payload.

A payload holds the codec's fields in order, each padded to a byte, little-endian:
    tensor scope   one number
    block scope    one number per block; uint1 to uint8 take one byte each
    element scope  block after block; floats and raw numbers unpacked, codes in planes
    matrix scope   row after row
    a selection    the number of selected elements per block, two bytes each

The parts whose length depends on data follow, in the same order and without gaps, so the used part
of a payload is a prefix of its greatest size:
    a selection      the entries' positions in their blocks, as codes of the fewest bits
    selection scope  one value per entry; positions and codes in runs of 128 entries
    kept codes       as in element scope, for the blocks whose flag is set

Planes: a code of `bits` bits is cut, from its lowest bit up, into planes of 8, 4, 2 and 1 bits. In
a plane of w bits, m values take L = ceil(m * w / 8) bytes, and byte j holds the values j, j + L, j
+ 2L, ... from its lowest bits up. Trits do so in base 3, five per byte. A row without values has an
empty payload. docs/internals/wire-format.md describes the format for users.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from gradwire.errors import ConfigError
from gradwire.lang import forms, ir, passes
from gradwire.lang.codec import Codec, check_codec
from gradwire.lang.exact import Exact
from gradwire.lang.forms import Field
from gradwire.lang.ir import Scope

if TYPE_CHECKING:  # sources are also generated without numpy and torch
    import numpy as np
    import torch

N = TypeVar("N", int, "np.ndarray")

# torch's printed name -> the language's name
NATIVE = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


def native_name(dtype: torch.dtype | str) -> str:
    """The language's name of a torch.dtype or of that name. `ConfigError` for other dtypes."""
    name = NATIVE.get(str(dtype), str(dtype))
    if name not in NATIVE.values():
        raise ConfigError(f"values of {dtype} cannot be encoded: use one of {', '.join(NATIVE)}")
    return name


RUN = 128  # entries that are packed together
COUNT_NBYTES = 2  # per block, of the number of selected elements
RAW = "raw"  # prefix of a number of bits: a dtype without arithmetic in the language


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """(width, position in the code of its lowest bit) of every plane, in wire order."""
    cut, at = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            cut.append((width, at))
            at += width
    return tuple(cut)


def element_nbytes(dtype: str, m: int) -> int:
    """Bytes of `m` elements of one block."""
    if dtype == "trit":
        return -(-m // 5)
    if dtype.startswith(RAW):
        return m * int(dtype.removeprefix(RAW)) // 8
    if not dtype.startswith("uint"):
        return m * ir.BITS[dtype] // 8
    return sum((m * width + 7) // 8 for width, _ in planes(ir.BITS[dtype]))


def run_nbytes(dtype: str, m: int, run: int = RUN) -> int:
    """Bytes of `m` values in runs."""
    return m // run * element_nbytes(dtype, run) + element_nbytes(dtype, m % run)


@dataclass(frozen=True)
class Layout:
    """The memory layout of a codec's payload.

    Attributes:
        fields: as given to `concat`.
        block: values per block.
        partials: floats per block in the workspace (for tensor reductions), 0 for most codecs.
        sums: of these, those up to the last that is a sum.
        samples: one of this many values is sampled for sorting (the least of all), 0 without sort.
        staged: numbers per staged entry in the workspace, 0 without a selection.
        data_dependent: whether the length of a payload depends on data; it does not if a selection
            is always full.
        redraws: whether decoding needs the encoder's random numbers.
        expected_entries: `Codec.expected_entries`.
    """

    fields: tuple[Field, ...]
    block: int
    partials: int
    sums: int
    samples: int
    staged: int
    data_dependent: bool
    redraws: bool
    expected_entries: Callable[[int], float | None] = field(compare=False)  # not part of the layout

    @property
    def splittable(self) -> bool:
        """Whether cutting a row at a block boundary leaves the encoded blocks unchanged."""
        local = all(f.scope in (Scope.BLOCK, Scope.ELEMENT) for f in self.fields)
        return local and self.partials == 0 and not self.variable

    @property
    def variable(self) -> bool:
        """Whether a payload has counts or flags, and parts whose length follows from them."""
        return any(f.capacity is not None or f.flag is not None for f in self.fields)

    @property
    def position(self) -> str:
        """The dtype of an entry's position in its block."""
        return f"uint{max(1, (self.block - 1).bit_length())}"

    def blocks(self, numel: int) -> int:
        """The number of blocks of a row; the last may be shorter."""
        return -(-numel // self.block)

    def offsets(self, numel: int) -> list[int]:
        """The byte offset of every field's part of known length, then the end of these parts."""
        offsets = [0]
        for f in self.fields:
            offsets.append(offsets[-1] + (self.known_nbytes(f, numel) if numel else 0))
        return offsets

    def known_nbytes(self, f: Field, numel: Any) -> Any:
        """Bytes of a field's part of known length: of one row, or of many rows as int64 arrays."""
        if f.capacity is not None:
            return COUNT_NBYTES * self.blocks(numel)
        if f.scope is Scope.SELECTION or f.flag is not None:
            return 0
        if f.shape is not None:
            rows, columns = f.shape.of(numel)
            return rows * columns * ir.BITS[f.dtype] // 8
        if f.scope is Scope.TENSOR:
            return f.item_nbytes
        if f.scope is Scope.BLOCK:
            return f.item_nbytes * self.blocks(numel)
        return run_nbytes(f.dtype, numel, self.block)

    def capacity(self, numel: int) -> int:
        """The most entries: of the selection, or values of blocks whose codes may be kept."""
        sizes = [f.capacity.of(numel) for f in self.fields if f.capacity is not None]
        return sizes[0] if sizes else numel

    def tails(self, numel: int, entries: int) -> list[tuple[int, int]]:
        """(first byte, number of bytes) of every field's part whose length depends on data.

        `entries`: selected elements, or values of kept blocks.
        """
        at, tails = self.offsets(numel)[-1], []
        for f in self.fields:
            nbytes = self._tail_nbytes(f, entries) if entries else 0
            tails.append((at, nbytes))
            at += nbytes
        return tails

    def _tail_nbytes(self, f: Field, entries: Any) -> Any:
        if f.capacity is not None:
            return run_nbytes(self.position, entries)
        if f.flag is not None:
            return run_nbytes(f.dtype, entries, self.block)
        return run_nbytes(f.dtype, entries) if f.scope is Scope.SELECTION else 0

    def nbytes(self, numel: int) -> int:
        """Size of the payload of `numel` values; the greatest, if it depends on data."""
        if not self.variable:
            return self.offsets(numel)[-1]
        return sum(self.tails(numel, self.capacity(numel))[-1])

    def used_nbytes(self, known: N, entries: N) -> N:
        """The used bytes of a payload: of one row, or of many rows as int64 arrays.

        `known`: bytes of its parts of known length; `entries`: as in `tails`.
        """
        used = known
        for f in self.fields:
            used = used + self._tail_nbytes(f, entries)
        return used

    def expected_nbytes(self, numel: int) -> int:
        """The average number of used bytes of a payload of `numel` values."""
        expected = self.expected_entries(numel) if self.data_dependent else None
        if expected is None:
            return self.nbytes(numel)
        entries = min(max(round(expected), 0), self.capacity(numel))
        return self.used_nbytes(self.offsets(numel)[-1], entries)

    def workspace_nbytes(self, numels: np.ndarray, threads: int = 1) -> int:
        """Bytes of scratch memory that a call over rows of these sizes needs.

        It holds partial results and samples of all rows, and the staged entries of each thread.
        """
        sizes = [int(n) for n in numels]
        floats = sum(self.blocks(n) + 1 for n in sizes) * self.partials
        if self.samples:
            floats += sum(-(-n // self.samples) for n in sizes)
        if self.staged:
            floats += threads * self.staged * self.staging(max(sizes, default=0))
        return 4 * floats

    def staging(self, numel: int) -> int:
        """Entries that a thread stages before it must drop those below the threshold."""
        return 2 * self.capacity(numel) + self.block + RUN


def layout(codec: Codec, dtype: torch.dtype | str = "fp32") -> Layout:
    """The layout of the codec's payloads for values of `dtype`. Raises `ConfigError`."""
    check_codec(codec)
    if isinstance(codec, Exact):
        return _exact(codec.itemsize(dtype))
    return _layout(codec, native_name(dtype))


@lru_cache(maxsize=512)
def _layout(codec: Codec, native: str) -> Layout:
    derived = forms.derive(codec, native)
    programs = derived.programs.values()
    nodes = [n for p in programs for n in ir.walk(p.roots)]
    reductions = [passes.tensor_reductions(p) for p in programs]
    return Layout(
        fields=derived.fields,
        block=derived.block,
        partials=max(map(len, reductions)),
        sums=max((i for r in reductions for i, n in enumerate(r, 1) if n.attr == "sum"), default=0),
        samples=min((n.attr.every for n in nodes if isinstance(n.attr, ir.Rank)), default=0),
        staged=max(passes.staged_numbers(p) for p in programs),
        data_dependent=any(n.op == "keep" or _may_be_partial(n) for n in nodes),
        redraws=any(isinstance(n.attr, ir.Stream) and n.attr.source for n in nodes),
        expected_entries=codec.expected_entries,
    )


@lru_cache(maxsize=64)
def _exact(itemsize: int) -> Layout:
    value = Field("value", f"{RAW}{8 * itemsize}", Scope.ELEMENT)
    return Layout((value,), forms.DEFAULT_BLOCK, 0, 0, 0, 0, False, False, lambda numel: None)


def _may_be_partial(n: ir.Node) -> bool:
    """Whether a node is a conditional selection, which may not fill its capacity."""
    return n.op == "select" and any(arg.dtype == "bool" for arg in n.args)
