"""Triton over entries: own and received selections, samples, kept codes.

The own selection: a first sweep has stored the candidates of every block, in order (see
triton_selection.py). The last sweep takes a piece of every block's candidates at a time, and
evaluates what is sent of an element in the *tensor of candidates* [G, PIECE], whose elements lie at
the candidates' positions (triton_views.py). So its costs are those of few elements, whatever a
codec sends of them.

Received payloads are handled in the same tensor, at the positions of their entries. Sums of
payloads run in rank order, in the workspace, in a sweep of their own.

Names: entryP, entriesP of a received selection, where P is the node's number; entry0, entries0 of
the own one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.lang import ir
from gradwire.lang.emit import triton_rows
from gradwire.lang.emit.triton_blocks import Joins
from gradwire.lang.emit.triton_rows import LOADS, STORES
from gradwire.lang.emit.triton_views import Tensor
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import element_nbytes
from gradwire.lang.sweeps import Partial, Sink


class Kernel(Joins):
    """Emits the kernel of one sweep."""

    def emit(self, name: str, sinks: list[Sink], partials: list[Partial]) -> str:
        """The kernel that computes partial results, or fields, stores and patches."""
        ends = any(s.kind in ("store", "patch") for s in sinks)
        if ends:
            self.stored = dict(self.program.stores)
        for p in partials:
            self.partial(p)
        for sink in sinks:
            if sink.kind == "flag":
                self.field(sink.name, sink.node)
                self.clear()
            elif sink.kind == "field" and sink.node.op == "keep":
                self.kept(sink.node)
            elif sink.kind == "field":
                self.field(sink.name, sink.node)
        for sink in sinks:
            if sink.kind == "key":
                self.entries(sink.name)
        if ends:
            self.stores()
        return self.text(name)

    def emit_keys(self, name: str) -> str:
        """The kernel that finds the candidates of rows where they are still to be found."""
        self.put("if tl.load(row + CLOSED) == 0:")
        with self.nested():
            self.sift()
        return self.text(name)

    def emit_totals(self, name: str) -> str:
        """The kernel that adds up what ranks have sent, one after the other, in the workspace; from
        there the next sweeps load it."""
        (fold,) = (n for n in self.number if n.op == "fold")
        self.used.totals = True
        for t in self.natural:
            self.put(f"tl.store(totals + o{t}, number(0x80000000), mask=in{t})")

        def add(n: Node, tensors: list[Tensor]) -> None:
            self.put("tl.debug_barrier()")  # other threads may have stored what comes before
            for t in tensors:
                total = f"tl.load(totals + o{t}, mask=in{t}, other=0.0)"
                self.put(f"tl.store(totals + o{t}, {total} + {self.value(n, t)}, mask=in{t})")

        def peer() -> None:
            with self.visit(fold.args[2]) as t:
                add(fold.args[1], [t])

        self.over_ranks(lambda: add(fold.args[0], self.natural), peer)
        return self.text(name)

    def sift(self) -> None:
        """Append the candidates of a tile to those of the row. Their numbers in a few tensors are
        counted in the bits of one word."""
        tensors, bits = self.natural, self.natural[0].width.bit_length()
        of_word, ones, counts = 32 // bits, (1 << bits) - 1, {}
        self.used.singly = True
        self.put("floor_ = tl.maximum(tl.load(row + FLOOR), 1).to(tl.uint32)")
        self.put("keys, positions = words + tl.load(row + KEYS), positions_of(row, words)")
        for first in range(0, len(tensors), of_word):
            word = f"word{first}"
            for k, t in enumerate(tensors[first : first + of_word]):
                self.put(f"key{t} = {self.key(t)}")
                self.put(f"hit{t} = in{t} & (key{t} >= floor_)")
                one = f"tl.where(hit{t}, {1 << k * bits}, 0)"
                self.put(f"{word} = {f'{word} | {one}' if k else one}")
                counts[t] = (
                    f"(before{first} >> {k * bits} & {ones})",
                    f"(sum{first} >> {k * bits} & {ones})",
                )
            self.put(f"before{first} = tl.cumsum({word}, 1) - {word}")
            self.put(f"sum{first} = tl.sum({word}, 1)[:, None]")
        many = " + ".join(sums for _, sums in counts.values())
        self.put(f"at, counted = reserve(row, words, block, {self.held}, g, here, {many})")
        for t, (earlier, sums) in counts.items():
            self.put(f"tl.store(keys + (at + {earlier}), int_of(key{t}), mask=hit{t})")
            self.put(f"tl.store(positions + (at + {earlier}), i{t}.to(tl.uint16), mask=hit{t})")
            self.put(f"at += {sums}")
        self.put("close(row, words, block, counted)")

    @property
    def held(self) -> str:
        """The number of blocks of a tile."""
        return "GROUP" if self.full else "held"

    def emit_picks(self, name: str) -> str:
        """The kernel that stores a few keys, from which the floor of candidates is chosen."""
        self.put(f"if has_picks(row, block, {self.held}):")
        self.used.singly = True
        with self.nested():
            for t in self.natural:
                self.put(f"place, picked = picks(row, block + g, i{t}, BLOCK)")
                at = "words + tl.load(row + KEYS) + place"
                self.put(f"tl.store({at}, int_of({self.key(t)}), mask=in{t} & picked)")
        return self.text(name)

    def key(self, t: Tensor) -> str:
        """The keys of elements; 0 for no key."""
        (select,) = (n for _, n in self.program.fields if n.op == "select")
        conditions = [self.value(a, t) for a in select.args if a.dtype == "bool"]
        ranked = [f"key_of({self.operand(a, t)})" for a in select.args if a.dtype != "bool"]
        key = ranked[0] if ranked else "1"
        if conditions:
            key = f"tl.where({conditions[0]}, {key}, 0)"
        return f"({key}).to(tl.uint32)"

    def emit_sample(self, name: str, statistic: Node) -> str:
        """The kernel that stores the keys of a sample's elements in the workspace."""
        rank = statistic.attr
        assert isinstance(rank, ir.Rank)
        stream, self.used.singly = self.stream(rank.stream), True
        for t in self.tensors:
            key = f"int_of(key_of({self.operand(statistic.args[0], t)}))"
            self.put(
                f"window, taken = sampled(row, block * {self.layout.block} + o{t}, {stream}_low, "
                f"{stream}_high, {rank.every})"
            )
            keys = "words + tl.load(row + KEYS) + window"
            self.put(f"tl.store({keys}, {key}, mask=in{t} & taken)")
        self.put("if block == 0:")
        self.put("    clear(words + tl.load(row + STATE), SUMS)")
        return self.text(name)

    def text(self, name: str) -> str:
        return triton_rows.kernel(
            name, self.layout, self.native, self.full, self.used, self.views.lines(), self.lines
        )

    # what a sweep stores --------------------------------------------------------------------------

    def stores(self) -> None:
        """All stores, after all reads; then patches."""
        written = [
            (target, t, self.value(n, t))
            for t in self.tensors
            for target, n in self.program.stores
            if (target, t) not in self.settled
        ]
        alone = self.views.shared and not self.sent()
        if written and (self.used.loads or self.patches()) and not alone:
            # another thread may still have to read, elsewhere, what this one stores
            self.put("tl.debug_barrier()")
        for target, t, value in written:
            self.store(target, t, value)
        received = {s for _, _, s in self.program.patches if s.op != "select"}
        for selection in received:
            self.scatter(selection)
        if self.patches():
            self.patch_entries()

    def scatter(self, selection: Node) -> None:
        """Patch the elements that a payload has entries of."""
        if self.program.stores:  # of elements that other threads have stored
            self.put("tl.debug_barrier()")
        with self.visit(selection) as t:
            for target, n, _ in self.program.patches:
                self.store(target, t, self.value(n, t))

    @contextmanager
    def visit(self, selection: Node) -> Iterator[Tensor]:
        """The elements that a payload has entries of: a piece of every block's at a time.

        Every block belongs to one program, and no element has two entries in a valid payload.
        """
        assert isinstance(selection.attr, ir.FieldRef)
        t, p, slot = self.views.candidates, self.number[selection], self.slot(selection)
        tail = self.tail(self.base(selection), selection.attr.name, f"entries{p}")
        self.put(f"before{p} = words + tl.load(row + BEFORE) + {slot} * (blocks + 1)")
        self.put(f"entries{p} = tl.load(before{p} + blocks)")
        self.put(f"from{p} = tl.load(before{p} + block + g, mask=here, other=0)")
        self.put(f"to{p} = tl.load(before{p} + block + g + 1, mask=here, other=0)")
        self.put(f"most{p} = tl.max(to{p} - from{p})")
        self.put(f"for piece in range(0, tl.minimum(most{p}, BLOCK), {t.width}):")
        with self.nested():
            self.put(f"i0, in0, entry{p} = listed(")
            self.put(f"    failed, row, {tail}, from{p}, to{p}, entries{p}, piece,")
            self.put(f"    {self.views.size}, {t.width}, {ir.BITS[self.layout.position]}")
            self.put(")")
            self.put("o0 = g * BLOCK + i0")
            yield t

    def prepare(self) -> None:
        """What candidates take from their tile: numbers of its blocks, and rotated elements."""
        roots = [n for _, n in (*self.sent(), *self.patches())]
        first = ("gather", "fold")  # what follows is the selection, or of a peer's payload
        for n in ir.walk(roots, lambda n: n.args[:1] if n.op in first else n.args):
            if n.op == "rotate":
                self.value(n, *self.natural)
            elif n.scope is Scope.BLOCK:
                self.value(n)

    def entries(self, name: str) -> None:
        """The number of selected elements per block; their positions, other fields and patches.

        Patches are staged, since stores overwrite what all candidates read.
        """
        t = self.views.candidates
        self.prepare()
        self.put("start, many, ties, begin0, own = segments(row, words, block, g, here, blocks)")
        self.put("next0 = begin0")
        at, align = self.part(name)
        self.put(f"store16(payload + {at}, g, own.to(tl.uint32), here, {align})")
        self.put("staged = words + tl.load(row + STAGED)")
        self.put("entries0 = tl.load(words + tl.load(row + BEFORE) + blocks)")
        self.put(f"for piece in range(0, tl.max(many), {t.width}):")
        with self.nested():
            self.put("i0, in0, entry0, ties, next0 = chosen(")
            self.put(f"    row, words, start, many, piece, ties, next0, {t.width}")
            self.put(")")
            self.put("o0 = g * BLOCK + i0")
            self.put("tl.store(staged + entry0, i0, mask=in0)")
            self.send(t)
            for column, (target, n) in enumerate(self.patches(), self.columns):
                kept = "tl.int32" if self.is_narrow(target) else "tl.int32, bitcast=True"
                value = f"({self.operand(n, t)}).to({kept})"
                self.put(f"tl.store({self.column(column)} + entry0, {value}, mask=in0)")

    def patch_entries(self) -> None:
        """Store what has been staged for the selected elements."""
        width = self.views.candidates.width
        self.put("tl.debug_barrier()")  # of elements that other threads have stored
        self.put(f"for piece in range(0, tl.max(own), {width}):")
        with self.nested():
            self.put(f"e0 = piece + tl.arange(0, {width})[None, :]")
            self.put("in0 = e0 < own")
            self.put("e0 = begin0 + e0")
            self.put("o0 = g * BLOCK + tl.load(staged + e0, mask=in0, other=0)")
            for column, (target, _) in enumerate(self.patches(), self.columns):
                kept = "tl.uint16" if self.is_narrow(target) else "tl.float32, bitcast=True"
                bits = f"tl.load({self.column(column)} + e0, mask=in0, other=0)"
                self.used.targets.add(target)
                self.put(f"tl.store({target} + o0, {bits}.to({kept}), mask=in0)")

    def column(self, number: int) -> str:
        """Of what is staged per entry: its position, its codes, its patches."""
        return f"staged + {number} * tl.load(row + CAPACITY)"

    @property
    def columns(self) -> int:
        """The number of the first column of patches."""
        return 1 + sum(n.dtype in ir.CODES for _, n in self.sent())

    def send(self, t: Tensor) -> None:
        """Store the other fields of entries."""
        columns = 1
        for name, n in self.sent():
            value = self.value(n, t)
            if n.dtype in ir.CODES:
                self.put(f"tl.store({self.column(columns)} + entry0, {value}, mask=in0)")
                columns += 1
            else:
                tail = self.tail("payload", name, "entries0")
                self.put(f"{STORES[n.dtype]}({tail}, entry0, {value}, in0, 0)")

    def sent(self) -> list[tuple[str, Node]]:
        """The fields of the own selection, but the selection itself."""
        fields = self.program.fields
        return [(k, n) for k, n in fields if n.scope is Scope.SELECTION and n.op != "select"]

    def patches(self) -> list[tuple[str, Node]]:
        """The targets that the own selection patches, and what it stores there."""
        return [(target, n) for target, n, s in self.program.patches if s.op == "select"]

    def clear(self) -> None:
        """Zero the memory of kept codes before any is stored."""
        for f in self.layout.fields:
            if f.flag is not None:
                n = next(n for name, n in self.program.fields if name == f.name)
                nbytes = element_nbytes(n.dtype, self.layout.block)
                self.planes(f"tl.load(row + TAIL) + block * {nbytes}", n, 0, zero=True)

    def kept(self, n: Node) -> None:
        """Pack the codes of blocks whose flag is set, behind those of earlier blocks."""
        codes, flag = n.args
        before = self.before("0")
        self.put(f"flag = {self.value(flag)} != 0")
        self.planes("tl.load(row + TAIL)", codes, 0, kept=before)

    # nodes ----------------------------------------------------------------------------------------

    def node_keep(self, n: Node, t: Tensor) -> str:
        codes, flag = (self.value(a, t) for a in n.args)
        return f"tl.where({flag} != 0, {codes}, 0)"

    def node_gather(self, n: Node, t: Tensor) -> str:
        return self.operand(n.args[0], t)

    def node_field(self, n: Node, t: Tensor) -> str:
        if n.scope is Scope.SELECTION:
            return self.entry(n, t)
        if n.args:
            return self.received_kept(n, t)
        return super().node_field(n, t)

    def entry(self, n: Node, t: Tensor) -> str:
        """A received field of an entry."""
        assert isinstance(n.attr, ir.FieldRef)
        p = self.number[n.args[0]]
        tail = self.tail(self.base(n), n.attr.name, f"entries{p}")
        if n.dtype in ir.CODES:
            bits = triton_rows.code_bits(n.dtype)
            return f"code_at({tail}, entry{p}, entries{p}, in{t}, {bits})"
        return f"{LOADS[n.dtype]}({tail}, entry{p}, in{t}, 0)"

    def received_kept(self, n: Node, t: Tensor) -> str:
        """Kept codes; 0 in blocks whose flag is not set."""
        flag, before = self.value(n.args[0]), self.before(self.slot(n))
        address = f"{self.base(n)} + tl.load(row + TAIL)"
        return self.unpacked(n, t, address, 0, before, flag)

    def node_fold(self, n: Node, t: Tensor) -> str | None:
        if len(n.args) == 2:
            return super().node_fold(n, t)
        self.used.totals = True
        return f"tl.load(totals + o{t}, mask=in{t}, other=0.0)"

    # received selections --------------------------------------------------------------------------

    def slot(self, n: Node) -> str:
        """The index of the payload in the survey: the own one first, then the peers'."""
        assert isinstance(n.attr, ir.FieldRef)
        return "(1 + peer)" if n.attr.source else "0"

    def before(self, slot: str) -> str:
        """The number of earlier blocks whose codes are kept."""
        if ("before", slot) not in self.memo:
            at = f"words + tl.load(row + BEFORE) + {slot} * (blocks + 1) + block + g"
            self.memo["before", slot] = f"before{self.suffix}"
            self.put(f"before{self.suffix} = tl.load({at}, mask=here, other=0)")
        return self.memo["before", slot]

    def tail(self, base: str, name: str, entries: str) -> str:
        """The address of the part of a field whose length depends on the number of entries."""
        sizes = [
            f" + {size}"
            for f, size in triton_rows.tails(self.layout, entries)
            if self.index(f.name) < self.index(name)
        ]
        return f"{base} + tl.load(row + TAIL){''.join(sizes)}"
