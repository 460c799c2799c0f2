"""The interpreter in plain torch: it defines what every other target must compute.

semantics.py defines the operations, eager_memory.py the memory accesses, this file the evaluation
of a row.

Nodes are evaluated on parts of one row: runs of equal blocks as [blocks, block] tensors; a ragged
last block is its own part. Element scope is [blocks, block], block scope [blocks, 1], tensor and
constant scope 0-dimensional; all on the CPU. Selections, entries and matrices span the whole row:
int64[entries], [entries], [rows, columns].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from gradwire.lang import forms, ir, rng, semantics
from gradwire.lang.call import Call, Kernels
from gradwire.lang.codec import Codec
from gradwire.lang.eager_memory import RowMemory, RowPart, in_runs
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import RUN, Layout, native_name
from gradwire.lang.semantics import ALU, REDUCE, TORCH

PART = 1 << 20  # values evaluated at once: bounds memory and keeps temporaries in cache

Tensor = torch.Tensor


class Interpreter(Kernels):
    """Target eager: a codec's forms, evaluated node by node."""

    def __init__(self, codec: Codec, dtype: torch.dtype, target: str) -> None:
        super().__init__(codec, dtype, target)
        self.native = native_name(dtype)
        self.derived = forms.derive(codec, self.native)

    def _run(self, form: str, rows: np.ndarray, call: Call) -> None:
        program = self.derived.programs[form]
        for row in rows:
            if row["numel"] > 0:
                _Row(program, self.layout, self.native, row, call, self.derived.table).run()


_ROW_SCOPES = (Scope.CONSTANT, Scope.TENSOR, Scope.SELECTION, Scope.MATRIX)
_IN_FRAME = ("alu", "lookup", "cast", "keep", "reduce", "rotate", "decompose", "product", "flatten")


@dataclass
class _Frame:
    """An evaluation: its part, the number of the peer whose fields it reads, and its results."""

    part: RowPart
    source: int | None = None
    memo: dict[Node, Tensor] = field(default_factory=dict)


