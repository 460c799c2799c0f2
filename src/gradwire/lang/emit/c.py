"""Plain C from lowered programs: a table of rules for nodes, one for sinks, one for steps.

For each form the generated file has, per sweep, a function over one block (`FORM_block0`, always
inlined: full blocks see their trip count as a constant), a walk that divides the blocks of all rows
among threads, and, where a tensor reduction ends the sweep, its completion. The entry point has the
form's name and the signature that lang/kernels.py calls. prelude.h holds what all of them share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import resources

from gradwire.lang import ir, passes
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import Layout, element_nbytes, planes

REGISTER = {"fp32": "float", "bool": "int", "uint32": "uint32_t", "bf16": "uint32_t", "fp16": "uint32_t"}
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
WIDENINGS = {"bf16": "from_bf16({})", "fp16": "from_fp16({})"}


@lru_cache(maxsize=1)
def prelude() -> str:
    """The text that every generated file begins with."""
    return resources.files("gradwire.lang.emit").joinpath("prelude.h").read_text("utf-8")


def emit(programs: Iterable[ir.Program], layout: Layout, native: str) -> str:
    """The C source of all forms of a codec; byte for byte the same for the same codec."""
    programs = tuple(programs)
    streams = 1 + max(
        (n.attr for p in programs for n in ir.walk(p.roots) if n.op == "random"),  # type: ignore[type-var]
        default=-1,
    )
    parts = [prelude(), _place(layout, int(streams))]  # type: ignore[call-overload]
    parts += [_Form(program, layout, native).emit() for program in programs]
    return "\n".join(parts)


def _place(layout: Layout, streams: int) -> str:
    """The struct that says where a row's fields lie, and the function that fills it."""
    lines = [
        f"enum {{ BLOCK = {layout.block}, PARTIALS = {layout.partials} }};",
        "",
        "/* Where a row's fields begin, its random streams, its part of the workspace. */",
        "typedef struct {",
        "  const Row *row;",
        f"  int64_t blocks, at[{len(layout.fields)}];",
        f"  Stream streams[{max(1, streams)}];",
        "  float *partials;",
        "} Place;",
        "",
        "INLINE Place place_of(const Row *row, float *partials) {",
        "  Place p = {.row = row, .blocks = blocks_of(row->numel, BLOCK), .partials = partials};",
        "  const int64_t full = row->numel / BLOCK, rest = row->numel % BLOCK;",
        "  int64_t at = 0;",
    ]
    for number, f in enumerate(layout.fields):
        if f.scope is Scope.TENSOR:
            size = str(f.item_nbytes)
        elif f.scope is Scope.BLOCK:
            size = f"p.blocks * {f.item_nbytes}"
        else:
            size = f"full * {element_nbytes(f.dtype, layout.block)} + {_rest_nbytes(f.dtype)}"
        lines.append(f"  p.at[{number}] = at, at += {size};  /* {f.name} */")
    lines += [f"  p.streams[{s}] = stream(row->key, {s});" for s in range(streams)]
    return "\n".join([*lines, "  (void)full, (void)rest, (void)at;", "  return p;", "}", ""])


def _rest_nbytes(dtype: str) -> str:
    if not dtype.startswith("uint"):
        return f"rest * {ir.BITS[dtype] // 8}"
    return " + ".join(f"(rest * {width} + 7) / 8" for width, _ in planes(ir.BITS[dtype]))


def _literal(value: float) -> str:
    if math.isnan(value):
        return "float_of(0x7fc00000)"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    text = f"{value!r}f" if value == int(value) and abs(value) < 1e6 else f"(float){value.hex()}"
    return f"({text})" if text.startswith(("-", "(float)")) else text


