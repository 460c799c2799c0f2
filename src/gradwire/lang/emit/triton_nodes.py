"""Triton expressions: a rule `node_OP` per operation, the stores of a sweep, and the kernel's text.

Names in the generated code: bI is node I of block scope, tI of tensor or constant scope; xI_C are
its elements in view C (emit/triton.py). A trailing underscore marks values from the payload of a
peer.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.lang import ir, passes
from gradwire.lang.emit import ALU, cast, stream_name, triton_rows
from gradwire.lang.emit.triton_rows import (
    LOADS,
    STORES,
    Plane,
    bits_of,
    by_halves,
    literal,
    main_view,
    planes_of,
)
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import Layout, element_nbytes
from gradwire.lang.sweeps import Partial

TRITON = 1  # the target's place in a rule
# operation -> how many of its operands its rule reads in the kernel's usual place
OPERANDS = {"alu": 3, "lookup": 1, "cast": 1, "keep": 2, "gather": 1, "reduce": 1, "rotate": 1}


class Nodes:
    """The text of the kernel of one sweep, for elements, blocks and rows."""

    only: str | None = None  # condition that restricts loads of elements; None: all

    def __init__(self, program: ir.Function, layout: Layout, native: str) -> None:
        self.program, self.layout, self.native = program, layout, native
        self.number = {n: i for i, n in enumerate(ir.walk(program.roots))}
        self.reductions = passes.tensor_reductions(program)
        natural = any(n.op == "rotate" or n.dtype == "selection" for n in self.number)
        self.main = 1 if natural else main_view(layout)
        self.memo: ChainMap[tuple[Node, int], str] = ChainMap()
        self.lines: list[str] = []
        self.indent = 1
        self.used = triton_rows.Used()

    def put(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    # what a sweep stores --------------------------------------------------------------------------

    def partial(self, p: Partial) -> None:
        self.used.blocks = True
        value = self.value(p.node.args[0], self.main)
        if p.node.args[0].dtype == "bool":
            value += ".to(tl.float32)"
        at = f"partials + {p.index} * blocks + block + g"
        self.put(f"tl.store({at}, {value}, mask=here)")

    def field(self, name: str, n: Node) -> None:
        at = self.place(name)
        if n.scope is Scope.ELEMENT:
            if n.dtype in ir.CODES:
                stride = element_nbytes(n.dtype, self.layout.block)
                self.planes(at, n, self.align(name, stride))
            else:
                v = self.view(self.main)
                stride = ir.BITS[n.dtype] // 8 * self.layout.block
                value, align = self.value(n, self.main), self.align(name, stride)
                address = f"payload + {at} + block * {stride}"
                self.used.payload = True
                self.put(f"{STORES[n.dtype]}({address}, o{v}, {value}, in{v}, {align})")
            return
        store = STORES.get(n.dtype, "store8")
        self.used.payload = True
        size = self.layout.fields[self.index(name)].item_nbytes
        value = self.value(n, self.main)
        if n.scope is Scope.TENSOR:
            align = self.align(name, 0)
            self.put(f"{store}(payload + {at}, 0, {value}, block == 0, {align})")
        else:
            address, align = f"payload + {at} + block * {size}", self.align(name, size)
            self.put(f"{store}({address}, g, {value}, here, {align})")

    def planes(self, at: str, n: Node, align: str, kept: str = "", zero: bool = False) -> None:
        """Pack codes plane by plane, or write zeros in their place.

        kept: the place of a block among those whose `flag` is set, if only these are stored.
        """
        stride = element_nbytes(n.dtype, self.layout.block)
        self.used.payload = True
        address = f"payload + {at}" if kept else f"payload + {at} + block * {stride}"
        here = "here & flag" if kept else "here"
        for plane in planes_of(n.dtype):
            v = self.view(plane.cells)
            byte = f"j{v} * 0"
            if not zero:
                digit = f"tl.where(in{v}, {plane.digit(self.value(n, v))}, 0)"
                byte = f"tl.sum({plane.placed(digit, f'k{v}')}, 0)[None]"
            offset = f"{kept or 'g'} * {stride}{self.plane_offset(n.dtype, plane)}"
            self.put(f"store8({address}, {offset}, {byte}, {here} & (j{v} < L{v}), {align})")

    def plane_offset(self, dtype: str, plane: Plane, j: str = "") -> str:
        """The offset of byte j of a plane from the first byte of the block, as terms to add."""
        before = [p for p in planes_of(dtype) if p.shift < plane.shift]
        terms = [*(f"L{self.view(p.cells)}" for p in before), j or f"j{plane.cells}"]
        return "".join(f" + {term}" for term in terms)

    def store(self, target: str, value: str, mask: str) -> None:
        v = self.view(self.main)
        self.used.targets.add(target)
        narrow = target == "values" and self.native != "fp32"
        value = f"({value}).to(tl.uint16)" if narrow else value
        self.put(f"tl.store({target} + o{v}, {value}, mask={mask})")

    # nodes ----------------------------------------------------------------------------------------

    def value(self, n: Node, view: int) -> str:
        """The name of a node's value, or a literal; emits its computation on first use."""
        if n.op == "const":
            return literal(float(str(n.attr)))
        if n.attr == "factor":
            return "factor"
        key = of_view(n, view)
        if key not in self.memo:
            for each in ir.post_order([key], self.below):
                if each not in self.memo:
                    self.compute(*each)
        return self.memo[key]

    def below(self, key: tuple[Node, int]) -> list[tuple[Node, int]]:
        """The values that a rule begins with, and their views: `value` computes these first, so
        that rules need not call each other to any depth."""
        n, view = key
        args = n.args[: OPERANDS.get(n.op, 0)]
        if key in self.memo or (n.scope is Scope.TENSOR and n.op == "reduce"):
            return []
        if n.op == "reduce":
            view = 1 if n.attr == "sum" else self.main
        elif n.op == "rotate" and view != 1:
            args, view = (n,), 1
        elif n.op == "rotate":
            view = 1
        return [of_view(a, view) for a in args if a.op != "const" and a.attr != "factor"]

    def compute(self, n: Node, view: int) -> None:
        """Emit the computation of a value."""
        name = self.name(n, view)
        text = getattr(self, f"node_{n.op}")(n, view)
        if text is not None:
            self.put(f"{name} = {text}")
        self.memo[of_view(n, view)] = name

    def name(self, n: Node, view: int) -> str:
        tail = "_" if self.folding else ""
        if is_wide(n):
            return f"x{self.number[n]}_{self.view(view)}{tail}"
        return f"{'b' if n.scope is Scope.BLOCK else 't'}{self.number[n]}{tail}"

    def tensor(self, n: Node, view: int) -> str:
        """A value that is a tensor even if it is a constant."""
        return bits_of(float(str(n.attr))) if n.op == "const" else self.value(n, view)

    @property
    def folding(self) -> bool:
        return len(self.memo.maps) > 1

    @contextmanager
    def nested(self) -> Iterator[None]:
        """A branch or loop: values computed in it are not available after it."""
        self.memo, self.indent = self.memo.new_child(), self.indent + 1
        yield
        self.memo, self.indent = self.memo.parents, self.indent - 1

    def node_param(self, n: Node, view: int) -> str:
        return f"tl.load(numbers + {n.attr})"

    def node_load(self, n: Node, view: int) -> str:
        target, v = str(n.attr), self.view(view)
        self.used.targets.add(target)
        self.used.loads = True
        narrow = target == "values" and self.native != "fp32"
        memory = f"tl.load({target} + o{v}, mask={self.only or f'in{v}'}, other=0)"
        return f"{memory}.to(tl.uint32)" if narrow else memory

    def node_field(self, n: Node, view: int) -> str:
        assert isinstance(n.attr, ir.FieldRef)
        base, at = self.base(n), self.place(n.attr.name)
        f = self.layout.fields[self.index(n.attr.name)]
        load = LOADS.get(n.dtype, "load8")
        if n.scope is Scope.TENSOR:
            return f"{load}({base} + {at}, 0, True, {self.align(f.name, 0)})"
        if n.scope is Scope.BLOCK:
            size, align = f.item_nbytes, self.align(f.name, f.item_nbytes)
            return f"{load}({base} + {at} + block * {size}, g, here, {align})"
        if n.dtype in ir.CODES:
            stride = element_nbytes(n.dtype, self.layout.block)
            return self.unpacked(n, f"{base} + {at}", view, self.align(f.name, stride))
        stride, v = f.item_nbytes * self.layout.block, self.view(view)
        address = f"{base} + {at} + block * {stride}"
        return f"{load}({address}, o{v}, in{v}, {self.align(f.name, stride)})"

    def base(self, n: Node) -> str:
        """The payload that a received field belongs to."""
        assert isinstance(n.attr, ir.FieldRef)
        if n.attr.source:
            return "source"
        self.used.payload = True
        return "payload"

    def unpacked(
        self, n: Node, base: str, view: int, align: str, kept: str = "", flag: str = ""
    ) -> str:
        """Codes in any view; `base` is the address of the field; `kept` as for `planes`."""
        stride, v = element_nbytes(n.dtype, self.layout.block), self.view(view)
        address, digits = base if kept else f"{base} + block * {stride}", []
        for plane in planes_of(n.dtype):
            j, k, inside = self.cell(plane, v)
            if kept:
                inside = f"{inside} & ({flag} != 0)"
            offset = f"{kept or 'g'} * {stride}{self.plane_offset(n.dtype, plane, j)}"
            digits.append(plane.taken(f"load8({address}, {offset}, {inside}, {align})", k))
        return " | ".join(digits)

    def cell(self, plane: Plane, v: int) -> tuple[str, str, str]:
        """For the elements of a view: their byte in a plane, their cell in it, and their mask."""
        if plane.cells == v:
            return f"j{v}", f"k{v}", f"here & (j{v} < L{v})"
        p = self.view(plane.cells)
        return f"i{v} % L{p}", f"(i{v} // L{p})", f"in{v}"

    def node_alu(self, n: Node, view: int) -> str:
        plain = sum(a.op == "const" for a in n.args) == 1 and len(n.args) == 2
        operands = [
            self.value(a, view) if plain or n.attr == "where" else self.tensor(a, view)
            for a in n.args
        ]
        return ALU[str(n.attr)][TRITON].format(*operands)

    def node_lookup(self, n: Node, view: int) -> str:
        x, numbers = self.tensor(n.args[0], view), n.args[1:]
        if passes.is_table(numbers):
            return f"tl.load(numbers + {numbers[0].attr} + entry({x}, {len(numbers)}))"
        return by_halves(x, [self.value(a, view) for a in numbers])

    def node_cast(self, n: Node, view: int) -> str:
        return cast(n, TRITON, self.tensor(n.args[0], view), top=ir.TOP.get(n.dtype))

    def node_random(self, n: Node, view: int) -> str:
        assert isinstance(n.attr, ir.Stream)
        stream = self.stream(n.attr)
        within = f" + weyl(i{self.view(view)})" if n.scope is Scope.ELEMENT else ""
        return f"uniform({stream}_weyl{within}, {stream}_high)"

    def node_index(self, n: Node, view: int) -> str:
        if n.attr == "block":
            return f"i{self.view(view)}"
        return f"first + i{self.view(view)}"

    def node_reduce(self, n: Node, view: int) -> str:
        if n.scope is Scope.TENSOR:
            self.used.blocks = True
            index = self.reductions.index(n)
            return f"tl.load(partials + {self.layout.partials} * blocks + {index})"
        x = n.args[0]
        if n.attr == "sum":
            j = triton_rows.width(self.layout.block, self.view(1))
            return f"tree_sum({self.value(x, 1)}, in1, GROUP, {j}, {j.bit_length() - 1})"
        v = self.view(self.main)
        if n.attr == "count":
            return f"count({self.value(x, v)}, in{v})"
        low, high = self.extremes(x, v)
        return f"extreme({low if n.attr == 'min' else high}, {low}, {high})"

    def extremes(self, x: Node, view: int) -> tuple[str, str]:
        """The minimum and the maximum, which are computed together."""
        value, tail = self.tensor(x, view), "_" if self.folding else ""
        i = self.number[x]
        low, high = f"low{i}{tail}", f"high{i}{tail}"
        key = (x, -1)
        if key not in self.memo:
            self.memo[key] = low
            self.put(f"order{i}{tail} = ordered({value})")
            self.put(f"{low} = lowest(order{i}{tail}, in{view})")
            self.put(f"{high} = highest(order{i}{tail}, in{view})")
        return low, high

    def node_rotate(self, n: Node, view: int) -> str:
        assert isinstance(n.attr, ir.Rotation)
        block, j = self.layout.block, triton_rows.width(self.layout.block, 1)
        if view != 1:
            v, natural = self.view(view), self.value(n, 1)
            k, width = triton_rows.power2(view), triton_rows.width(block, view)
            return f"in_view({natural}, i{v}, in{v}, FULL, {block}, GROUP, {k}, {width}, {j})"
        stream = self.stream(n.attr.stream)
        signs = f"sign(uniform({stream}_weyl + weyl(i{self.view(1)}), {stream}_high))"
        x = self.value(n.args[0], 1)
        before = (
            f"tl.where(in1, {x}, 0.0)" if n.attr.inverse else f"tl.where(in1, {x} * {signs}, 0.0)"
        )
        rotated = f"hadamard({before}, m, GROUP, {j}, {j.bit_length() - 1})"
        return f"{rotated} * {signs}" if n.attr.inverse else rotated

    def node_fold(self, n: Node, view: int) -> None:
        """The sum starts at -0, since -0 + x is x for every x."""
        own = n.args[0]
        total, v = self.name(n, view), self.view(view)
        self.used.sources = True
        self.put(f"{total} = tl.where(in{v}, number(0x80000000), 0.0)")
        self.put("for k in range(ranks):")
        with self.nested():
            self.put("if k == rank:")
            with self.nested():
                self.put(f"{total} = {total} + {self.value(own, view)}")
            self.put("else:")
            with self.nested():
                self.put("behind = (rank >= 0) & (rank < k)")
                self.put("peer = k - behind.to(tl.int64)")
                self.put("source = sources + peer * stride")
                self.redraw()
                self.accumulate(n, total, view)

    def redraw(self) -> None:
        """The streams of the encoder of a peer's payload."""
        for s in (n.attr for n in self.number if isinstance(n.attr, ir.Stream)):
            if s.source:
                name = stream_name(s)
                key = "origin_key(tl.load(row + SHARED), tl.load(origins + peer))"
                self.put(f"{name}_low, {name}_high = stream({key}, {s.number})")
                self.put(f"{name}_weyl = weyl(first + {name}_low)")

    def accumulate(self, fold: Node, total: str, view: int) -> None:
        """Add the decoded payload of a peer."""
        self.put(f"{total} = {total} + {self.value(fold.args[1], view)}")

    # what the kernel's first lines define ---------------------------------------------------------

    def view(self, cells: int) -> int:
        self.used.views.add(cells)
        return cells

    def stream(self, stream: ir.Stream) -> str:
        if not stream.source:  # those are made where peers' payloads are summed
            self.used.streams.add(stream)
        return stream_name(stream)

    def place(self, name: str) -> str:
        """The offset of a field in a payload."""
        at = self.index(name)
        self.used.fields = max(self.used.fields, at + 1)
        return f"at{at}"

    def align(self, name: str, stride: int) -> str:
        """The known alignment of a tile's part of a field, with `stride` bytes per block."""
        return f"FULL * {triton_rows.alignment(self.layout, stride, self.index(name))}"

    def index(self, name: str) -> int:
        return [f.name for f in self.layout.fields].index(name)


def of_view(n: Node, view: int) -> tuple[Node, int]:
    """The key of a value: numbers of blocks and rows have no view."""
    return n, view if is_wide(n) else 0


def is_wide(n: Node) -> bool:
    """Whether it is computed for every element: nodes of element and selection scope."""
    return n.scope in (Scope.SELECTION, Scope.ELEMENT)
