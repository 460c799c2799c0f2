"""A row's values and payload, as the interpreter reads and writes them.

layout.py defines the offsets in a payload; this file converts between bytes and numbers, and
rejects malformed payloads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.errors import CodecError
from gradwire.lang import ir, semantics
from gradwire.lang.call import Call
from gradwire.lang.forms import Field
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import RUN, Layout, element_nbytes, run_nbytes
from gradwire.lang.semantics import TORCH

Tensor = torch.Tensor


@dataclass(frozen=True)
class RowPart:
    """Blocks first .. first + blocks - 1 of a row, each of `m` values."""

    first: int
    blocks: int
    m: int


class RowMemory:
    """The memory that a row of a call's table points to."""

    def __init__(self, layout: Layout, native: str, row: np.void, call: Call) -> None:
        self.layout, self.native, self.row, self.call = layout, native, row, call
        self.numel = int(row["numel"])
        self.offsets = layout.offsets(self.numel)

    def memory(self, target: str) -> Tensor:
        """The row's values (in their dtype) or its residual (fp32), flat."""
        dtype = TORCH[self.native] if target == "values" else torch.float32
        return view(int(self.row[target]), self.numel * dtype.itemsize).view(dtype)

    def payload(self, source: int | None) -> Tensor:
        """The row's own payload, or that of peer number `source`."""
        address = int(self.row["payload"])
        if source is not None:
            distances = self.call.distances
            assert distances is not None
            address = int(self.row["source"]) + int(distances[source])
        return view(address, self.layout.nbytes(self.numel))

    def field(self, name: str) -> tuple[int, Field]:
        at = [f.name for f in self.layout.fields].index(name)
        return at, self.layout.fields[at]

    def field_bytes(self, name: str, part: RowPart, payload: Tensor) -> Tensor:
        """The bytes of a field that belong to a part: uint8[blocks, bytes per block]."""
        at, f = self.field(name)
        begin, end = self.offsets[at : at + 2]
        if f.scope in (Scope.TENSOR, Scope.MATRIX):
            return payload[begin:end].view(1, -1)
        if f.scope is Scope.BLOCK:
            size, stride = f.item_nbytes, f.item_nbytes
        else:
            size, stride = (
                element_nbytes(f.dtype, part.m),
                element_nbytes(f.dtype, self.layout.block),
            )
        begin += part.first * stride
        return payload[begin : begin + part.blocks * size].view(part.blocks, size)

    def put(self, name: str, n: Node, result: Tensor, part: RowPart) -> None:
        memory = self.field_bytes(name, part, self.payload(None))
        if n.scope is Scope.ELEMENT:
            result = result.expand(part.blocks, part.m)
        elif n.scope is not Scope.MATRIX:
            result = result.reshape(-1, 1)
        if n.dtype in ir.CODES:
            memory.copy_(semantics.pack(result, n.dtype) if n.scope is Scope.ELEMENT else result)
        else:
            memory.copy_(result.reshape(-1).view(torch.uint8).view(memory.shape))

    def put_tail(self, name: str, data: Tensor, entries: int | None) -> None:
        if entries is not None:
            self.entries = entries  # the selection comes before its entries
        begin, nbytes = self.layout.tails(self.numel, self.entries)[self.field(name)[0]]
        self.payload(None)[begin : begin + nbytes] = data

    def received_selection(self, name: str, payload: Tensor) -> Tensor:
        """int64[entries]: the elements that a payload selects. `CodecError` if it is malformed."""
        at, f = self.field(name)
        assert f.capacity is not None
        known = payload[self.offsets[at] : self.offsets[at + 1]]
        counts = known.clone().view(torch.int16).to(torch.int64) & 0xFFFF
        entries = int(counts.sum())
        if entries > f.capacity.of(self.numel):
            raise CodecError(
                f"{name}: {entries} entries of {self.numel} values, but at most "
                f"{f.capacity.of(self.numel)} are possible"
            )
        dtype = self.layout.position
        positions = self.received_tail(name, payload, entries, dtype, RUN)
        blocks = torch.arange(counts.numel(), dtype=torch.int64).repeat_interleave(counts)
        chosen = blocks * self.layout.block + positions
        ascending = bool((chosen[1:] > chosen[:-1]).all())
        if (
            not ascending
            or bool((positions >= self.layout.block).any())
            or (entries and int(chosen[-1]) >= self.numel)
        ):
            raise CodecError(f"{name}: positions are not ascending, or beyond the end")
        return chosen

    def received_tail(
        self, name: str, payload: Tensor, entries: int, dtype: str, run: int
    ) -> Tensor:
        begin, nbytes = self.layout.tails(self.numel, entries)[self.field(name)[0]]
        data = payload[begin : begin + nbytes].clone()
        if dtype not in ir.CODES and dtype in TORCH:
            return data.view(TORCH[dtype])
        full = run_nbytes(dtype, entries // run * run, run)
        rows = entries // run
        pieces = [(data[:full], rows, run), (data[full:], 1, entries % run)]
        codes = [
            semantics.unpack(piece.view(blocks, -1), dtype, m).reshape(-1)
            for piece, blocks, m in pieces
            if piece.numel()
        ]
        return torch.cat([torch.empty(0, dtype=torch.int64), *codes])


def in_runs(values: Tensor, dtype: str, run: int = RUN) -> Tensor:
    """Values as stored in a payload: uint8, in runs."""
    if dtype in TORCH:
        return values.contiguous().view(torch.uint8)
    full = values.numel() // run * run
    runs = [values[:full].view(-1, run), values[full:].view(1, -1)]
    packed = [semantics.pack(r, dtype).reshape(-1) for r in runs if r.numel()]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *packed])


def view(address: int, nbytes: int) -> Tensor:
    """uint8[nbytes] on memory that the caller owns."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
