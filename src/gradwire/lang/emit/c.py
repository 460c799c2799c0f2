"""Plain C from lowered programs: tables of rules for nodes, for sinks and for steps.

For every sweep of a form there is a function over a group of blocks (`FORM_groupN`). Steps over
elements run block by block; scalars of the group's blocks are computed in one vectorised loop
between them, since a block's chain of divisions and roundings would else outlast its elements.

Names in the generated code: nI is node I; aI its elements in an array, sI its blocks' numbers,
cI codes to be packed; a trailing underscore marks the storage of the whole group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import resources

from gradwire.lang import ir, passes
from gradwire.lang.emit import c_rows
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import Layout, element_nbytes, planes

REGISTER = {
    "fp32": "float", "bool": "int", "uint32": "uint32_t", "bf16": "uint32_t", "fp16": "uint32_t",
}  # fmt: skip
MEMORY = {"fp32": "f32", "bf16": "u16", "fp16": "u16"}
VALUES = {"fp32": "float", "bf16": "uint16_t", "fp16": "uint16_t"}

ALU = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "max": "{0} > {1} ? {0} : {1}",
    "min": "{0} < {1} ? {0} : {1}",
    "neg": "-{}",
    "abs": "fabsf({})",
    "floor": "floorf({})",
    "sqrt": "sqrtf({})",
    "isfinite": "is_finite({})",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "and": "{} & {}",
    "or": "{} | {}",
    "not": "!{}",
    "where": "{} ? {} : {}",
}

CASTS = {
    ("fp32", "stored"): "to_fp32({})",
    ("bf16", "nearest"): "to_bf16_nearest({})",
    ("bf16", "down"): "to_bf16_down({})",
    ("bf16", "up"): "to_bf16_up({})",
    ("fp16", "nearest"): "to_fp16_nearest({})",
    ("uint", "zero"): "to_uint({}, {top}.0f)",
}
WIDENINGS = {"bf16": "from_bf16({})", "fp16": "from_fp16({})", "fp32": "{}"}


@lru_cache(maxsize=1)
def prelude() -> str:
    """The text that every generated file begins with."""
    return resources.files("gradwire.lang.emit").joinpath("prelude.h").read_text("utf-8")


def emit(programs: Iterable[ir.Program], layout: Layout, native: str) -> str:
    """The C source of all forms of a codec, without the prelude; a function of its arguments."""
    programs = tuple(programs)
    drawn = streams(programs)
    parts = [c_rows.place(layout, drawn)]
    for program in programs:
        sweeps = passes.lower(program)
        for number, sweep in enumerate(sweeps):
            parts.append(_Group(program, layout, native, drawn).emit(number, sweep))
            parts.append(c_rows.sweep(program.form, number))
            if sweep.completes:
                parts.append(c_rows.complete(program.form, number, sweep.completes))
        parts.append(c_rows.entry(program.form, sweeps))
    return "\n".join(parts)


def streams(programs: Iterable[ir.Program]) -> tuple[ir.Stream, ...]:
    """The streams of random numbers that programs draw from; a kernel knows them by position."""
    nodes = {n for p in programs for n in ir.walk(p.roots)}
    drawn = {n.attr for n in nodes if isinstance(n.attr, ir.Stream)}
    drawn |= {n.attr.stream for n in nodes if isinstance(n.attr, (ir.Rotation, ir.Rank))}
    return tuple(sorted(drawn, key=lambda s: (s.shared, s.number)))


def _literal(value: float) -> str:
    """A constant, exactly: decimal where that is short, else hexadecimal."""
    if math.isnan(value):
        return "float_of(0x7fc00000)"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    text = repr(value) if value * 1024 == int(value * 1024) and abs(value) < 1e6 else value.hex()
    return f"({text}f)" if text.startswith("-") else f"{text}f"


class _Group:
    """Emits the function over a group of blocks for one sweep."""

    def __init__(
        self, program: ir.Program, layout: Layout, native: str, streams: tuple[ir.Stream, ...]
    ) -> None:
        self.program, self.layout, self.native, self.streams = program, layout, native, streams
        self.number = {n: i for i, n in enumerate(ir.walk(program.roots))}
        self.reductions = passes.tensor_reductions(program)
        self.lines: list[str] = []
        self.indent = 0
        self.loop: passes.Loop | None = None
        self.prefetching: passes.Loop | None = None
        self.prefetched: list[str] = []
        self.folding = False  # inside a fold, one block at a time

    def emit(self, number: int, sweep: passes.Sweep) -> str:
        self.open(
            f"INLINE void {self.program.form}_group{number}("
            "const Call *call, const Place *place, int64_t b0, const int count, const int m)"
        )
        self.put("uint8_t *restrict payload = place->row->payload;")
        self.put("const float factor = call->factor;")
        for s in streams([self.program]):
            number = self.streams.index(s)
            self.put(f"const Stream {_stream(s)} = place->streams[{number}];")
        self.plan_prefetch(sweep)
        for step in sweep.steps:
            STEPS[type(step)](self, step)
        self.close()
        return "\n".join([*self.lines, ""])

    def plan_prefetch(self, sweep: passes.Sweep) -> None:
        """A sweep of several loops reads memory in the first only: let the last ask ahead."""
        loops = [
            s.own if isinstance(s, passes.Fold) else s
            for s in sweep.steps
            if isinstance(s, (passes.Loop, passes.Fold))
        ]
        if len(loops) > 1:
            self.prefetching = loops[-1]
            loads = {str(n.attr) for loop in loops for n in loop.nodes if n.op == "load"}
            self.prefetched = sorted(loads)

    def put(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    def open(self, text: str) -> None:
        self.put(f"{text} {{")
        self.indent += 1

    def close(self, tail: str = "}") -> None:
        self.indent -= 1
        self.put(tail)

    def over_blocks(self, reads: Iterable[Node], vector: bool = False) -> None:
        """Open the loop over the group's blocks, and bring in the scalars that it reads."""
        if vector:
            self.lines.append("#pragma omp simd")
        self.open("for (int g = 0; g < count; g++)")
        self.put("const int64_t b = b0 + g;")
        self.put("const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);")
        for n in dict.fromkeys(reads):
            if n.scope is Scope.BLOCK:
                self.put(f"const {_register(n)} {self.name(n)} = s{self.number[n]}_[g];")

    # steps ---------------------------------------------------------------------------------------

    def scalars(self, step: passes.Scalars) -> None:
        of_blocks = [n for n in step.nodes if n.scope is Scope.BLOCK]
        if self.folding:
            for n in step.nodes:
                self.define(n)
            return
        for n in step.nodes:
            if n not in of_blocks:
                self.define(n)
        for n in of_blocks:
            self.put(f"{_register(n)} s{self.number[n]}_[GROUP];")
        if of_blocks:
            reads = [a for n in of_blocks if n.op != "reduce" for a in n.args if a not in of_blocks]
            self.over_blocks(reads, vector=True)
            for n in of_blocks:
                self.define(n)
                self.put(f"s{self.number[n]}_[g] = {self.name(n)};")
            self.close()

    def element_loop(self, loop: passes.Loop) -> None:
        if self.folding:
            self.loop_body(loop)
            return
        for sink in loop.sinks:
            self.declare(sink)
        self.over_blocks(_operands(loop))
        self.loop_body(loop)
        self.close()

    def loop_body(self, loop: passes.Loop) -> None:
        """One block's elements."""
        self.loop = loop
        values = VALUES[self.native]
        for n in dict.fromkeys(_operands(loop)):
            if n.scope is Scope.ELEMENT and n.op != "const" and n not in loop.nodes:
                self.put(f"const {_cell(n)} *restrict a{self.number[n]} = a{self.number[n]}_[g];")
        touches = any(n.op == "load" for n in loop.nodes) or loop is self.prefetching
        if touches or any(s.kind == "store" for s in loop.sinks):
            self.put(f"{values} *restrict values = ({values} *)place->row->values + b * BLOCK;")
            self.put("float *restrict residual = place->row->residual + b * BLOCK;")
        if loop is self.prefetching:
            for target in self.prefetched:
                self.put(f"prefetch({target} + GROUP * BLOCK, m * sizeof *{target});")
        for sink in loop.sinks:
            SINKS[sink.kind][0](self, sink)
        extremes = self.extremes(loop)
        clauses = "".join(f" reduction(min : low{x}) reduction(max : high{x})" for x in extremes)
        for x in extremes:
            self.put(f"int32_t low{x} = INT32_MAX, high{x} = INT32_MIN;")
        drawn = [_stream(n.attr) for n in loop.nodes if isinstance(n.attr, ir.Stream)]
        for stream in drawn:
            self.put(f"uint32_t {stream}_weyl = (first + {stream}.low) * WEYL;")
            clauses += f" linear({stream}_weyl : WEYL)"
        self.lines.append(f"#pragma omp simd{clauses}")
        self.open("for (int i = 0; i < m; i++)")
        for n in loop.nodes:
            self.define(n)
        for stream in drawn:
            self.put(f"{stream}_weyl += WEYL;")
        for x, operand in extremes.items():
            self.put(f"const int32_t o{x} = ordered({self.name(operand)});")
            self.put(f"low{x} = o{x} < low{x} ? o{x} : low{x};")
            self.put(f"high{x} = o{x} > high{x} ? o{x} : high{x};")
        for sink in loop.sinks:
            SINKS[sink.kind][1](self, sink)
        self.close()
        for x in extremes:
            self.put(f"low{x}_[g] = low{x}, high{x}_[g] = high{x};")
        for sink in loop.sinks:
            SINKS[sink.kind][2](self, sink)
        self.loop = None

    def extremes(self, loop: passes.Loop) -> dict[int, Node]:
        """What minima and maxima are taken of: the two share their work, by number of operand."""
        operands = [
            s.node.args[0] for s in loop.sinks if s.kind == "reduce" and s.node.attr != "sum"
        ]
        return {self.number[x]: x for x in operands}

    def declare(self, sink: passes.Sink) -> None:
        """Storage that outlives a loop over blocks."""
        n = sink.node
        if sink.kind == "keep":
            self.put(f"{_cell(n)} a{self.number[n]}_[GROUP][BLOCK] __attribute__((aligned(64)));")
        elif sink.kind == "reduce" and n.attr == "sum":
            self.put(f"float sum{self.number[n]}_[GROUP];")
        elif sink.kind == "reduce":
            x = self.number[n.args[0]]
            line = "  " * self.indent + f"int32_t low{x}_[GROUP], high{x}_[GROUP];"
            if line not in self.lines:
                self.lines.append(line)

    def unpack(self, step: passes.Unpack) -> None:
        i = self.number[step.node]
        self.put(f"uint8_t a{i}_[GROUP][BLOCK + 64] __attribute__((aligned(64)));")
        if not self.folding:
            self.over_blocks([])
        self.put(f"const uint8_t *in{i} = {self.address(step.node)};")
        for width, at in planes(ir.BITS[step.node.dtype]):
            self.put(f"in{i} = unpack(in{i}, a{i}_[g], m, {width}, {at});")
        if not self.folding:
            self.close()

    def fold(self, step: passes.Fold) -> None:
        i = self.number[step.node]
        self.put(f"float a{i}_[GROUP][BLOCK] __attribute__((aligned(64)));")
        self.over_blocks(_operands(step.own))
        self.folding = True
        self.put(f"for (int i = 0; i < m; i++) a{i}_[g][i] = -0.0f;")
        self.open("for (int k = 0; k < call->ranks; k++)")
        self.open("if (k == call->rank)")
        self.loop_body(step.own)
        self.close("} else {")
        self.indent += 1
        self.put("const int own_before = 0 <= call->rank && call->rank < k;")
        self.put("const uint8_t *source = place->row->source + (k - own_before) * call->stride;")
        for inner in step.body:
            STEPS[type(inner)](self, inner)
        self.close()
        self.close()
        self.folding = False
        self.close()

    def put_field(self, step: passes.Put) -> None:
        at = [f.name for f in self.layout.fields].index(step.name)
        f = self.layout.fields[at]
        memory = MEMORY.get(f.dtype, "uint8_t")
        target = f"({memory} *)(payload + place->at[{at}])"
        if f.scope is Scope.TENSOR:
            self.put(f"if (b0 == 0) *{target} = ({memory}){self.name(step.node)};")
            return
        self.over_blocks([step.node], vector=True)
        self.put(f"({target})[b] = ({memory}){self.name(step.node)};")
        self.close()

    def partial(self, step: passes.Partial) -> None:
        self.over_blocks([step.node])
        self.put(f"place->partials[{step.index} * place->blocks + b] = {self.name(step.node)};")
        self.close()

    # sinks: before a block's loop, in its body, after it -----------------------------------------

    def nothing(self, sink: passes.Sink) -> None:
        """For a sink that has nothing to do at this point."""

    def before_reduce(self, sink: passes.Sink) -> None:
        if sink.node.attr == "sum":
            self.put(f"float t{self.number[sink.node]}[BLOCK] __attribute__((aligned(64)));")

    def in_reduce(self, sink: passes.Sink) -> None:
        if sink.node.attr == "sum":
            self.put(f"t{self.number[sink.node]}[i] = {self.name(sink.node.args[0])};")

    def after_reduce(self, sink: passes.Sink) -> None:
        i = self.number[sink.node]
        if sink.node.attr == "sum":
            self.put(f"sum{i}_[g] = tree_sum(t{i}, m);")

    def in_keep(self, sink: passes.Sink) -> None:
        self.put(f"a{self.number[sink.node]}_[g][i] = {self.name(sink.node)};")

    def before_field(self, sink: passes.Sink) -> None:
        i = self.number[sink.node]
        if sink.node.dtype.startswith("uint"):
            self.put(f"uint8_t c{i}[BLOCK + 8] __attribute__((aligned(64)));")
            self.put(f"memset(c{i} + m, 0, 8);")
        else:
            memory = MEMORY[sink.node.dtype]
            self.put(f"{memory} *restrict p{i} = ({memory} *)({self.target(sink)});")

    def in_field(self, sink: passes.Sink) -> None:
        i, value = self.number[sink.node], self.name(sink.node)
        if sink.node.dtype.startswith("uint"):
            self.put(f"c{i}[i] = (uint8_t){value};")
        else:
            self.put(f"p{i}[i] = ({MEMORY[sink.node.dtype]}){value};")

    def after_field(self, sink: passes.Sink) -> None:
        i = self.number[sink.node]
        if sink.node.dtype.startswith("uint"):
            self.put(f"uint8_t *out{i} = {self.target(sink)};")
            for width, at in planes(ir.BITS[sink.node.dtype]):
                self.put(f"out{i} = pack(out{i}, c{i}, m, {width}, {at});")

    def in_store(self, sink: passes.Sink) -> None:
        self.put(f"{sink.name}[i] = {self.name(sink.node)};")

    def in_accumulate(self, sink: passes.Sink) -> None:
        assert sink.fold is not None
        self.put(f"a{self.number[sink.fold]}_[g][i] += {self.name(sink.node)};")

    # nodes ---------------------------------------------------------------------------------------

    def define(self, n: Node) -> None:
        self.put(f"const {_register(n)} {self.name(n)} = {NODES[n.op](self, n)};")

    def name(self, n: Node) -> str:
        """How a computed node is read here: a literal, an argument, a local or an array's cell."""
        if n.op == "const":
            assert isinstance(n.attr, float)
            return _literal(n.attr)
        if n.op == "param":
            return str(n.attr)
        in_array = n.scope is Scope.ELEMENT and (self.loop is None or n not in self.loop.nodes)
        return f"a{self.number[n]}[i]" if in_array else f"n{self.number[n]}"

    def node_alu(self, n: Node) -> str:
        return ALU[str(n.attr)].format(*(self.name(a) for a in n.args))

    def node_cast(self, n: Node) -> str:
        x = n.args[0]
        if n.dtype == "fp32" and n.attr != "stored":
            return WIDENINGS.get(x.dtype, "(float){}").format(self.name(x))
        kind = "uint" if n.dtype.startswith("uint") else n.dtype
        return CASTS[kind, str(n.attr)].format(self.name(x), top=2 ** ir.BITS[n.dtype] - 1)

    def node_load(self, n: Node) -> str:
        return f"{n.attr}[i]"

    def node_field(self, n: Node) -> str:
        cell = {Scope.ELEMENT: "i", Scope.BLOCK: "b", Scope.TENSOR: "0"}[n.scope]
        return f"((const {MEMORY.get(n.dtype, 'uint8_t')} *)({self.address(n)}))[{cell}]"

    def node_random(self, n: Node) -> str:
        assert isinstance(n.attr, ir.Stream)
        stream = _stream(n.attr)
        in_loop = n.scope is Scope.ELEMENT
        weyl = f"{stream}_weyl" if in_loop else f"(first + {stream}.low) * WEYL"
        return f"uniform({stream}, {weyl})"

    def node_index(self, n: Node) -> str:
        return "first + (uint32_t)i"

    def node_reduce(self, n: Node) -> str:
        if n.scope is Scope.TENSOR:
            return f"place->partials[PARTIALS * place->blocks + {self.reductions.index(n)}]"
        if n.attr == "sum":
            return f"sum{self.number[n]}_[g]"
        x = self.number[n.args[0]]
        return f"extreme({'low' if n.attr == 'min' else 'high'}{x}_[g], low{x}_[g], high{x}_[g])"

    # addresses -----------------------------------------------------------------------------------

    def address(self, n: Node) -> str:
        """Where a received field begins: this block's elements, else the whole field."""
        assert isinstance(n.attr, ir.FieldRef)
        base = "source" if n.attr.source else "payload"
        size = element_nbytes(n.dtype, self.layout.block) if n.scope is Scope.ELEMENT else 0
        return self.within(base, n.attr.name, size)

    def target(self, sink: passes.Sink) -> str:
        """Where a block's elements of a field are written."""
        return self.within("payload", sink.name, element_nbytes(sink.node.dtype, self.layout.block))

    def within(self, base: str, name: str, block_nbytes: int) -> str:
        at = [f.name for f in self.layout.fields].index(name)
        return f"{base} + place->at[{at}]" + (f" + b * {block_nbytes}" if block_nbytes else "")


