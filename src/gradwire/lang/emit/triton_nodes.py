"""Triton expressions: a rule `node_OP` per operation, and the stores of a sweep.

A rule writes a statement for one tensor (triton_views.py); statements repeat for all tensors of a
view. Names in the generated code: bI is node I of block scope, tI of tensor or constant scope; xI_T
are its elements in tensor T. A trailing underscore marks values from the payload of a peer.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
from gradwire.lang.emit.triton_views import Tensor, Views
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import COUNT_NBYTES, Layout, element_nbytes
from gradwire.lang.sweeps import Partial

TRITON = 1  # the target's place in a rule
# operation -> how many of its operands its rule reads in the kernel's usual place
OPERANDS = {"alu": 3, "lookup": 1, "cast": 1, "keep": 2, "gather": 1, "reduce": 1, "rotate": 1}
STEP = 2.0**-24  # random numbers are multiples of it

Key = tuple[Node, Tensor | None]


class Nodes:
    """The text of a kernel of one sweep, for elements, blocks and rows.

    full: whether it is the kernel of full tiles.
    """

    stored: Mapping[str, Node] = {}  # what this sweep stores in values and residuals

    def __init__(self, program: ir.Function, layout: Layout, native: str, full: bool) -> None:
        self.program, self.layout, self.native, self.full = program, layout, native, full
        self.number = {n: i for i, n in enumerate(ir.walk(program.roots))}
        self.reductions = passes.tensor_reductions(program)
        self.spread = spread(program)
        self.fixed = triton_rows.fixed(program)
        selects = any(n.dtype == "selection" for n in self.number)
        rotates = any(n.op == "rotate" for n in self.number)
        self.main = 1 if selects or rotates else main_view(layout)
        self.views = Views(layout, full, whole=selects and rotates)
        self.loads = [n for n in self.number if n.op == "load" and not selects]
        self.settled: set[tuple[str, Tensor]] = set()  # what has been stored
        self.memo: ChainMap[Any, str] = ChainMap()
        self.lines: list[str] = []
        self.indent = 1
        self.used = triton_rows.Used()

    def put(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    # what a sweep stores --------------------------------------------------------------------------

    def partial(self, p: Partial) -> None:
        value = self.value(p.node.args[0])
        if p.node.attr in ("min", "max"):
            self.put(f'join_extreme(row, {value}, here, {p.index}, "{p.node.attr}")')
            return
        at = f"workspace + tl.load(row + PARTIALS) + {p.index} * blocks + block + g"
        self.put(f"tl.store({at}, {value}, mask=here)")

    def field(self, name: str, n: Node) -> None:
        at, align = self.part(name)
        address = f"payload + {at}"
        if n.scope is Scope.ELEMENT and n.dtype in ir.CODES:
            self.planes(at, n, align)
        elif n.scope is Scope.ELEMENT:
            values = {}
            for t in self.tensors:
                values[t] = self.value(n, t)
                self.settle([t])
            for t, value in values.items():
                self.put(f"{STORES[n.dtype]}({address}, o{t}, {value}, in{t}, {align})")
        else:
            place = "0, {}, block == 0" if n.scope is Scope.TENSOR else "g, {}, here"
            store = STORES.get(n.dtype, "store8")
            self.put(f"{store}({address}, {place.format(self.value(n))}, {align})")

    def planes(self, at: str, n: Node, align: int, kept: str = "", zero: bool = False) -> None:
        """Pack codes plane by plane, or write zeros in their place.

        kept: the place of a block among those whose `flag` is set, if only these are stored.
        """
        stores = []  # after all loads, since a compiler does not know what they overwrite
        for plane in planes_of(n.dtype):
            view = self.views.view(plane.cells)
            within = view.within("here & flag" if kept else "here")
            for number, piece in enumerate(view.pieces):
                digits = [] if zero else [plane.digit(self.value(n, t)) for t in piece]
                if not zero:
                    self.settle(piece)
                inside = zip(piece, digits, strict=not zero)
                packed = plane.packed([f"tl.where(in{t}, {d}, 0)" for t, d in inside]) or "0 * g"
                offset = self.byte_offset(n.dtype, plane, view.byte(number), kept)
                stores.append(f"store8(payload + {at}, {offset}, {packed}, {within}, {align})")
                if self.all_read():
                    self.put(stores.pop())
        for store in stores:
            self.put(store)

    def settle(self, tensors: Iterable[Tensor]) -> None:
        """Compute what will be stored at these elements while their operands are in registers."""
        for t in tensors:
            for target, n in self.stored.items() if t in self.tensors else ():
                value = self.value(n, t)
                if self.all_read() and (target, t) not in self.settled:
                    self.settled.add((target, t))
                    self.store(target, t, value)

    def all_read(self) -> bool:
        """Whether all elements are in registers, as after a reduction, and no other thread reads
        them: then what takes their place can be stored at once, lest it take more registers."""
        every = [(n, t) in self.memo for n in self.loads for t in self.tensors]
        return bool(self.stored and self.views.shared and every) and all(every)

    def byte_offset(self, dtype: str, plane: Plane, j: str, kept: str) -> str:
        """The offset of byte j of a plane from the first block of a tile, or of kept codes."""
        before = [p for p in planes_of(dtype) if p.shift < plane.shift]
        terms = [f"{kept or 'g'} * {element_nbytes(dtype, self.layout.block)}"]
        terms += [self.views.view(p.cells).length for p in before]
        return " + ".join([*terms, j])

    def store(self, target: str, t: Tensor, value: str) -> None:
        self.used.targets.add(target)
        value = f"({value}).to(tl.uint16)" if self.is_narrow(target) else value
        self.put(f"tl.store({target} + o{t}, {value}, mask=in{t})")

    def is_narrow(self, target: str) -> bool:
        """Whether its elements are computed as 32 bits, of which 16 are stored."""
        return target == "values" and self.native != "fp32"

    # nodes ----------------------------------------------------------------------------------------

    def value(self, n: Node, t: Tensor | None = None) -> str:
        """The name of a node's value in a tensor, or a literal; emits its computation on first use.

        Numbers of blocks and rows are in no tensor.
        """
        if n.op == "const":
            return literal(float(str(n.attr)))
        if n.attr == "factor":
            return "factor"
        key = of_tensor(n, t)
        if key not in self.memo:
            for each in ir.post_order([key], self.below):
                if each not in self.memo:
                    self.compute(*each)
        return self.memo[key]

    def below(self, key: Key) -> list[Key]:
        """The values that a rule begins with: `value` computes these first, so that rules need not
        call each other to any depth."""
        n, t = key
        args = n.args[: OPERANDS.get(n.op, 0)]
        tensors: Iterable[Tensor | None] = (t,)
        if key in self.memo or n in self.fixed or (n.scope is Scope.TENSOR and n.op == "reduce"):
            return []
        if n.op == "reduce":
            tensors = self.natural if n.attr == "sum" else self.tensors
        elif n.op == "rotate":
            args = args if t in self.natural else (n,)
            tensors = self.natural
        return [
            of_tensor(a, t)
            for t in tensors
            for a in args
            if a.op not in ("const", "random") and a.attr != "factor"
        ]

    def compute(self, n: Node, t: Tensor | None) -> None:
        """Emit the computation of a value."""
        name = self.name(n, t)
        text = getattr(self, f"node_{'param' if n in self.fixed else n.op}")(n, t)
        if text is not None:
            self.put(f"{name} = {text}")
        self.memo[of_tensor(n, t)] = name

    def name(self, n: Node, t: Tensor | None) -> str:
        if is_wide(n):
            return f"x{self.number[n]}_{t}{self.suffix}"
        return f"{'b' if n.scope is Scope.BLOCK else 't'}{self.number[n]}{self.suffix}"

    def operand(self, n: Node, t: Tensor | None) -> str:
        """A value that is a tensor even if it is a constant."""
        return bits_of(float(str(n.attr))) if n.op == "const" else self.value(n, t)

    @property
    def folding(self) -> bool:
        return len(self.memo.maps) > 1

    @property
    def suffix(self) -> str:
        return "_" if self.folding else ""

    @contextmanager
    def nested(self) -> Iterator[None]:
        """A branch or loop: values computed in it are not available after it."""
        self.memo, self.indent = self.memo.new_child(), self.indent + 1
        yield
        self.memo, self.indent = self.memo.parents, self.indent - 1

    def node_param(self, n: Node, t: Tensor | None) -> str:
        return f"tl.load(numbers + {self.fixed.get(n, n.attr)})"

    def node_load(self, n: Node, t: Tensor) -> str:
        target = str(n.attr)
        self.used.targets.add(target)
        self.used.loads = True
        memory = f"tl.load({target} + o{t}, mask=in{t}, other=0)"
        return f"{memory}.to(tl.uint32)" if self.is_narrow(target) else memory

    def node_field(self, n: Node, t: Tensor) -> str:
        assert isinstance(n.attr, ir.FieldRef)
        at, align = self.part(n.attr.name)
        address = f"{self.base(n)} + {at}"
        if n.scope is Scope.ELEMENT and n.dtype in ir.CODES:
            return self.unpacked(n, t, address, align)
        places = {Scope.TENSOR: "0, True", Scope.BLOCK: "g, here"}
        place = places.get(n.scope, f"o{t}, in{t}")
        return f"{LOADS.get(n.dtype, 'load8')}({address}, {place}, {align})"

    def base(self, n: Node) -> str:
        """The payload that a received field belongs to."""
        assert isinstance(n.attr, ir.FieldRef)
        return "source" if n.attr.source else "payload"

    def unpacked(
        self, n: Node, t: Tensor, address: str, align: int, kept: str = "", flag: str = ""
    ) -> str:
        """Codes in a tensor; `kept` as for `planes`, `flag` that of a block."""
        digits, here = [], f"here & ({flag} != 0)" if flag else "here"
        for plane in planes_of(n.dtype):
            view = self.views.view(plane.cells)
            place = view.place(t)
            if place is None:  # a tensor of another view: its codes are in scattered bytes
                j, k = f"i{t} % {view.length}", f"(i{t} // {view.length})"
                offset = self.byte_offset(n.dtype, plane, j, kept)
                byte = f"load8({address}, {offset}, {here} & in{t}, 0)"
                digits.append(plane.taken(byte, k))
                continue
            number, cell = place
            key, byte = (n, plane, number), f"y{self.number[n]}_{plane.cells}_{number}{self.suffix}"
            if key not in self.memo:
                self.memo[key] = byte
                offset = self.byte_offset(n.dtype, plane, view.byte(number), kept)
                self.put(f"{byte} = load8({address}, {offset}, {view.within(here)}, {align})")
            digits.append(plane.taken(byte, cell))
        return " | ".join(digits)

    def node_alu(self, n: Node, t: Tensor | None) -> str:
        if n.attr in ("add", "sub") and (drawn := self.with_random(n, t)):
            return drawn
        plain = sum(a.op == "const" for a in n.args) == 1 and len(n.args) == 2
        operands = [
            self.value(a, t) if plain or n.attr == "where" else self.operand(a, t) for a in n.args
        ]
        return ALU[str(n.attr)][TRITON].format(*operands)

    def with_random(self, n: Node, t: Tensor | None) -> str | None:
        """A sum or difference with a random number, in one rounding: its product with STEP is
        exact, so a fused multiplication gives the same bits as a product and a sum."""
        a, b = n.args
        if b.op == "random":
            step = STEP if n.attr == "add" else -STEP
            return f"tl.fma({self.drawn(b, t)}, {step!r}, {self.operand(a, t)})"
        if a.op != "random":
            return None
        other = self.operand(b, t)
        other = other if n.attr == "add" else f"negative({other})"
        return f"tl.fma({self.drawn(a, t)}, {STEP!r}, {other})"

    def node_lookup(self, n: Node, t: Tensor | None) -> str:
        x, numbers = self.operand(n.args[0], t), n.args[1:]
        if passes.is_table(numbers):
            return f"tl.load(numbers + {numbers[0].attr} + entry({x}, {len(numbers)}))"
        return by_halves(x, [self.value(a, t) for a in numbers])

    def node_cast(self, n: Node, t: Tensor | None) -> str:
        return cast(n, TRITON, self.operand(n.args[0], t), top=ir.TOP.get(n.dtype))

    def node_random(self, n: Node, t: Tensor | None) -> str:
        return f"{self.drawn(n, t)} * {STEP!r}"

    def drawn(self, n: Node, t: Tensor | None) -> str:
        """A random number in units of STEP."""
        assert isinstance(n.attr, ir.Stream)
        t = t if is_wide(n) else None
        key = (n, t, "drawn")
        if key not in self.memo:
            stream = self.stream(n.attr)
            at = f"{stream}_weyl + {t.weyl}" if t else f"{stream}_weyl"
            self.memo[key] = f"r{self.number[n]}{f'_{t}' if t else ''}{self.suffix}"
            self.put(f"{self.memo[key]} = drawn({at}, {stream}_high)")
        return self.memo[key]

    def node_index(self, n: Node, t: Tensor) -> str:
        return f"i{t}" if n.attr == "block" else f"first + i{t}"

    # what the kernel's first lines define ---------------------------------------------------------

    @property
    def tensors(self) -> list[Tensor]:
        """Those of stores and of most block reductions."""
        return self.views.view(self.main).tensors

    @property
    def natural(self) -> list[Tensor]:
        """Those of sums and rotations, in the order of elements."""
        return self.views.view(1).tensors

    def stream(self, stream: ir.Stream) -> str:
        if not stream.source:  # those are made where peers' payloads are summed
            at = triton_rows.streams(self.program).index(stream)
            self.used.streams[stream] = self.layout.partials + at
        return stream_name(stream)

    def part(self, name: str) -> tuple[str, int]:
        """The offset in a payload of a tile's part of a field, and its known alignment."""
        number, block = self.index(name), self.layout.block
        f = self.layout.fields[number]
        stride = f.item_nbytes * (block if f.scope is Scope.ELEMENT else f.scope is Scope.BLOCK)
        if f.scope is Scope.ELEMENT and f.dtype in ir.CODES:
            stride = element_nbytes(f.dtype, block)
        if f.capacity is not None:
            stride = COUNT_NBYTES
        align = triton_rows.alignment(self.layout, stride, number) if self.full else 0
        return f"at{number} + block * {stride}", align

    def index(self, name: str) -> int:
        return [f.name for f in self.layout.fields].index(name)


def of_tensor(n: Node, t: Tensor | None) -> Key:
    """The key of a value: numbers of blocks and rows are in no tensor."""
    return n, t if is_wide(n) else None


def spread(program: ir.Function) -> set[Node]:
    """The numbers of blocks that elements depend on."""
    nodes = list(ir.walk(program.roots))
    found: set[Node] = set()
    for n in reversed(nodes):  # users come before what they use
        if is_wide(n) or n in found:
            found.update(a for a in n.args if a.scope is Scope.BLOCK)
    return found


def is_wide(n: Node) -> bool:
    """Whether it is computed for every element: nodes of element and selection scope."""
    return n.scope in (Scope.SELECTION, Scope.ELEMENT)
