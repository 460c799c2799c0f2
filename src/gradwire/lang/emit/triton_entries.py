"""Triton over entries: own and received selections, samples, kept codes.

The own selection: a first sweep has stored the candidates of every block, in order (see
triton_selection.py). The last sweep takes a piece of every block's candidates at a time, and
evaluates what is sent of an element in a *view of candidates* [1, GROUP, PIECE], number 0, whose
elements lie at the candidates' positions. So its costs are those of few elements, whatever a codec
sends of them.

A payload that is decoded alone is handled in the same view, at the positions of its entries. In a
sum of payloads, an element bisects the sorted entries of its block, so nothing is scattered, and
sums run in rank order.

Names: hitP, entryP, entriesP of a selection, where P is the node's number and the view.
"""

from __future__ import annotations

from gradwire.lang import ir
from gradwire.lang.emit import triton_rows
from gradwire.lang.emit.triton_nodes import Nodes
from gradwire.lang.emit.triton_rows import LOADS, STORES
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import Layout
from gradwire.lang.sweeps import Partial, Sink

CANDIDATES = 0  # the view
PIECES = 16  # of a block's candidates, at most


def piece(layout: Layout) -> int:
    """Candidates of a block that are taken at once, a power of two: mostly all there are."""
    share = max((f.capacity.fraction for f in layout.fields if f.capacity is not None), default=0)
    block = triton_rows.power2(layout.block)
    wanted = triton_rows.power2(max(16, int(2 * share * layout.block)))
    return min(block, max(block // PIECES, wanted))


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
        for sink in sinks:
            if sink.kind == "key":
                self.entries(sink.name)
        if any(s.kind in ("store", "patch") for s in sinks):
            self.stores()
        return self.text(name)

    def emit_keys(self, name: str) -> str:
        """The kernel that finds the candidates of rows where they are still to be found."""
        self.put("if is_open(row, words):")
        with self.nested():
            key = self.key()
            j = triton_rows.width(self.layout.block, 1)
            self.put(f"sift(row, words, block, here, in1, {key}, BLOCK, GROUP, {j})")
            for n in self.number:  # every element looks for itself in the payloads here, and only
                if n.op == "fold":  # here: so this is where they are checked
                    self.value(n, self.main)
        return self.text(name)

    def emit_picks(self, name: str) -> str:
        """The kernel that stores a few keys, from which the floor of candidates is chosen."""
        self.put("if has_picks(row, block, held, BLOCK):")
        with self.nested():
            key, v = self.key(), self.view(self.main)
            self.put(f"place, picked = picks(row, block + g, i{v}, BLOCK)")
            at = "words + tl.load(row + KEYS) + place"
            self.put(f"tl.store({at}, as_int({key}), mask=in{v} & picked)")
        return self.text(name)

    def key(self) -> str:
        """The keys of a tile's elements; 0 for no key."""
        assert self.main == 1, "candidates are found in the order of elements"
        (select,) = (n for _, n in self.program.fields if n.op == "select")
        v = self.view(self.main)
        conditions = [self.value(a, v) for a in select.args if a.dtype == "bool"]
        ranked = [f"key_of({self.tensor(a, v)})" for a in select.args if a.dtype != "bool"]
        key = ranked[0] if ranked else "1"
        if conditions:
            key = f"tl.where({conditions[0]}, {key}, 0)"
        return f"({key}).to(tl.uint32)"

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
        self.put("begin_statistic(row, words, block)")
        return self.text(name)

    def text(self, name: str) -> str:
        return triton_rows.kernel(name, self.layout, self.native, self.used, self.lines)

    # what a sweep stores --------------------------------------------------------------------------

    def stores(self) -> None:
        """All stores, after all reads; then patches."""
        values = {target: self.value(n, self.main) for target, n in self.program.stores}
        if values and (self.used.loads or self.patches()):
            # another thread may still have to read, in another view, what this one stores
            self.put("tl.debug_barrier()")
        for target, value in values.items():
            self.store(target, value, f"in{self.view(self.main)}")
        received = {s for _, _, s in self.program.patches if s.op != "select"}
        for selection in received:
            self.scatter(selection)
        if self.patches():
            self.patch_entries()

    def scatter(self, selection: Node) -> None:
        """Patch the elements that a payload has entries of: a piece of every block's at a time.

        Every block belongs to one program, and no element has two entries in a valid payload.
        """
        p, size = f"{self.number[selection]}_{CANDIDATES}", piece(self.layout)
        tail = self.span(selection, p)
        self.used.blocks = True
        if self.program.stores:  # of elements that other threads have stored
            self.put("tl.debug_barrier()")
        self.put(f"most{p} = tl.max(tl.reshape(to{p} - from{p}, GROUP), 0)")
        self.put(f"for piece in range(0, tl.minimum(most{p}, BLOCK), {size}):")
        with self.nested():
            self.put(f"i0, in0, entry{p} = listed(")
            self.put(f"    failed, row, {tail}, from{p}, to{p}, entries{p}, piece, m,")
            self.put(f"    GROUP, {size}, {ir.BITS[self.layout.position]}")
            self.put(")")
            self.put(f"hit{p} = in0")
            self.put("o0 = g * BLOCK + i0")
            self.memo[selection, CANDIDATES] = p
            for target, n, _ in self.program.patches:
                self.patch(target, n)

    def patch(self, target: str, n: Node) -> None:
        """Store an element at the positions of the view of candidates."""
        narrow = ".to(tl.uint16)" if self.is_narrow(target) else ""
        value = f"({self.value(n, CANDIDATES)}){narrow}"
        self.used.targets.add(target)
        self.put(f"tl.store({target} + o0, {value}, mask=in0)")

    def prepare(self) -> None:
        """What candidates take from their tile: numbers of its blocks, and rotated elements."""
        roots = [n for _, n in (*self.sent(), *self.patches())]
        first = ("gather", "fold")  # what follows is the selection, or of a peer's payload
        for n in ir.walk(roots, lambda n: n.args[:1] if n.op in first else n.args):
            if n.op == "rotate":
                self.value(n, 1)
            elif n.scope is Scope.BLOCK:
                self.value(n, self.main)

    def entries(self, name: str) -> None:
        """The number of selected elements per block; their positions, other fields and patches.

        Patches are staged, since stores overwrite what all candidates read.
        """
        size = piece(self.layout)
        self.prepare()
        self.used.payload = self.used.blocks = True
        self.put("start, many, ties, before, own = segments(row, words, block, g, here, blocks)")
        self.put("begin0 = before")
        at = f"payload + {self.place(name)} + block * 2"
        self.put(f"store16({at}, g, own.to(tl.uint32), here, False)")
        self.put("staged = words + tl.load(row + STAGED)")
        self.put("entries0 = tl.load(words + tl.load(row + BEFORE) + blocks)")
        self.put(f"for piece in range(0, tl.max(tl.reshape(many, GROUP), 0), {size}):")
        with self.nested():
            self.put("i0, in0, entry0, ties, before = chosen(")
            self.put(f"    row, words, start, many, piece, ties, before, GROUP, {size}")
            self.put(")")
            self.put("o0 = g * BLOCK + i0")
            self.put("tl.store(staged + entry0, i0, mask=in0)")
            self.send()
            for column, (target, n) in enumerate(self.patches(), self.columns):
                kept = "tl.int32" if self.is_narrow(target) else "tl.int32, bitcast=True"
                value = f"({self.value(n, CANDIDATES)}).to({kept})"
                self.put(f"tl.store({self.column(column)} + entry0, {value}, mask=in0)")

    def patch_entries(self) -> None:
        """Store what has been staged for the selected elements."""
        size = piece(self.layout)
        self.put("tl.debug_barrier()")  # of elements that other threads have stored
        self.put(f"for piece in range(0, tl.max(tl.reshape(own, GROUP), 0), {size}):")
        with self.nested():
            self.put(f"e0 = piece + tl.arange(0, {size})[None, None, :]")
            self.put("in0 = e0 < own")
            self.put("e0 = begin0 + e0")
            self.put("o0 = g * BLOCK + tl.load(staged + e0, mask=in0, other=0)")
            for column, (target, _) in enumerate(self.patches(), self.columns):
                kept = "tl.uint16" if self.is_narrow(target) else "tl.float32, bitcast=True"
                bits = f"tl.load({self.column(column)} + e0, mask=in0, other=0)"
                self.used.targets.add(target)
                self.put(f"tl.store({target} + o0, {bits}.to({kept}), mask=in0)")

    def is_narrow(self, target: str) -> bool:
        """Whether its elements are computed as 32 bits, of which 16 are stored."""
        return target == "values" and self.native != "fp32"

    def column(self, number: int) -> str:
        """Of what is staged per entry: its position, its codes, its patches."""
        return f"staged + {number} * tl.load(row + CAPACITY)"

    @property
    def columns(self) -> int:
        """The number of the first column of patches."""
        return 1 + sum(n.dtype in ir.CODES for _, n in self.sent())

    def send(self) -> None:
        """Store the other fields of entries."""
        columns = 1
        for name, n in self.sent():
            value = self.value(n, CANDIDATES)
            if n.dtype in ir.CODES:
                self.put(f"tl.store({self.column(columns)} + entry0, {value}, mask=in0)")
                columns += 1
            else:
                tail = self.tail("payload", name, "entries0")
                self.put(f"{STORES[n.dtype]}({tail}, entry0, {value}, in0, False)")

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
                self.planes("tl.load(row + TAIL)", n, zero=True)

    def kept(self, n: Node) -> None:
        """Pack the codes of blocks whose flag is set, behind those of earlier blocks."""
        codes, flag = n.args
        before = self.before("0")
        self.put(f"flag = {self.value(flag, self.main)} != 0")
        self.planes("tl.load(row + TAIL)", codes, kept=before)

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
        return f"{LOADS[n.dtype]}({tail}, entry{p}, hit{p}, False)"

    def received_kept(self, n: Node, view: int) -> str:
        """Kept codes; 0 in blocks whose flag is not set."""
        flag, before = self.value(n.args[0], view), self.before(self.slot(n))
        return self.unpacked(n, f"{self.base(n)} + tl.load(row + TAIL)", view, before, flag)

    def accumulate(self, fold: Node, total: str, view: int) -> None:
        if len(fold.args) == 2:
            super().accumulate(fold, total, view)
            return
        _, entries, selection = fold.args
        p, value = self.selection(selection, view), self.value(entries, view)
        self.put(f"{total} = tl.where(hit{p}, {total} + {value}, {total})")

    # views ----------------------------------------------------------------------------------------

    def view(self, cells: int) -> int:
        return cells if cells == CANDIDATES else super().view(cells)

    def taken(self, n: Node) -> str:
        """Of the elements of a tile, those at the positions of candidates."""
        j = triton_rows.width(self.layout.block, 1)
        return f"take({self.value(n, 1)}, i0, GROUP, {j}, {piece(self.layout)})"

    def node_rotate(self, n: Node, view: int) -> str:
        return self.taken(n) if view == CANDIDATES else super().node_rotate(n, view)

    # selections -----------------------------------------------------------------------------------

    def selection(self, n: Node, view: int) -> str:
        """P, after emitting hitP (which elements are selected), entryP and entriesP."""
        key = (n, view)
        if key not in self.memo:
            p = f"{self.number[n]}_{self.view(view)}{'_' if self.folding else ''}"
            self.memo[key] = p
            self.used.blocks = True
            self.received(n, p, view)
        return self.memo[key]

    def span(self, n: Node, p: str) -> str:
        """The address of a received selection, after emitting fromP and toP of blocks, entriesP."""
        assert isinstance(n.attr, ir.FieldRef)
        self.put(f"first{p} = words + tl.load(row + BEFORE) + {self.slot(n)} * (blocks + 1)")
        self.put(f"entries{p} = tl.load(first{p} + blocks)")
        self.put(f"from{p} = tl.load(first{p} + block + g, mask=here, other=0)")
        self.put(f"to{p} = tl.load(first{p} + block + g + 1, mask=here, other=0)")
        return self.tail(self.base(n), n.attr.name, f"entries{p}")

    def received(self, n: Node, p: str, view: int) -> None:
        bits, v, tail = ir.BITS[self.layout.position], self.view(view), self.span(n, p)
        self.put(
            f"hit{p}, entry{p} = seek({tail}, from{p}, to{p}, entries{p}, i{v}, in{v}, {bits})"
        )
        if view == CANDIDATES:  # not of all elements
            return
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