class _Row(RowMemory):
    def __init__(
        self,
        program: ir.Function,
        layout: Layout,
        native: str,
        row: np.void,
        call: Call,
        table: tuple[float, ...],
    ) -> None:
        super().__init__(layout, native, row, call)
        self.program, self.table = program, table
        self.row_memo: dict[tuple[int | None, Node], Tensor] = {}

    def run(self) -> None:
        # all reads come before all writes, since stores overwrite what loads read
        first = _Frame(self.parts()[0])
        self.evaluate_rows(first)
        patches = [
            (t, self.evaluate(s, first), self.evaluate(n, first))
            for t, n, s in self.program.patches
        ]
        if self.layout.variable and self.program.fields:
            self.put_tails()
        for name, n in self.program.fields:
            if n.scope in (Scope.TENSOR, Scope.MATRIX):
                self.put(name, n, self.evaluate(n, first), first.part)
        for part in self.parts():
            self.run_part(part)
        for target, at, values in patches:
            self.memory(target)[at] = values

    def run_part(self, part: RowPart) -> None:
        frame = _Frame(part)
        local = [
            (name, n)
            for name, n in self.program.fields
            if n.scope in (Scope.BLOCK, Scope.ELEMENT) and n.op != "keep"
        ]
        fields = [self.evaluate(n, frame) for _, n in local]
        stores = [self.evaluate(n, frame) for _, n in self.program.stores]
        for (name, n), result in zip(local, fields, strict=True):
            self.put(name, n, result, part)
        for (target, _), result in zip(self.program.stores, stores, strict=True):
            at = part.first * self.layout.block
            self.memory(target)[at : at + part.blocks * part.m] = _flat(result, part)

    def parts(self) -> list[RowPart]:
        full, rest = divmod(self.numel, self.layout.block)
        step = max(1, PART // self.layout.block)
        parts = [RowPart(b, min(step, full - b), self.layout.block) for b in range(0, full, step)]
        return [*parts, RowPart(full, 1, rest)] if rest else parts

    def everywhere(self, n: Node, source: int | None = None) -> Tensor:
        """A node of element or block scope, for every element of the row: [numel]."""
        return torch.cat([_flat(self.evaluate(n, _Frame(p, source)), p) for p in self.parts()])

    def put_tails(self) -> None:
        """Write all fields whose length depends on data, and zeros up to the greatest length."""
        payload = self.payload(None)
        payload[self.offsets[-1] :] = 0
        frame = _Frame(self.parts()[0])
        for (name, n), at in zip(self.program.fields, range(len(self.offsets)), strict=False):
            if n.op == "select":
                chosen = self.evaluate(n, frame)
                counts = torch.bincount(
                    chosen // self.layout.block, minlength=self.layout.blocks(self.numel)
                )
                known = payload[self.offsets[at] : self.offsets[at + 1]]
                known.copy_(counts.to(torch.int16).view(torch.uint8))
                positions = chosen % self.layout.block
                self.put_tail(name, in_runs(positions, self.layout.position), chosen.numel())
            elif n.op == "keep":
                flags = self.everywhere(n.args[1]) != 0
                codes = self.everywhere(n.args[0])[flags]
                self.put_tail(name, in_runs(codes, n.dtype, self.layout.block), codes.numel())
            elif n.scope is Scope.SELECTION:
                self.put_tail(name, in_runs(self.evaluate(n, frame), n.dtype), None)

    # evaluation --------------------------------------------------------------------------------

    def evaluate(self, n: Node, frame: _Frame) -> Tensor:
        found = self.known(n, frame)
        if found is not None:
            return found
        for each in ir.walk([n], lambda m: () if self.is_known(m, frame) else _operands(m)):
            if not self.is_known(each, frame):
                result = getattr(self, f"_{each.op}")(each, frame)
                if each.scope in _ROW_SCOPES:
                    self.row_memo[frame.source, each] = result
                else:
                    frame.memo[each] = result
        found = self.known(n, frame)
        assert found is not None
        return found

    def known(self, n: Node, frame: _Frame) -> Tensor | None:
        if n.scope in _ROW_SCOPES:
            return self.row_memo.get((frame.source, n))
        return frame.memo.get(n)

    def is_known(self, n: Node, frame: _Frame) -> bool:
        return self.known(n, frame) is not None

    def evaluate_rows(self, frame: _Frame) -> None:
        """What spans the row, operands first: their rules evaluate elements of all parts, which
        may depend on others that span the row, to any depth."""
        peers: set[Node] = set()  # what is evaluated per peer payload
        for n in ir.walk(self.program.roots):
            theirs = n.op != "fold" and not peers.isdisjoint(n.args)
            if theirs or getattr(n.attr, "source", False):
                peers.add(n)
            elif n.scope in _ROW_SCOPES or _is_full_rotation(n):
                self.evaluate(n, frame)

    def _const(self, n: Node, frame: _Frame) -> Tensor:
        return torch.tensor(n.attr, dtype=torch.float32)

    def _param(self, n: Node, frame: _Frame) -> Tensor:
        number = self.table[n.attr] if isinstance(n.attr, int) else self.call.factor
        return torch.tensor(number, dtype=torch.float32)

    def _load(self, n: Node, frame: _Frame) -> Tensor:
        part = frame.part
        at = part.first * self.layout.block
        flat = self.memory(str(n.attr))[at : at + part.blocks * part.m]
        return flat.view(part.blocks, part.m)

    def _field(self, n: Node, frame: _Frame) -> Tensor:
        assert isinstance(n.attr, ir.FieldRef)
        payload = self.payload(frame.source if n.attr.source else None)
        if n.dtype == "selection":
            return self.received_selection(n.attr.name, payload)
        if n.scope is Scope.SELECTION:
            entries = self.evaluate(n.args[0], frame).numel()
            return self.received_tail(n.attr.name, payload, entries, n.dtype, RUN)
        if n.args:
            return self.kept_codes(n, payload, frame)
        memory = self.field_bytes(n.attr.name, frame.part, payload)
        if n.dtype in ir.CODES:
            if n.scope is Scope.ELEMENT:
                return semantics.unpack(memory, n.dtype, frame.part.m)
            result = memory.to(torch.int64)
        else:
            # a copy, since the fields of a payload need not be aligned
            result = memory.clone().view(TORCH[n.dtype])
        if n.scope is Scope.MATRIX:
            assert n.attr.shape is not None
            return result.view(n.attr.shape.of(self.numel))
        return result.reshape(()) if n.scope is Scope.TENSOR else result

    def kept_codes(self, n: Node, payload: Tensor, frame: _Frame) -> Tensor:
        assert isinstance(n.attr, ir.FieldRef)
        key = (frame.source, n)
        if key not in self.row_memo:
            flags = self.everywhere(n.args[0], frame.source) != 0
            codes = torch.zeros(self.numel, dtype=torch.int64)
            codes[flags] = self.received_tail(
                n.attr.name, payload, int(flags.sum()), n.dtype, self.layout.block
            )
            self.row_memo[key] = codes
        return _of_part(self.row_memo[key], frame.part, self.layout.block)

    def _alu(self, n: Node, frame: _Frame) -> Tensor:
        return ALU[str(n.attr)](*(self.evaluate(a, frame) for a in n.args))

    def _lookup(self, n: Node, frame: _Frame) -> Tensor:
        x, *numbers = (self.evaluate(a, frame) for a in n.args)
        last = len(numbers) - 1
        return torch.stack(numbers)[torch.where(x < last, x.clamp(min=0), last).long()]

    def _cast(self, n: Node, frame: _Frame) -> Tensor:
        return semantics.cast(self.evaluate(n.args[0], frame), n.dtype, str(n.attr))

    def _keep(self, n: Node, frame: _Frame) -> Tensor:
        kept = self.evaluate(n.args[1], frame) != 0
        return torch.where(kept, self.evaluate(n.args[0], frame), 0)

    def uniform(self, stream: ir.Stream, index: Tensor, source: int | None = None) -> Tensor:
        key = int(self.row["shared" if stream.shared else "key"])
        if stream.source:
            assert source is not None
            key = int(rng.origin_keys(self.row["shared"], self.call.origins[source])[0])
        return rng.uniform(key, stream.number, index)

    def _random(self, n: Node, frame: _Frame) -> Tensor:
        index = self._index(n, frame)
        if n.scope is Scope.BLOCK:
            index = index[:, :1]
        assert isinstance(n.attr, ir.Stream)
        return self.uniform(n.attr, index, frame.source)

    def _index(self, n: Node, frame: _Frame) -> Tensor:
        part = frame.part
        if n.attr == "block":
            return torch.arange(part.m, dtype=torch.int64).expand(part.blocks, part.m)
        first = int(self.row["start"]) + part.first * self.layout.block
        index = torch.arange(first, first + part.blocks * part.m, dtype=torch.int64)
        return (index & rng.MASK32).view(part.blocks, part.m)

    def _reduce(self, n: Node, frame: _Frame) -> Tensor:
        if isinstance(n.attr, ir.Rank):
            return self.order_statistic(n, n.attr)
        kind = str(n.attr)
        if n.scope is Scope.BLOCK:
            x = self.evaluate(n.args[0], frame)
            return REDUCE[kind](x.expand(frame.part.blocks, frame.part.m))
        partials = [
            self.evaluate(n.args[0], _Frame(part)).expand(part.blocks, 1) for part in self.parts()
        ]
        return REDUCE[kind](torch.cat(partials).view(1, -1)).reshape(())

    def order_statistic(self, n: Node, rank: ir.Rank) -> Tensor:
        window = torch.arange(-(-self.numel // rank.every), dtype=torch.int64)
        inside = (self.uniform(rank.stream, window) * rank.every).to(torch.int64)
        sample = (window * rank.every + inside).clamp(max=self.numel - 1)
        values = self.everywhere(n.args[0])[sample]
        order = torch.argsort(semantics.ordered(values), descending=True, stable=True)
        return values[order[rank.size.of(window.numel()) - 1]]

    def _rotate(self, n: Node, frame: _Frame) -> Tensor:
        rotation = n.attr
        assert isinstance(rotation, ir.Rotation)
        if not rotation.full:
            return self.rotated(self.evaluate(n.args[0], frame), self._index(n, frame), rotation)
        key = (frame.source, n)
        if key not in self.row_memo:
            x = self.everywhere(n.args[0], frame.source).view(1, -1)
            index = torch.arange(self.numel, dtype=torch.int64).view(1, -1)
            self.row_memo[key] = self.rotated(x, index, rotation).view(-1)
        return _of_part(self.row_memo[key], frame.part, self.layout.block)

    def rotated(self, x: Tensor, index: Tensor, rotation: ir.Rotation) -> Tensor:
        upper = self.uniform(rotation.stream, index) >= 0.5
        signs = 1 - 2 * upper.to(torch.float32)
        return semantics.rotate(x.expand(index.shape), signs, rotation.inverse)

    def _select(self, n: Node, frame: _Frame) -> Tensor:
        assert isinstance(n.attr, ir.Size)
        capacity = n.attr.of(self.numel)
        conditions = [a for a in n.args if a.dtype == "bool"]
        candidates = torch.arange(self.numel, dtype=torch.int64)
        if conditions:
            candidates = candidates[self.everywhere(conditions[0])]
        if n.args[0].dtype == "bool":
            return candidates[:capacity]
        keys = semantics.ordered(self.everywhere(n.args[0]))[candidates]
        order = torch.argsort(keys, descending=True, stable=True)
        return candidates[order[:capacity]].sort().values

    def _gather(self, n: Node, frame: _Frame) -> Tensor:
        return self.everywhere(n.args[0], frame.source)[self.evaluate(n.args[1], frame)]

    def _fold(self, n: Node, frame: _Frame) -> Tensor:
        own, *peers = n.args
        part = frame.part
        # -0 + x is x, for -0 too
        total = torch.full((part.blocks, part.m), -0.0, dtype=torch.float32)
        for k in range(self.call.ranks):
            if k == self.call.rank:
                total = total + self.evaluate(own, frame)
                continue
            theirs = _Frame(part, k - (0 <= self.call.rank < k))
            if len(peers) == 1:
                total = total + self.evaluate(peers[0], theirs)
            else:
                values, chosen = (self.evaluate(p, theirs) for p in peers)
                first = part.first * self.layout.block
                here = (chosen >= first) & (chosen < first + total.numel())
                flat = total.view(-1)
                flat[chosen[here] - first] += values.expand(chosen.shape)[here]
        return total

    # matrices ----------------------------------------------------------------------------------

    def _matrix(self, n: Node, frame: _Frame) -> Tensor:
        assert isinstance(n.attr, ir.Shape)
        rows, columns = n.attr.of(self.numel)
        padded = torch.zeros(rows * columns, dtype=torch.float32)
        padded[: self.numel] = self.everywhere(n.args[0], frame.source)
        return padded.view(rows, columns)

    def _decompose(self, n: Node, frame: _Frame) -> Tensor:
        assert isinstance(n.attr, ir.Factor)
        m = self.evaluate(n.args[0], frame)
        start = torch.arange(m.shape[1] * n.attr.rank, dtype=torch.int64).view(m.shape[1], -1)
        left = m @ (self.uniform(n.attr.stream, start) - 0.5)
        if bool(torch.isfinite(left).all()):
            left = torch.linalg.qr(left).Q
            # fewer rows than the rank: the missing directions are zero
            left = torch.nn.functional.pad(left, (0, n.attr.rank - left.shape[1]))
        else:
            left = torch.full_like(left, math.nan)
        return left if n.attr.side == "left" else m.T @ left

    def _product(self, n: Node, frame: _Frame) -> Tensor:
        a, b = (self.evaluate(x, frame) for x in n.args)
        return a @ b.T

    def _flatten(self, n: Node, frame: _Frame) -> Tensor:
        flat = self.evaluate(n.args[0], frame).reshape(-1)[: self.numel]
        return _of_part(flat, frame.part, self.layout.block)


def _operands(n: Node) -> tuple[Node, ...]:
    """The operands whose values an operation takes from the frame that it is evaluated in."""
    in_frame = n.op in _IN_FRAME and not (n.op == "reduce" and n.scope is Scope.TENSOR)
    return n.args if in_frame and not _is_full_rotation(n) else ()


def _is_full_rotation(n: Node) -> bool:
    return isinstance(n.attr, ir.Rotation) and n.attr.full


def _flat(result: Tensor, part: RowPart) -> Tensor:
    return result.expand(part.blocks, part.m).reshape(-1)


def _of_part(flat: Tensor, part: RowPart, block: int) -> Tensor:
    first = part.first * block
    return flat[first : first + part.blocks * part.m].view(part.blocks, part.m)
