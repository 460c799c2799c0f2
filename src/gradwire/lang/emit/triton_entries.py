"""Triton over entries: own and received selections, samples, kept codes.

An entry is computed in the tile of its element, so gathering reads the element's own value. Every
element of a tile finds out whether it is selected and its entry number. For the own selection,
earlier passes have computed the threshold and the number of entries before every block
(triton_selection.py). In a received payload, the entries are sorted, so an element bisects the
entries of its block. Nothing is scattered, and sums run in rank order.

Names: hitP, entryP, entriesP of a selection, where P is the node's number and the view.
"""

from __future__ import annotations

from gradwire.lang import ir
from gradwire.lang.emit import triton_rows
from gradwire.lang.emit.triton_nodes import Nodes
from gradwire.lang.emit.triton_rows import LOADS, STORES
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import COUNT_NBYTES
from gradwire.lang.sweeps import Partial, Sink


class Kernel(Nodes):
    """Emits the kernel of one sweep."""

    def emit(self, name: str, sinks: list[Sink], partials: list[Partial]) -> str:
        """The kernel that computes partial results, or fields, stores and patches."""
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
        if any(s.kind in ("store", "patch", "key") for s in sinks):
            self.stores()
        return self.text(name)

    def emit_keys(self, name: str) -> str:
        """The kernel that stores the keys of elements in the workspace; 0 for no key."""
        (select,) = (n for _, n in self.program.fields if n.op == "select")
        v = self.view(self.main)
        conditions = [self.value(a, v) for a in select.args if a.dtype == "bool"]
        ranked = [f"key_of({self.tensor(a, v)})" for a in select.args if a.dtype != "bool"]
        key = ranked[0] if ranked else "1"
        if conditions:
            key = f"tl.where({conditions[0]}, {key}, 0)"
        self.put(f"keys = words + tl.load(row + KEYS) + block * {self.layout.block}")
        self.put(f"tl.store(keys + o{v}, as_int(({key}).to(tl.uint32)), mask=in{v})")
        self.put(f"begin_selection(row, words, block, {'True' if ranked else 'False'})")
        return self.text(name)

    def emit_sample(self, name: str, statistic: Node) -> str:
        """The kernel that stores the keys of a sample's elements in the workspace."""
        rank, v = statistic.attr, self.view(self.main)
        assert isinstance(rank, ir.Rank)
        value, stream = self.tensor(statistic.args[0], v), self.stream(rank.stream)
        self.put(
            f"window, taken = sampled(row, block * {self.layout.block} + o{v}, {stream}_low, "
            f"{stream}_high, {rank.every})"
        )
        key = f"as_int(key_of({value}))"
        self.put(f"tl.store(words + tl.load(row + KEYS) + window, {key}, mask=in{v} & taken)")
        self.put("begin_selection(row, words, block, True)")
        return self.text(name)

    def text(self, name: str) -> str:
        return triton_rows.kernel(name, self.layout, self.native, self.used, self.lines)

    # what a sweep stores --------------------------------------------------------------------------

    def stores(self) -> None:
        """All stores and patches, after all reads."""
        stored = dict(self.program.stores)
        patched = {target: (n, s) for target, n, s in self.program.patches}
        if not stored:  # then only selected elements are loaded
            hits = {self.selection(s, self.main) for _, s in patched.values()}
            self.only = f"hit{hits.pop()}" if hits else None
        values = {target: self.value(n, self.main) for target, n in stored.items()}
        masks = dict.fromkeys(stored, f"in{self.view(self.main)}")
        for target, (n, s) in patched.items():
            hit, value = f"hit{self.selection(s, self.main)}", self.value(n, self.main)
            if target in values:
                values[target] = f"tl.where({hit}, {value}, {values[target]})"
            else:
                values[target], masks[target] = value, hit
        if values and self.used.loads:
            # another thread may still have to read, in another view, what this one stores
            self.put("tl.debug_barrier()")
        for target, value in values.items():
            self.store(target, value, masks[target])

    def entries(self, name: str, select: Node) -> None:
        """The number of selected elements per block, their positions, and their other fields."""
        v = self.main
        p = self.selection(select, v)
        self.used.payload = True
        self.put(f"many = count(hit{p}, in{v}).to(tl.int32).to(tl.uint32)")
        address, align = f"payload + {self.place(name)} + block * 2", self.align(name, COUNT_NBYTES)
        self.put(f"store16({address}, g, many, here, {align})")
        self.put("staged = words + tl.load(row + STAGED)")
        self.put(f"tl.store(staged + entry{p}, i{v}, mask=hit{p})")
        columns = 1
        for other, n in self.program.fields:
            if n.scope is not Scope.SELECTION or n.op == "select":
                continue
            value = self.value(n, v)
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
                self.planes("tl.load(row + TAIL)", n, "0", zero=True)

    def kept(self, n: Node) -> None:
        """Pack the codes of blocks whose flag is set, behind those of earlier blocks."""
        codes, flag = n.args
        before = self.before("0")
        self.put(f"flag = {self.value(flag, self.main)} != 0")
        self.planes("tl.load(row + TAIL)", codes, "0", kept=before)

    # nodes ----------------------------------------------------------------------------------------

    def node_keep(self, n: Node, view: int) -> str:
        codes, flag = (self.value(a, view) for a in n.args)
        return f"tl.where({flag} != 0, {codes}, 0)"

    def node_gather(self, n: Node, view: int) -> str:
        return self.tensor(n.args[0], view)

    def node_field(self, n: Node, view: int) -> str:
        if n.scope is Scope.SELECTION:
            return self.entry(n, view)
        if n.args:
            return self.received_kept(n, view)
        return super().node_field(n, view)

    def entry(self, n: Node, view: int) -> str:
        """A received field of an entry."""
        assert isinstance(n.attr, ir.FieldRef)
        p = self.selection(n.args[0], view)
        tail = self.tail(self.base(n), n.attr.name, f"entries{p}")
        if n.dtype in ir.CODES:
            bits = triton_rows.code_bits(n.dtype)
            return f"code_at({tail}, entry{p}, entries{p}, hit{p}, {bits})"
        return f"{LOADS[n.dtype]}({tail}, entry{p}, hit{p}, 0)"

    def received_kept(self, n: Node, view: int) -> str:
        """Kept codes; 0 in blocks whose flag is not set."""
        flag, before = self.value(n.args[0], view), self.before(self.slot(n))
        address = f"{self.base(n)} + tl.load(row + TAIL)"
        return self.unpacked(n, address, view, "0", before, flag)

    def accumulate(self, fold: Node, total: str, view: int) -> None:
        if len(fold.args) == 2:
            super().accumulate(fold, total, view)
            return
        _, entries, selection = fold.args
        p, value = self.selection(selection, view), self.value(entries, view)
        self.put(f"{total} = tl.where(hit{p}, {total} + {value}, {total})")

    # selections -----------------------------------------------------------------------------------

    def selection(self, n: Node, view: int) -> str:
        """P, after emitting hitP (which elements are selected), entryP and entriesP."""
        key = (n, view)
        if key not in self.memo:
            p = f"{self.number[n]}_{self.view(view)}{'_' if self.folding else ''}"
            self.memo[key] = p
            self.used.blocks = True
            if n.op == "select":
                self.chosen(p, view)
            else:
                self.received(n, p, view)
        return self.memo[key]

    def chosen(self, p: str, view: int) -> None:
        width = triton_rows.width(self.layout.block, 1)
        assert view == 1, "entries are counted in the order of elements"
        self.put(
            f"hit{p}, entry{p} = chosen(row, words, block, g, o1, here, in1, BLOCK, GROUP, {width})"
        )
        self.put(f"entries{p} = tl.load(words + tl.load(row + BEFORE) + blocks)")

    def received(self, n: Node, p: str, view: int) -> None:
        assert isinstance(n.attr, ir.FieldRef)
        bits, v = ir.BITS[self.layout.position], self.view(view)
        self.put(f"first{p} = words + tl.load(row + BEFORE) + {self.slot(n)} * (blocks + 1)")
        self.put(f"entries{p} = tl.load(first{p} + blocks)")
        self.put(f"from{p} = tl.load(first{p} + block + g, mask=here, other=0)")
        self.put(f"to{p} = tl.load(first{p} + block + g + 1, mask=here, other=0)")
        tail = self.tail(self.base(n), n.attr.name, f"entries{p}")
        self.put(
            f"hit{p}, entry{p} = seek({tail}, from{p}, to{p}, entries{p}, i{v}, in{v}, {bits})"
        )
        # as many hits as entries: so the entries are in order and within their block
        self.put(f"found{p} = count(hit{p}, in{v}).to(tl.int32)")
        self.put(f"fail(failed, row, here & (found{p} != to{p} - from{p}))")

    def slot(self, n: Node) -> str:
        """The index of the payload in the survey: the own one first, then the peers'."""
        assert isinstance(n.attr, ir.FieldRef)
        return "(1 + peer)" if n.attr.source else "0"

    def before(self, slot: str) -> str:
        """The number of earlier blocks whose codes are kept."""
        self.used.blocks = True
        at = f"words + tl.load(row + BEFORE) + {slot} * (blocks + 1) + block + g"
        return f"tl.load({at}, mask=here, other=0)"

    def tail(self, base: str, name: str, entries: str) -> str:
        """The address of the part of a field whose length depends on the number of entries."""
        sizes = [
            f" + {size}"
            for f, size in triton_rows.tails(self.layout, entries)
            if self.index(f.name) < self.index(name)
        ]
        return f"{base} + tl.load(row + TAIL){''.join(sizes)}"
