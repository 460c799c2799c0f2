"""The interpreter in plain torch: what it computes is what every other target must compute.

It takes one row at a time and evaluates nodes on parts of it: runs of equal blocks as
[blocks, block] tensors, with the ragged last block a part of its own. Element scope is
[blocks, block], block scope [blocks, 1], tensor and constant scope 0-dimensional; all on the CPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from gradwire.lang import ir, rng
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import Layout, element_nbytes, planes

PART = 1 << 20  # values evaluated at once: bounds memory, keeps temporaries in cache
LANES = 16
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}

Tensor = torch.Tensor


@dataclass(frozen=True)
class Part:
    """Blocks first .. first + blocks - 1 of a row, each of `m` values."""

    first: int
    blocks: int
    m: int


@dataclass(frozen=True)
class Call:
    """The scalar arguments of a kernel call."""

    ranks: int = 1
    rank: int = 0
    stride: int = 0
    factor: float = 1.0


def run(program: ir.Program, layout: Layout, native: str, rows: np.ndarray, call: Call) -> None:
    """Execute a program on every row; `rows` is a table of dtype `layout.ROW`."""
    for row in rows:
        if row["numel"] > 0:
            _Row(program, layout, native, row, call).run()


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
            for (target, n), result in zip(
                self.program.stores, results[len(fields) :], strict=True
            ):
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
            packed = pack(result, ir.BITS[n.dtype]) if n.scope is Scope.ELEMENT else result
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
        name, from_source = n.attr  # type: ignore[misc]
        payload = self.payload(frame.source if from_source else None)
        memory = self.field_bytes(name, frame.part, payload)
        if n.dtype.startswith("uint"):
            if n.scope is Scope.ELEMENT:
                return unpack(memory, ir.BITS[n.dtype], frame.part.m)
            result = memory.to(torch.int64)
        else:
            # a copy, since a payload's fields need not be aligned
            result = memory.clone().view(TORCH[n.dtype])
        return result.reshape(()) if n.scope is Scope.TENSOR else result

    def _alu(self, n: Node, frame: _Frame) -> Tensor:
        return ALU[str(n.attr)](*(self.evaluate(a, frame) for a in n.args))

    def _cast(self, n: Node, frame: _Frame) -> Tensor:
        return cast(self.evaluate(n.args[0], frame), n.dtype, str(n.attr))

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
                source = k - (k > self.call.rank)
                total = total + self.evaluate(body, _Frame(frame.part, source))
        return total


def view(address: int, nbytes: int) -> Tensor:
    """uint8[nbytes] on memory that the caller owns."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def cast(x: Tensor, dtype: str, rounding: str) -> Tensor:
    """fp32 to a stored dtype, or a stored dtype to fp32. Saturates; writes one kind of NaN."""
    if dtype == "fp32" and rounding != "stored":
        return x.to(torch.float32)
    if dtype.startswith("uint"):
        top = float(2 ** ir.BITS[dtype] - 1)
        return _minimum(_maximum(x, torch.tensor(0.0)), torch.tensor(top)).to(torch.int64)
    nan = torch.tensor(math.nan)
    if dtype == "fp32":
        return torch.where(torch.isnan(x), nan, x)
    largest = LARGEST[dtype]
    x = torch.where(torch.isfinite(x), x.clamp(-largest, largest), x)
    x = torch.where(torch.isnan(x), nan, x)
    if rounding != "nearest":
        # toward zero drops the low bits; outward is one more in magnitude where any was set
        bits = x.view(torch.int32)
        outward = (x < 0) if rounding == "down" else (x > 0)
        dropped = (bits & 0xFFFF) != 0
        bits = (bits & -0x10000) + (outward & dropped & torch.isfinite(x)).to(torch.int32) * 0x10000
        x = torch.where(torch.isnan(x), x, bits.view(torch.float32))
    return x.to(TORCH[dtype])


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a > b, a, b)


def _minimum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a < b, a, b)


ALU: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": _maximum,
    "min": _minimum,
    "neg": torch.neg,
    "abs": torch.abs,
    "floor": torch.floor,
    # in fp64, since torch.sqrt of fp32 may be off by an ulp; rounding twice is harmless here
    "sqrt": lambda x: x.double().sqrt().float(),
    "isfinite": torch.isfinite,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "where": torch.where,
}


def lane_sum(x: Tensor) -> Tensor:
    """[blocks, m] -> [blocks, 1]: lane l of 16 adds elements l, l + 16, ..., then lanes halve."""
    blocks, m = x.shape
    padded = torch.zeros(blocks, -(-m // LANES) * LANES)
    padded[:, :m] = x
    lanes = torch.zeros(blocks, LANES)
    for step in padded.view(blocks, -1, LANES).unbind(1):
        lanes = lanes + step
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


# amin and amax propagate NaN; adding +0 turns -0 into +0, so order cannot be seen
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda x: x.amin(1, keepdim=True) + 0.0,
    "max": lambda x: x.amax(1, keepdim=True) + 0.0,
    "sum": lane_sum,
}


def pack(codes: Tensor, bits: int) -> Tensor:
    """int64[blocks, m] -> uint8[blocks, bytes] in planes."""
    blocks, m = codes.shape
    packed = []
    for width, at in planes(bits):
        per, length = 8 // width, (m * width + 7) // 8
        cells = torch.zeros(blocks, per * length, dtype=torch.int64)
        cells[:, :m] = (codes >> at) & (2**width - 1)
        shifts = torch.arange(per).view(1, per, 1) * width
        packed.append((cells.view(blocks, per, length) << shifts).sum(1))
    return torch.cat(packed, 1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, m: int) -> Tensor:
    """uint8[blocks, bytes] -> int64[blocks, m]."""
    codes = torch.zeros(packed.shape[0], m, dtype=torch.int64)
    begin = 0
    for width, at in planes(bits):
        per, length = 8 // width, (m * width + 7) // 8
        plane = packed[:, begin : begin + length].to(torch.int64).unsqueeze(1)
        shifts = torch.arange(per).view(1, per, 1) * width
        cells = (plane >> shifts) & (2**width - 1)
        codes |= cells.reshape(packed.shape[0], -1)[:, :m] << at
        begin += length
    return codes
