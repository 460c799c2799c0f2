"""C expressions: a rule `node_OP` per operation of the IR, and the writer of a function's text.

Names in the generated code: nI is the value of node I, aI its elements in an array, sI its numbers
of blocks, cI codes to be packed, kI keys of a selection. A trailing underscore marks the storage of
the whole group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gradwire.lang import ir, passes
from gradwire.lang.emit import ALU, cast, stream_name
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import Layout, element_nbytes
from gradwire.lang.sweeps import Loop, Sink

C = 0  # the target's place in a rule
MAX_NESTED = 4  # `where`s within one another in an integer expression

REGISTER = {
    "fp32": "float", "bool": "int", "uint32": "uint32_t", "bf16": "uint32_t", "fp16": "uint32_t",
    "fp8": "uint32_t",
}  # fmt: skip
MEMORY = {"fp32": "f32", "bf16": "u16", "fp16": "u16", "fp8": "uint8_t", "int32": "i32"}
# Of the bits of floats, from which lowest() and highest() tell: type, and neutral element.
EXTREMES = {
    "least": ("int32_t", "INT32_MAX"), "most": ("int32_t", "INT32_MIN"), "top": ("uint32_t", "0"),
}  # fmt: skip
VALUES = {"fp32": "float", "bf16": "uint16_t", "fp16": "uint16_t"}


def streams(programs: Iterable[ir.Function]) -> tuple[ir.Stream, ...]:
    """The random streams that programs use; generated code refers to them by position: first to
    those of the row, then to those of peers' payloads."""
    nodes = {n for p in programs for n in ir.walk(p.roots)}
    drawn = {n.attr for n in nodes if isinstance(n.attr, ir.Stream)}
    drawn |= {n.attr.stream for n in nodes if isinstance(n.attr, (ir.Rotation, ir.Rank))}
    return tuple(sorted(drawn, key=lambda s: (s.source, s.shared, s.number)))


def needs_clamp(n: Node) -> bool:
    """Whether it is a cast to codes of a value that may be out of range."""
    if n.op != "cast" or n.dtype not in ir.CODES:
        return False
    known = passes.known_range(n.args[0])
    return known is None or known[0] < 0 or known[1] > ir.TOP[n.dtype]


def limits(program: ir.Function) -> dict[str, str]:
    """The literals of the constant bounds of clamps in a program, and the locals that hold them.

    By literal, which tells -0 from 0 and finds NaN; a float as a key does neither.
    """
    found: dict[str, float] = {}
    for n in ir.walk(program.roots):
        if needs_clamp(n):
            found |= {literal(x): x for x in (0.0, float(ir.TOP[n.dtype]))}
        elif n.op == "alu" and n.attr in ("min", "max"):
            bounds = [a.attr for a in n.args if isinstance(a.attr, float)]
            found |= {literal(x): x for x in bounds}
    ordered = sorted(found, key=lambda text: (math.isnan(found[text]), found[text], text))
    return {text: f"limit{i}" for i, text in enumerate(ordered)}


def literal(value: float) -> str:
    """An exact C literal: decimal if that is short, else hexadecimal."""
    if math.isnan(value):
        return "float_of(0x7fc00000)"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    short = abs(value) < 1e6 and value * 1024 == int(value * 1024)
    text = repr(value) if short else value.hex()
    return f"({text}f)" if text.startswith("-") else f"{text}f"


def register(n: Node) -> str:
    return REGISTER.get(n.dtype, "int32_t")


def cell(n: Node) -> str:
    """The C type of an element in an array."""
    return code_cell(n.dtype) if n.dtype in ir.CODES else register(n)


def code_cell(dtype: str) -> str:
    """The C type of an unpacked code; see pack_trits."""
    return "int32_t" if dtype == "trit" else "uint8_t"


