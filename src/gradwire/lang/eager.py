"""The interpreter in plain torch: what it computes is what every other target must compute.

semantics.py defines the operations, this file how a row is evaluated with them.

It takes one row at a time and evaluates nodes on parts of it: runs of equal blocks as
[blocks, block] tensors, with the ragged last block a part of its own. Element scope is
[blocks, block], block scope [blocks, 1], tensor and constant scope 0-dimensional; all on the CPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch

from gradwire.lang import forms, ir, rng, semantics
from gradwire.lang.call import Call
from gradwire.lang.codec import Codec
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import Layout, element_nbytes, layout, native_name
from gradwire.lang.semantics import ALU, REDUCE, TORCH

PART = 1 << 20  # values evaluated at once: bounds memory, keeps temporaries in cache

Tensor = torch.Tensor


@dataclass(frozen=True)
class Part:
    """Blocks first .. first + blocks - 1 of a row, each of `m` values."""

    first: int
    blocks: int
    m: int


class Interpreter:
    """Target eager: a codec's forms, evaluated node by node."""

    def __init__(self, codec: Codec, dtype: torch.dtype) -> None:
        self.native = native_name(dtype)
        self.programs = forms.derive(codec, self.native).programs
        self.layout = layout(codec, dtype)

    def run(self, form: str, rows: np.ndarray, call: Call) -> None:
        """The backend's one method; see `kernels.Backend`."""
        for row in rows:
            if row["numel"] > 0:
                _Row(self.programs[form], self.layout, self.native, row, call).run()


@dataclass
class _Frame:
    """Where nodes are evaluated: a part, the payload that `source` fields come from, results."""

    part: Part
    source: int | None = None
    memo: dict[Node, Tensor] = field(default_factory=dict)


