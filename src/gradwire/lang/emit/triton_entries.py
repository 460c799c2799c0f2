"""Triton over entries: own and received selections, samples, kept codes.

An entry is computed in the tile of its element, so gathering reads the element's own value. Every
element of a tile finds out whether it is selected and its entry number. For the own selection,
earlier passes have computed the threshold and the number of entries before every block
(triton_selection.py). In a received payload, the entries are sorted, so an element bisects the
entries of its block. Nothing is scattered, and sums run in rank order.

Names: hitP, entryP, entriesP of a selection, where P is the node's number and the tensor. Where
there is a selection, the natural order is one tensor, so entries are counted along its axis.
"""

from __future__ import annotations

from gradwire.lang import ir
from gradwire.lang.emit import triton_rows
from gradwire.lang.emit.triton_blocks import Joins
from gradwire.lang.emit.triton_rows import LOADS, STORES
from gradwire.lang.emit.triton_views import Tensor
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import COUNT_NBYTES
from gradwire.lang.sweeps import Partial, Sink


class Kernel(Joins):
    """Emits the kernel of one sweep."""

    def emit(self, name: str, sinks: list[Sink], partials: list[Partial]) -> str:
        """The kernel that computes partial results, or fields, stores and patches."""
        ends = any(s.kind in ("store", "patch", "key") for s in sinks)
        if ends and not self.program.patches:
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
            elif sink.kind == "key":
                self.entries(sink.name, sink.node)
        if ends:
            self.stores()
        return self.text(name)

    def emit_keys(self, name: str) -> str:
        """The kernel that stores the keys of elements in the workspace; 0 for no key."""
        (select,) = (n for _, n in self.program.fields if n.op == "select")
        (t,) = self.tensors
        conditions = [self.value(a, t) for a in select.args if a.dtype == "bool"]
        ranked = [f"key_of({self.operand(a, t)})" for a in select.args if a.dtype != "bool"]
        key = ranked[0] if ranked else "1"
        if conditions:
            key = f"tl.where({conditions[0]}, {key}, 0)"
        self.put(f"keys = words + tl.load(row + KEYS) + block * {self.layout.block}")
        self.put(f"tl.store(keys + o{t}, as_int(({key}).to(tl.uint32)), mask=in{t})")
        self.put(f"begin_selection(row, words, block, {'True' if ranked else 'False'})")
        return self.text(name)

    def emit_sample(self, name: str, statistic: Node) -> str:
        """The kernel that stores the keys of a sample's elements in the workspace."""
        rank = statistic.attr
        assert isinstance(rank, ir.Rank)
        stream = self.stream(rank.stream)
        for t in self.tensors:
            key = f"as_int(key_of({self.operand(statistic.args[0], t)}))"
            self.put(
                f"window, taken = sampled(row, block * {self.layout.block} + o{t}, {stream}_low, "
                f"{stream}_high, {rank.every})"
            )
            keys = "words + tl.load(row + KEYS) + window"
            self.put(f"tl.store({keys}, {key}, mask=in{t} & taken)")
        self.put("begin_selection(row, words, block, True)")
        return self.text(name)

    def text(self, name: str) -> str:
        return triton_rows.kernel(
            name, self.layout, self.native, self.full, self.used, self.views.lines(), self.lines
        )

    # what a sweep stores --------------------------------------------------------------------------

    def stores(self) -> None:
        """All stores and patches, after all reads."""
        stored = dict(self.program.stores)
        patched = {target: (n, s) for target, n, s in self.program.patches}
        if not stored:  # then only selected elements are loaded
            (t,) = self.tensors
            hits = {self.selection(s, t) for _, s in patched.values()}
            self.only = f"hit{hits.pop()}" if hits else None
        written: list[tuple[str, Tensor, str, str]] = []
        for t in self.tensors:
            values = {target: self.value(n, t) for target, n in stored.items()}
            masks = dict.fromkeys(stored, f"in{t}")
            for target, (n, s) in patched.items():
                hit, value = f"hit{self.selection(s, t)}", self.value(n, t)
                if target in values:
                    values[target] = f"tl.where({hit}, {value}, {values[target]})"
                else:
                    values[target], masks[target] = value, hit
            written += [(target, t, value, masks[target]) for target, value in values.items()]
        if written and self.used.loads and not self.views.shared:
            # another thread may still have to read, in another view, what this one stores
            self.put("tl.debug_barrier()")
        for target, t, value, mask in written:
            self.store(target, t, value, mask)

    def entries(self, name: str, select: Node) -> None:
        """The number of selected elements per block, their positions, and their other fields."""
        (t,) = self.tensors
        p = self.selection(select, t)
        self.used.payload = True
        self.put(f"many = count((hit{p} & in{t}).to(tl.int32)).to(tl.int32).to(tl.uint32)")
        address, align = f"payload + {self.place(name)} + block * 2", self.align(name, COUNT_NBYTES)
        self.put(f"store16({address}, g, many, here, {align})")
        self.put("staged = words + tl.load(row + STAGED)")
        self.put(f"tl.store(staged + entry{p}, i{t}, mask=hit{p})")
        columns = 1
        for other, n in self.program.fields:
            if n.scope is not Scope.SELECTION or n.op == "select":
                continue
            value = self.value(n, t)
            if n.dtype in ir.CODES:
                column = f"staged + {columns} * tl.load(row + CAPACITY)"
                self.put(f"tl.store({column} + entry{p}, {value}, mask=hit{p})")
                columns += 1
            else:
                tail = self.tail("payload", other, f"entries{p}")
                self.put(f"{STORES[n.dtype]}({tail}, entry{p}, {value}, hit{p}, 0)")

    def clear(self) -> None:
        """Zero the memory of kept codes before any is stored."""
        for f in self.layout.fields:
            if f.flag is not None:
                n = next(n for name, n in self.program.fields if name == f.name)
                self.planes("tl.load(row + TAIL)", n, 0, zero=True)

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
        p = self.selection(n.args[0], t)
        tail = self.tail(self.base(n), n.attr.name, f"entries{p}")
        if n.dtype in ir.CODES:
            bits = triton_rows.code_bits(n.dtype)
            return f"code_at({tail}, entry{p}, entries{p}, hit{p}, {bits})"
        return f"{LOADS[n.dtype]}({tail}, entry{p}, hit{p}, 0)"

    def received_kept(self, n: Node, t: Tensor) -> str:
        """Kept codes; 0 in blocks whose flag is not set."""
        flag, before = self.value(n.args[0]), self.before(self.slot(n))
        address = f"{self.base(n)} + tl.load(row + TAIL)"
        return self.unpacked(n, t, address, 0, before, flag)

    def accumulate(self, fold: Node, total: str, t: Tensor) -> None:
        if len(fold.args) == 2:
            super().accumulate(fold, total, t)
            return
        _, entries, selection = fold.args
        p, value = self.selection(selection, t), self.value(entries, t)
        self.put(f"{total} = tl.where(hit{p}, {total} + {value}, {total})")

    # selections -----------------------------------------------------------------------------------

    def selection(self, n: Node, t: Tensor) -> str:
        """P, after emitting hitP (which elements are selected), entryP and entriesP."""
        key = (n, t, "selection")
        if key not in self.memo:
            p = f"{self.number[n]}_{t}{self.suffix}"
            self.memo[key] = p
            self.used.blocks = True
            if n.op == "select":
                self.chosen(p, t)
            else:
                self.received(n, p, t)
        return self.memo[key]

    def chosen(self, p: str, t: Tensor) -> None:
        assert [t] == self.natural, "entries are counted in the order of elements"
        self.put(f"hit{p}, entry{p} = chosen(row, words, block, g, o{t}, here, in{t}, BLOCK)")
        self.put(f"entries{p} = tl.load(words + tl.load(row + BEFORE) + blocks)")

    def received(self, n: Node, p: str, t: Tensor) -> None:
        assert isinstance(n.attr, ir.FieldRef)
        bits = ir.BITS[self.layout.position]
        self.put(f"first{p} = words + tl.load(row + BEFORE) + {self.slot(n)} * (blocks + 1)")
        self.put(f"entries{p} = tl.load(first{p} + blocks)")
        self.put(f"from{p} = tl.load(first{p} + block + g, mask=here, other=0)")
        self.put(f"to{p} = tl.load(first{p} + block + g + 1, mask=here, other=0)")
        tail = self.tail(self.base(n), n.attr.name, f"entries{p}")
        self.put(
            f"hit{p}, entry{p} = seek({tail}, from{p}, to{p}, entries{p}, i{t}, in{t}, {bits})"
        )
        # as many hits as entries: so the entries are in order and within their block
        self.put(f"found{p} = count((hit{p} & in{t}).to(tl.int32)).to(tl.int32)")
        self.put(f"fail(failed, row, here & (found{p} != to{p} - from{p}))")

    def slot(self, n: Node) -> str:
        """The index of the payload in the survey: the own one first, then the peers'."""
        assert isinstance(n.attr, ir.FieldRef)
        return "(1 + peer)" if n.attr.source else "0"

    def before(self, slot: str) -> str:
        """The number of earlier blocks whose codes are kept."""
        if ("before", slot) not in self.memo:
            self.used.blocks = True
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
