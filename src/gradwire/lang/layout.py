"""The wire layout of a payload.

A payload holds the codec's fields one after the other, each padded to a byte, little-endian:
    tensor scope   one number
    block scope    one number a block, in order of blocks; uint1 to uint8 take a byte each
    element scope  block after block; fp32, fp16, bf16 as they are, uint codes in planes

Planes: a code of `bits` bits is cut from its lowest bit up into planes of 4, 2 and 1 bits (8 stays
whole). In a plane of w bits, m values take L = ceil(m * w / 8) bytes, and byte j holds the values
j, j + L, j + 2L, ... from its lowest bits up. A row without values has an empty payload.
docs/wire-format.md says the same for readers of the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from gradwire.errors import ConfigError
from gradwire.lang import forms, ir, passes
from gradwire.lang.codec import Codec

if TYPE_CHECKING:  # sources are generated where there is neither
    import numpy as np
    import torch

# by the names that torch prints; the language's own names stand for themselves
NATIVE = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


def native_name(dtype: torch.dtype | str) -> str:
    """The language's name of a dtype of values, torch's or that name; `ConfigError` if none."""
    name = NATIVE.get(str(dtype), str(dtype))
    if name not in NATIVE.values():
        raise ConfigError(f"values of {dtype} cannot be encoded: use one of {', '.join(NATIVE)}")
    return name


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """(width, position of its lowest bit in the code) of every plane, in wire order."""
    if bits == 8:
        return ((8, 0),)
    cut, at = [], 0
    for width in (4, 2, 1):
        if bits & width:
            cut.append((width, at))
            at += width
    return tuple(cut)


def element_nbytes(dtype: str, m: int) -> int:
    """Bytes of `m` elements of one block."""
    if not dtype.startswith("uint"):
        return m * ir.BITS[dtype] // 8
    return sum((m * width + 7) // 8 for width, _ in planes(ir.BITS[dtype]))


@dataclass(frozen=True)
class Field:
    """One field of a payload: its name, stored dtype and scope."""

    name: str
    dtype: str
    scope: ir.Scope

    @property
    def item_nbytes(self) -> int:
        """Bytes of one number of tensor or block scope."""
        return (ir.BITS[self.dtype] + 7) // 8


@dataclass(frozen=True)
class Layout:
    """How a codec's payload lies in memory.

    Attributes:
        fields: in wire order.
        block: values per block.
        partials: floats a block needs in the workspace (tensor reductions), 0 for most codecs.
    """

    fields: tuple[Field, ...]
    block: int
    partials: int

    @property
    def splittable(self) -> bool:
        """Whether a row may be cut at any block boundary without changing what is encoded."""
        return self.partials == 0 and all(f.scope is not ir.Scope.TENSOR for f in self.fields)

    def blocks(self, numel: int) -> int:
        """Blocks of a row, the last one possibly shorter."""
        return -(-numel // self.block)

    def offsets(self, numel: int) -> list[int]:
        """Byte offset of every field, then the end of the payload."""
        offsets = [0]
        for f in self.fields:
            if numel == 0:
                size = 0
            elif f.scope is ir.Scope.TENSOR:
                size = f.item_nbytes
            elif f.scope is ir.Scope.BLOCK:
                size = f.item_nbytes * self.blocks(numel)
            else:
                full, rest = divmod(numel, self.block)
                size = full * element_nbytes(f.dtype, self.block) + element_nbytes(f.dtype, rest)
            offsets.append(offsets[-1] + size)
        return offsets

    def nbytes(self, numel: int) -> int:
        """Exact size of the payload of `numel` values."""
        return self.offsets(numel)[-1]

    def workspace_nbytes(self, numels: np.ndarray) -> int:
        """Bytes of scratch memory that a call over rows of these sizes, int64[n], needs."""
        blocks = -(-numels // self.block)
        return int((blocks + 1).sum()) * self.partials * 4


def layout(codec: Codec, dtype: torch.dtype | str = "fp32") -> Layout:
    """The layout of the codec's payloads for values of `dtype`. Raises `ConfigError`."""
    return _layout(codec, native_name(dtype))


@lru_cache(maxsize=512)
def _layout(codec: Codec, native: str) -> Layout:
    derived = forms.derive(codec, native)
    partials = max(len(passes.tensor_reductions(p)) for p in derived.programs.values())
    return Layout(tuple(Field(*f) for f in derived.fields), derived.block, partials)