class _Row:
    def __init__(
        self, program: ir.Program, layout: Layout, native: str, row: np.void, call: Call
    ) -> None:
        self.program, self.layout, self.native, self.row, self.call = (
            program, layout, native, row, call,
        )  # fmt: skip
        self.numel = int(row["numel"])
        self.offsets = layout.offsets(self.numel)
        self.tensor_memo: dict[Node, Tensor] = {}

    def run(self) -> None:
        for part in self.parts():
            frame = _Frame(part)
            # everything is read before anything is written: stores overwrite what loads read
            results = [self.evaluate(n, frame) for n in self.program.roots]
            fields = results[: len(self.program.fields)]
            for (name, n), result in zip(self.program.fields, fields, strict=True):
                self.put(name, n, result, part)
            stored = results[len(fields) :]
            for (target, _), result in zip(self.program.stores, stored, strict=True):
                memory = self.memory(target)
                at = part.first * self.layout.block
                size = part.blocks * part.m
                memory[at : at + size] = result.expand(part.blocks, part.m).reshape(-1)

    def parts(self) -> list[Part]:
        full, rest = divmod(self.numel, self.layout.block)
        step = max(1, PART // self.layout.block)
        parts = [Part(b, min(step, full - b), self.layout.block) for b in range(0, full, step)]
        return [*parts, Part(full, 1, rest)] if rest else parts

    # memory ------------------------------------------------------------------------------------

    def memory(self, target: str) -> Tensor:
        """The row's values (in their dtype) or its residual (fp32), flat."""
        dtype = TORCH[self.native] if target == "values" else torch.float32
        return view(int(self.row[target]), self.numel * dtype.itemsize).view(dtype)

    def payload(self, source: int | None) -> Tensor:
        """The row's own payload, or that of peer number `source`."""
        address = int(self.row["payload"])
        if source is not None:
            address = int(self.row["source"]) + source * self.call.stride
        return view(address, self.offsets[-1])

    def field_bytes(self, name: str, part: Part, payload: Tensor) -> Tensor:
        """The bytes of a field that belong to a part: uint8[blocks, bytes a block]."""
        at = [f.name for f in self.layout.fields].index(name)
        f = self.layout.fields[at]
        begin = self.offsets[at]
        if f.scope is Scope.TENSOR:
            return payload[begin : begin + f.item_nbytes].view(1, -1)
        if f.scope is Scope.BLOCK:
            size, stride = f.item_nbytes, f.item_nbytes
        else:
            size, stride = (
                element_nbytes(f.dtype, part.m),
                element_nbytes(f.dtype, self.layout.block),
            )
        begin += part.first * stride
        return payload[begin : begin + part.blocks * size].view(part.blocks, size)

    def put(self, name: str, n: Node, result: Tensor, part: Part) -> None:
        memory = self.field_bytes(name, part, self.payload(None))
        if n.scope is Scope.ELEMENT:
            result = result.expand(part.blocks, part.m)
        else:
            result = result.reshape(-1, 1)
        if n.dtype.startswith("uint"):
            packed = (
                semantics.pack(result, ir.BITS[n.dtype]) if n.scope is Scope.ELEMENT else result
            )
            memory.copy_(packed)
        else:
            memory.copy_(result.contiguous().view(torch.uint8))

    # evaluation --------------------------------------------------------------------------------

    def evaluate(self, n: Node, frame: _Frame) -> Tensor:
        memo = self.tensor_memo if n.scope <= Scope.TENSOR and frame.source is None else frame.memo
        if n not in memo:
            memo[n] = getattr(self, f"_{n.op}")(n, frame)
        return memo[n]

    def _const(self, n: Node, frame: _Frame) -> Tensor:
        return torch.tensor(n.attr, dtype=torch.float32)

    def _param(self, n: Node, frame: _Frame) -> Tensor:
        return torch.tensor(self.call.factor, dtype=torch.float32)

    def _load(self, n: Node, frame: _Frame) -> Tensor:
        part = frame.part
        at = part.first * self.layout.block
        flat = self.memory(str(n.attr))[at : at + part.blocks * part.m]
        return flat.view(part.blocks, part.m)

    def _field(self, n: Node, frame: _Frame) -> Tensor:
        assert isinstance(n.attr, ir.FieldRef)
        payload = self.payload(frame.source if n.attr.source else None)
        memory = self.field_bytes(n.attr.name, frame.part, payload)
        if n.dtype.startswith("uint"):
            if n.scope is Scope.ELEMENT:
                return semantics.unpack(memory, ir.BITS[n.dtype], frame.part.m)
            result = memory.to(torch.int64)
        else:
            # a copy, since a payload's fields need not be aligned
            result = memory.clone().view(TORCH[n.dtype])
        return result.reshape(()) if n.scope is Scope.TENSOR else result

    def _alu(self, n: Node, frame: _Frame) -> Tensor:
        return ALU[str(n.attr)](*(self.evaluate(a, frame) for a in n.args))

    def _cast(self, n: Node, frame: _Frame) -> Tensor:
        return semantics.cast(self.evaluate(n.args[0], frame), n.dtype, str(n.attr))

    def _random(self, n: Node, frame: _Frame) -> Tensor:
        index = self._index(n, frame)
        if n.scope is Scope.BLOCK:
            index = index[:, :1]
        assert isinstance(n.attr, int)
        return rng.uniform(int(self.row["key"]), n.attr, index)

    def _index(self, n: Node, frame: _Frame) -> Tensor:
        part = frame.part
        first = int(self.row["start"]) + part.first * self.layout.block
        index = torch.arange(first, first + part.blocks * part.m, dtype=torch.int64)
        return (index & rng.MASK32).view(part.blocks, part.m)

    def _reduce(self, n: Node, frame: _Frame) -> Tensor:
        kind = str(n.attr)
        if n.scope is Scope.BLOCK:
            x = self.evaluate(n.args[0], frame)
            return REDUCE[kind](x.expand(frame.part.blocks, frame.part.m))
        partials = [
            self.evaluate(n.args[0], _Frame(part)).expand(part.blocks, 1) for part in self.parts()
        ]
        return REDUCE[kind](torch.cat(partials).view(1, -1)).reshape(())

    def _fold(self, n: Node, frame: _Frame) -> Tensor:
        own, body = n.args
        total = torch.full((frame.part.blocks, frame.part.m), -0.0)  # -0 + x is x, for -0 too
        for k in range(self.call.ranks):
            if k == self.call.rank:
                total = total + self.evaluate(own, frame)
            else:
                source = k - (0 <= self.call.rank < k)
                total = total + self.evaluate(body, _Frame(frame.part, source))
        return total


def view(address: int, nbytes: int) -> Tensor:
    """uint8[nbytes] on memory that the caller owns."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