class Writer:
    """The text of one function, and the expressions for its nodes."""

    def __init__(
        self, program: ir.Function, layout: Layout, native: str, streams: tuple[ir.Stream, ...]
    ) -> None:
        self.program, self.layout, self.native, self.streams = program, layout, native, streams
        self.number = {n: i for i, n in enumerate(ir.walk(program.roots))}
        self.reductions = passes.tensor_reductions(program)
        self.gathered = passes.gathered(program)
        self.limits = limits(program)
        self.lines: list[str] = []
        self.indent = 0
        self.loop: Loop | None = None
        self.sparse = False  # whether the loop visits only some elements
        self.folding = False  # whether inside a fold, which takes one block at a time

    def put(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    @contextmanager
    def braces(self, text: str, tail: str = "}") -> Iterator[None]:
        """What is put here stands in the braces that `text` opens and `tail` closes."""
        self.put(f"{text} {{" if text else "{")
        self.indent += 1
        yield
        self.indent -= 1
        self.put(tail)

    def arguments(self) -> None:
        """Declare the locals of a function over a row."""
        self.put("uint8_t *restrict payload = place->row->payload;")
        self.put("const float factor = call->factor;")
        for at in sorted(n.attr for n in self.number if isinstance(n.attr, int)):
            self.put(f"const float table{at} = call->table[{at}];")
        for value, name in self.limits.items():
            self.put(f"const float {name} = limit({value});")
        for s in streams([self.program]):
            if not s.source:
                at = self.streams.index(s)
                self.put(f"const Stream {stream_name(s)} = place->streams[{at}];")

    def memory(self, offset: str) -> None:
        """Declare pointers to the row's values and residual, `offset` values from their start."""
        values = VALUES[self.native]
        self.put(f"{values} *restrict values = ({values} *)place->row->values{offset};")
        self.put(f"float *restrict residual = place->row->residual{offset};")

    def streamed_memory(self) -> None:
        """As `memory`, for values that are only written: via a buffer in L1 if there are many."""
        values = VALUES[self.native]
        self.put(f"{values} *restrict to = ({values} *)place->row->values + b * BLOCK;")
        self.put(f"{values} fresh[BLOCK] __attribute__((aligned(64)));")
        self.put(f"{values} *restrict values = call->large ? fresh : to;")

    def define(self, *nodes: Node) -> None:
        for n in nodes:
            value = getattr(self, f"node_{n.op}")(n)
            self.put(f"const {register(n)} {self.name(n)} = {value};")

    def name(self, n: Node) -> str:
        """The expression that reads a node: a literal, an argument, a local or an array element."""
        if n.op == "const":
            assert isinstance(n.attr, float)
            return literal(n.attr)
        if n.op == "param":
            return f"table{n.attr}" if isinstance(n.attr, int) else str(n.attr)
        in_array = n.scope is Scope.ELEMENT and (self.loop is None or n not in self.loop.computes)
        if not in_array:
            return f"n{self.number[n]}"
        if n.op == "random":
            return self.node_random(n)
        element = f"a{self.number[n]}[i]"
        if isinstance(n.attr, ir.Rotation) and n.attr.inverse:
            return self.flipped(element, n.attr)
        return element

    def flipped(self, element: str, rotation: ir.Rotation) -> str:
        """An element before a rotation, or after an inverse one, with its random sign."""
        stream = rotation.stream
        return f"flipped({element}, {stream_name(stream)}, {self.weyl(stream)})"

    def node_alu(self, n: Node) -> str:
        if n.attr in ("add", "sub") and (added := self.uniform_plus(n)):
            return added
        names = (self.name(a) for a in n.args)
        if n.attr in ("min", "max"):
            names = (self.limit(a) if a.op == "const" else self.name(a) for a in n.args)
        return ALU[str(n.attr)][C].format(*names)

    def uniform_plus(self, n: Node) -> str | None:
        """A random element plus x, or less a constant."""
        for drawn, x in (n.args, n.args[::-1]):
            if drawn.op == "random" and drawn.scope is Scope.ELEMENT:
                if n.attr == "sub" and (drawn is not n.args[0] or x.op != "const"):
                    return None
                other = f"-{self.name(x)}" if n.attr == "sub" else self.name(x)
                return f"plus_uniform({other}, {self.drawn(drawn)})"
        return None

    def node_lookup(self, n: Node) -> str:
        x, *numbers = n.args
        table = f"call->table + {numbers[0].attr}"
        if not passes.is_table(numbers):
            table = f"t{self.number[n]}"
            texts = ", ".join(self.name(a) for a in numbers)
            self.put(f"const float {table}[] = {{{texts}}};")
        return f"number_at({table}, {len(numbers)}, {self.name(x)})"

    def limit(self, n: Node) -> str:
        assert isinstance(n.attr, float)
        return self.limits[literal(n.attr)]

    def node_cast(self, n: Node) -> str:
        x = n.args[0]
        if n.dtype not in ir.CODES:
            return cast(n, C, self.name(x))
        if not needs_clamp(n):
            return self.integer(x, wide=code_cell(n.dtype) == "int32_t")
        zero, top = (self.limits[literal(x)] for x in (0.0, float(ir.TOP[n.dtype])))
        to = "to_code" if self.is_only_packed(n) else "to_uint"
        return cast(n, C, self.name(x), zero=zero, top=top, to=to)

    def is_only_packed(self, n: Node) -> bool:
        """Whether a loop over a block's elements narrows a code, and nothing else reads it."""
        if self.loop is None or self.sparse or n.dtype == "trit":
            return False
        read = any(n in a.args for a in self.loop.nodes)
        return not read and all(s.kind == "field" for s in self.loop.sinks if n in s.reads)

    def integer(self, n: Node, wide: bool, depth: int = 0) -> str:
        """A number that is a code, as an integer expression: `where`s of constants use integers.

        Nested `where`s do so only for codes as `wide` as floats, to MAX_NESTED levels: the text of
        a level may be twice that of the next. For narrower codes gcc narrows the conditions, which
        is slower than converting the result.
        """
        if n.op == "const":
            assert isinstance(n.attr, float)
            return str(int(n.attr))
        chosen = n.attr == "where" and (wide or all(a.op == "const" for a in n.args[1:]))
        if chosen and depth < MAX_NESTED and self.loop and n in self.loop.computes:
            condition, yes, no = n.args
            first, second = (self.integer(a, wide, depth + 1) for a in (yes, no))
            return f"{self.name(condition)} ? {first} : ({second})"
        return f"(int32_t){self.name(n)}"

    def node_load(self, n: Node) -> str:
        return f"{n.attr}[i]"

    def node_field(self, n: Node) -> str:
        if n.scope is Scope.SELECTION:
            return self.entry(n)
        at = {Scope.ELEMENT: "i", Scope.BLOCK: "b", Scope.TENSOR: "0"}[n.scope]
        return f"((const {MEMORY.get(n.dtype, 'uint8_t')} *)({self.address(n)}))[{at}]"

    def entry(self, n: Node) -> str:
        """The value of a received field for entry `e`."""
        assert isinstance(n.attr, ir.FieldRef)
        tail = f"tail{self.field(n.attr.name)}"
        if n.dtype in MEMORY:
            return f"((const {MEMORY[n.dtype]} *){tail})[e]"
        if n.dtype == "trit":
            return f"trit_at({tail}, e, cursor->entries)"
        return f"code_at({tail}, e, cursor->entries, {ir.BITS[n.dtype]})"

    def node_random(self, n: Node) -> str:
        return f"uniform({self.drawn(n)})"

    def drawn(self, n: Node) -> str:
        """The 24 bits of a random number, as a float."""
        assert isinstance(n.attr, ir.Stream)
        stream = stream_name(n.attr)
        if n.scope is not Scope.ELEMENT:
            return f"drawn({stream}, (first + {stream}.low) * WEYL)"
        if self.loop and n not in self.loop.computes:
            return f"a{self.number[n]}[i]"
        return f"drawn({stream}, {self.weyl(n.attr)})"

    def weyl(self, stream: ir.Stream) -> str:
        """The element's position in a stream; a loop over all elements increments a variable."""
        name = stream_name(stream)
        return f"(first + (uint32_t)i + {name}.low) * WEYL" if self.sparse else f"{name}_weyl"

    def node_index(self, n: Node) -> str:
        if n.attr == "block":  # in a sparse loop, i is relative to the row
            return "(uint32_t)(i % BLOCK)" if self.sparse else "(uint32_t)i"
        return "first + (uint32_t)i"

    def node_reduce(self, n: Node) -> str:
        if n.scope is Scope.TENSOR:
            return f"place->partials[PARTIALS * place->blocks + {self.reductions.index(n)}]"
        if n.attr in ("sum", "count"):
            return f"sum{self.number[n]}_[g]"
        parts = {kind: f"{kind}{self.number[x]}_[g]" for kind, x in self.parts(n.args[0])}
        given = ", ".join(parts.get(kind, "0") for kind in EXTREMES)
        return f"{'lowest' if n.attr == 'min' else 'highest'}({given})"

    def parts(self, operand: Node) -> list[tuple[str, Node]]:
        """The extremes that tell those of an operand; a magnitude has no negative bits."""
        positive = operand.op == "alu" and operand.attr == "abs"
        return [(kind, operand) for kind in EXTREMES if kind != "top" or not positive]

    def node_keep(self, n: Node) -> str:
        return "{1} ? {0} : 0".format(*(self.name(a) for a in n.args))

    def node_gather(self, n: Node) -> str:
        if n in self.gathered:
            return f"run->gathered[{self.gathered.index(n)}][e]"
        return self.name(n.args[0])

    # addresses -----------------------------------------------------------------------------------

    def address(self, n: Node) -> str:
        """The address of a received field, or of this block's elements in it."""
        assert isinstance(n.attr, ir.FieldRef)
        base = "source" if n.attr.source else "payload"
        size = element_nbytes(n.dtype, self.layout.block) if n.scope is Scope.ELEMENT else 0
        return self.within(base, n.attr.name, size)

    def target(self, sink: Sink) -> str:
        """The address where a block's elements of a field are written."""
        return self.within("payload", sink.name, element_nbytes(sink.node.dtype, self.layout.block))

    def within(self, base: str, name: str, block_nbytes: int) -> str:
        return f"{base} + place->at[{self.field(name)}]" + (
            f" + b * {block_nbytes}" if block_nbytes else ""
        )

    def field(self, name: str) -> int:
        return [f.name for f in self.layout.fields].index(name)