def _operands(loop: passes.Loop) -> list[Node]:
    """What a loop's nodes and sinks read."""
    return [a for n in loop.nodes for a in n.args] + [
        s.node.args[0] if s.kind == "reduce" else s.node for s in loop.sinks
    ]


def _stream(stream: ir.Stream) -> str:
    return f"{'shared' if stream.shared else 'stream'}{stream.number}"


def _register(n: Node) -> str:
    return REGISTER.get(n.dtype, "int32_t")


def _cell(n: Node) -> str:
    """The type of an element kept in an array."""
    return "uint8_t" if passes.is_packed(n) else _register(n)


STEPS: dict[type, Callable[..., None]] = {
    passes.Scalars: _Group.scalars,
    passes.Loop: _Group.element_loop,
    passes.Unpack: _Group.unpack,
    passes.Fold: _Group.fold,
    passes.Put: _Group.put_field,
    passes.Partial: _Group.partial,
}

SINKS: dict[str, tuple[Callable[..., None], Callable[..., None], Callable[..., None]]] = {
    "reduce": (_Group.before_reduce, _Group.in_reduce, _Group.after_reduce),
    "keep": (_Group.nothing, _Group.in_keep, _Group.nothing),
    "field": (_Group.before_field, _Group.in_field, _Group.after_field),
    "store": (_Group.nothing, _Group.in_store, _Group.nothing),
    "accumulate": (_Group.nothing, _Group.in_accumulate, _Group.nothing),
}

NODES: dict[str, Callable[..., str]] = {
    "alu": _Group.node_alu,
    "cast": _Group.node_cast,
    "load": _Group.node_load,
    "field": _Group.node_field,
    "random": _Group.node_random,
    "index": _Group.node_index,
    "reduce": _Group.node_reduce,
}