class _Form:
    """Emits one form. `self.lines` is the text so far; `indent` nests it."""

    def __init__(self, program: ir.Program, layout: Layout, native: str) -> None:
        self.program, self.layout, self.native = program, layout, native
        self.number = {n: i for i, n in enumerate(ir.walk(program.roots))}
        self.reductions = passes.tensor_reductions(program)
        self.lines: list[str] = []
        self.indent = 0
        self.loop: passes.Loop | None = None

    def emit(self) -> str:
        sweeps = passes.lower(self.program)
        for s, sweep in enumerate(sweeps):
            self.block(s, sweep)
            self.walk(s)
            if sweep.completes:
                self.complete(s, sweep)
        self.entry(sweeps)
        return "\n".join([*self.lines, ""])

    def put(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    def open(self, text: str) -> None:
        self.put(f"{text} {{")
        self.indent += 1

    def close(self, tail: str = "}") -> None:
        self.indent -= 1
        self.put(tail)

    # functions -----------------------------------------------------------------------------------

    def block(self, s: int, sweep: passes.Sweep) -> None:
        form = self.program.form
        self.open(
            f"INLINE void {form}_block{s}(const Call *call, const Place *place, int64_t b, const int m)"
        )
        values = VALUES[self.native]
        self.put(f"{values} *restrict values = ({values} *)place->row->values + b * BLOCK;")
        self.put("float *restrict residual = place->row->residual + b * BLOCK;")
        self.put("uint8_t *restrict payload = place->row->payload;")
        self.put("const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);")
        self.put("const float factor = call->factor;")
        self.put("(void)values, (void)residual, (void)payload, (void)first, (void)factor;")
        for number in self.streams():
            self.put(f"const Stream stream{number} = place->streams[{number}];")
        for step in sweep.steps:
            self.step(step)
        self.close()
        self.open(
            f"static __attribute__((noinline)) void {form}_ragged{s}"
            "(const Call *call, const Place *place, int64_t b, int m)"
        )
        self.put(f"{form}_block{s}(call, place, b, m);")
        self.close()

    def streams(self) -> list[int]:
        return sorted({int(str(n.attr)) for n in self.number if n.op == "random"})

    def walk(self, s: int) -> None:
        form = self.program.form
        self.lines += f"""static void {form}_sweep{s}(const Call *call, int thread, int threads) {{
  int64_t total = 0, seen = 0;
  for (int64_t r = 0; r < call->n; r++) total += blocks_of(call->rows[r].numel, BLOCK);
  const int64_t first = total * thread / threads, last = total * (thread + 1) / threads;
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n && seen < last; r++) {{
    const Row *row = &call->rows[r];
    const int64_t blocks = blocks_of(row->numel, BLOCK), full = row->numel / BLOCK;
    int64_t b = first > seen ? first - seen : 0;
    const int64_t end = last - seen < blocks ? last - seen : blocks;
    if (b < end) {{
      const Place place = place_of(row, partials);
      for (; b < end && b < full; b++) {form}_block{s}(call, &place, b, BLOCK);
      if (b < end) {form}_ragged{s}(call, &place, b, (int)(row->numel - full * BLOCK));
    }}
    seen += blocks;
    partials += (blocks + 1) * PARTIALS;
  }}
}}""".splitlines()

    def complete(self, s: int, sweep: passes.Sweep) -> None:
        kinds = {"min": "minimum", "max": "maximum", "sum": "lane_sum"}
        self.open(
            f"static void {self.program.form}_complete{s}(const Call *call, int thread, int threads)"
        )
        self.put("float *partials = call->workspace;")
        self.open("for (int64_t r = 0; r < call->n; r++)")
        self.put("const int64_t blocks = blocks_of(call->rows[r].numel, BLOCK);")
        self.open("if (r % threads == thread && blocks)")
        for index, kind in sweep.completes:
            self.put(
                f"partials[PARTIALS * blocks + {index}] = "
                f"{kinds[kind]}(partials + {index} * blocks, blocks);"
            )
        self.close()
        self.put("partials += (blocks + 1) * PARTIALS;")
        self.close()
        self.close()

    def entry(self, sweeps: tuple[passes.Sweep, ...]) -> None:
        self.open(
            f"int {self.program.form}(const Row *rows, int64_t n, int32_t ranks, int32_t rank, "
            "int64_t stride, float factor, int32_t threads, void *workspace)"
        )
        self.put("const Call call = {rows, n, stride, ranks, rank, factor, workspace};")
        self.lines.append("#pragma omp parallel num_threads(threads) if (threads > 1)")
        self.open("")
        self.put("const int t = omp_get_thread_num(), of = omp_get_num_threads();")
        for s, sweep in enumerate(sweeps):
            self.put(f"{self.program.form}_sweep{s}(&call, t, of);")
            if sweep.completes:
                self.lines.append("#pragma omp barrier")
                self.put(f"{self.program.form}_complete{s}(&call, t, of);")
                self.lines.append("#pragma omp barrier")
        self.close()
        self.put("return 0;")
        self.close()

    # steps ---------------------------------------------------------------------------------------

    def step(self, step: passes.Step) -> None:
        STEPS[type(step)](self, step)

    def scalars(self, step: passes.Scalars) -> None:
        for n in step.nodes:
            self.put(f"const {_register(n)} n{self.number[n]} = {self.expression(n)};")

    def run_loop(self, loop: passes.Loop) -> None:
        self.loop = loop
        for sink in loop.sinks:
            SINKS[sink.kind][0](self, sink)
        extremes = sorted({self.number[s.node.args[0]] for s in loop.sinks if _is_extreme(s)})
        clauses = "".join(f" reduction(min : low{x}) reduction(max : high{x})" for x in extremes)
        self.lines.append(f"#pragma omp simd{clauses}")
        self.open("for (int i = 0; i < m; i++)")
        for n in loop.nodes:
            self.put(f"const {_register(n)} n{self.number[n]} = {self.expression(n)};")
        for x in extremes:
            operand = next(s.node.args[0] for s in loop.sinks if _is_extreme(s) and self.number[s.node.args[0]] == x)
            self.put(f"const int32_t o{x} = ordered({self.operand(operand)});")
            self.put(f"low{x} = o{x} < low{x} ? o{x} : low{x};")
            self.put(f"high{x} = o{x} > high{x} ? o{x} : high{x};")
        for sink in loop.sinks:
            SINKS[sink.kind][1](self, sink)
        self.close()
        for sink in loop.sinks:
            SINKS[sink.kind][2](self, sink)
        self.loop = None

    def unpack(self, step: passes.Unpack) -> None:
        number, name = self.number[step.node], f"a{self.number[step.node]}"
        self.put(f"uint8_t {name}[BLOCK + 8] __attribute__((aligned(64)));")
        self.put(f"const uint8_t *in{number} = {self.address(step.node)};")
        for width, at in planes(ir.BITS[step.node.dtype]):
            self.put(f"in{number} = unpack(in{number}, {name}, m, {width}, {at});")

    def fold(self, step: passes.Fold) -> None:
        name = f"a{self.number[step.node]}"
        self.put(f"float {name}[BLOCK] __attribute__((aligned(64)));")
        self.put(f"for (int i = 0; i < m; i++) {name}[i] = -0.0f;")
        self.open("for (int k = 0; k < call->ranks; k++)")
        self.open("if (k == call->rank)")
        self.run_loop(step.own)
        self.close("} else {")
        self.indent += 1
        self.put(
            "const uint8_t *source = place->row->source + (k - (k > call->rank)) * call->stride;"
        )
        for inner in step.body:
            self.step(inner)
        self.close()
        self.close()

    def put_field(self, step: passes.Put) -> None:
        at, f = self.field(step.name)
        where = f"payload + place->at[{at}]"
        memory = MEMORY.get(f.dtype, "uint8_t")
        value = self.operand(step.node)
        if f.scope is Scope.TENSOR:
            self.put(f"if (b == 0) *({memory} *)({where}) = ({memory}){value};")
        else:
            self.put(f"(({memory} *)({where}))[b] = ({memory}){value};")

    def partial(self, step: passes.Partial) -> None:
        self.put(f"place->partials[{step.index} * place->blocks + b] = {self.operand(step.node)};")

    # sinks: (before the loop, in its body, after it) ---------------------------------------------

    def nothing(self, sink: passes.Sink) -> None:
        """For a sink that has nothing to do at this point."""

    def before_reduce(self, sink: passes.Sink) -> None:
        x = self.number[sink.node.args[0]]
        if sink.node.attr == "sum":
            self.put(f"float t{self.number[sink.node]}[BLOCK] __attribute__((aligned(64)));")
        elif sink is next(s for s in self.sinks() if _is_extreme(s) and self.number[s.node.args[0]] == x):
            self.put(f"int32_t low{x} = INT32_MAX, high{x} = INT32_MIN;")

    def in_reduce(self, sink: passes.Sink) -> None:
        if sink.node.attr == "sum":
            self.put(f"t{self.number[sink.node]}[i] = {self.operand(sink.node.args[0])};")

    def before_keep(self, sink: passes.Sink) -> None:
        self.put(f"{_register(sink.node)} a{self.number[sink.node]}[BLOCK] __attribute__((aligned(64)));")

    def in_keep(self, sink: passes.Sink) -> None:
        self.put(f"a{self.number[sink.node]}[i] = {self.operand(sink.node)};")

    def before_field(self, sink: passes.Sink) -> None:
        number = self.number[sink.node]
        if sink.node.dtype.startswith("uint"):
            self.put(f"uint8_t c{number}[BLOCK + 8] __attribute__((aligned(64)));")
            self.put(f"memset(c{number} + m, 0, 8);")
        else:
            memory = MEMORY[sink.node.dtype]
            self.put(f"{memory} *restrict p{number} = ({memory} *)({self.target(sink)});")

    def in_field(self, sink: passes.Sink) -> None:
        number, value = self.number[sink.node], self.operand(sink.node)
        if sink.node.dtype.startswith("uint"):
            self.put(f"c{number}[i] = (uint8_t){value};")
        else:
            self.put(f"p{number}[i] = ({MEMORY[sink.node.dtype]}){value};")

    def after_field(self, sink: passes.Sink) -> None:
        number = self.number[sink.node]
        if sink.node.dtype.startswith("uint"):
            self.put(f"uint8_t *out{number} = {self.target(sink)};")
            for width, at in planes(ir.BITS[sink.node.dtype]):
                self.put(f"out{number} = pack(out{number}, c{number}, m, {width}, {at});")

    def in_store(self, sink: passes.Sink) -> None:
        self.put(f"{sink.name}[i] = {self.operand(sink.node)};")

    def in_accumulate(self, sink: passes.Sink) -> None:
        assert sink.fold is not None
        self.put(f"a{self.number[sink.fold]}[i] += {self.operand(sink.node)};")

    def sinks(self) -> tuple[passes.Sink, ...]:
        assert self.loop is not None
        return self.loop.sinks

    # nodes ---------------------------------------------------------------------------------------

    def operand(self, n: Node) -> str:
        """How a computed node is read here: a literal, an argument, a local or an array's cell."""
        if n.op == "const":
            assert isinstance(n.attr, float)
            return _literal(n.attr)
        if n.op == "param":
            return str(n.attr)
        local = n.scope is not Scope.ELEMENT or (self.loop is not None and n in self.loop.nodes)
        return f"n{self.number[n]}" if local else f"a{self.number[n]}[i]"

    def expression(self, n: Node) -> str:
        return NODES[n.op](self, n)

    def node_alu(self, n: Node) -> str:
        return ALU[str(n.attr)].format(*(self.operand(a) for a in n.args))

    def node_cast(self, n: Node) -> str:
        (x,) = n.args
        if n.dtype == "fp32" and n.attr != "stored":
            if x.dtype == "fp32":
                return self.operand(x)
            return WIDENINGS.get(x.dtype, "(float){}").format(self.operand(x))
        kind = "uint" if n.dtype.startswith("uint") else n.dtype
        return CASTS[kind, str(n.attr)].format(self.operand(x), top=2 ** ir.BITS[n.dtype] - 1)

    def node_load(self, n: Node) -> str:
        return f"{n.attr}[i]"

    def node_field(self, n: Node) -> str:
        cell = {Scope.ELEMENT: "i", Scope.BLOCK: "b", Scope.TENSOR: "0"}[n.scope]
        return f"((const {MEMORY.get(n.dtype, 'uint8_t')} *)({self.address(n)}))[{cell}]"

    def node_random(self, n: Node) -> str:
        position = "first + (uint32_t)i" if n.scope is Scope.ELEMENT else "first"
        return f"uniform(stream{n.attr}, {position})"

    def node_index(self, n: Node) -> str:
        return "first + (uint32_t)i"

    def node_reduce(self, n: Node) -> str:
        if n.scope is Scope.TENSOR:
            return f"place->partials[PARTIALS * place->blocks + {self.reductions.index(n)}]"
        if n.attr == "sum":
            return f"lane_sum(t{self.number[n]}, m)"
        x = self.number[n.args[0]]
        return f"extreme({'low' if n.attr == 'min' else 'high'}{x}, low{x}, high{x})"

    # addresses -----------------------------------------------------------------------------------

    def field(self, name: str) -> tuple[int, object]:
        at = [f.name for f in self.layout.fields].index(name)
        return at, self.layout.fields[at]

    def address(self, n: Node) -> str:
        """Where a field begins: an element field's part of this block, else the whole field."""
        name, from_source = n.attr  # type: ignore[misc]
        at, _ = self.field(name)
        begin = f"{'source' if from_source else 'payload'} + place->at[{at}]"
        if n.scope is Scope.ELEMENT:
            begin += f" + b * {element_nbytes(n.dtype, self.layout.block)}"
        return begin

    def target(self, sink: passes.Sink) -> str:
        at, _ = self.field(sink.name)
        return f"payload + place->at[{at}] + b * {element_nbytes(sink.node.dtype, self.layout.block)}"


def _register(n: Node) -> str:
    return REGISTER.get(n.dtype, "int32_t")


def _is_extreme(sink: passes.Sink) -> bool:
    return sink.kind == "reduce" and sink.node.attr != "sum"


STEPS: dict[type, Callable[..., None]] = {
    passes.Scalars: _Form.scalars,
    passes.Loop: _Form.run_loop,
    passes.Unpack: _Form.unpack,
    passes.Fold: _Form.fold,
    passes.Put: _Form.put_field,
    passes.Partial: _Form.partial,
}

SINKS: dict[str, tuple[Callable[..., None], Callable[..., None], Callable[..., None]]] = {
    "reduce": (_Form.before_reduce, _Form.in_reduce, _Form.nothing),
    "keep": (_Form.before_keep, _Form.in_keep, _Form.nothing),
    "field": (_Form.before_field, _Form.in_field, _Form.after_field),
    "store": (_Form.nothing, _Form.in_store, _Form.nothing),
    "accumulate": (_Form.nothing, _Form.in_accumulate, _Form.nothing),
}

NODES: dict[str, Callable[..., str]] = {
    "alu": _Form.node_alu,
    "cast": _Form.node_cast,
    "load": _Form.node_load,
    "field": _Form.node_field,
    "random": _Form.node_random,
    "index": _Form.node_index,
    "reduce": _Form.node_reduce,
}
