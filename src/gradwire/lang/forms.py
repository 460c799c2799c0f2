"""The kernel forms, derived by composing the traces of a codec's encode and decode.

| form | reads | writes |
| --- | --- | --- |
| encode | values | payload |
| encode_ef | values, residual | payload of x = values + residual; residual = x - decoded |
| decode | payload | values = decoded * factor |
| decode_add | payload, values | values += decoded |
| decode_sum | values, peers' payloads | values = sum * factor |
| reduce_encode | values, peers' payloads | payload of x = sum * factor; values = decoded |
| reduce_encode_ef | the same, residual | also residual = (x - decoded) / factor |

`sum` adds, in rank order, the own values (plus the residual, in the _ef form) and the decoded
payloads of the peers; with rank -1, payloads only. `decoded` is `decode` traced on what `encode`
*stored*, after its casts, so it is bit for bit what a receiver gets. A residual that would become
non-finite keeps its old value, so a bad step never enters it.

Overflow. What fp16 cannot hold is stored as Inf, so that a GradScaler lowers its scale. It would do
so in vain if a residual were the reason: so in the _ef forms what is stored saturates, and the
residual keeps the rest; but if a codec stores the elements themselves as fp16, a *value* that fp16
cannot hold is taken for Inf there, whatever its residual.

If a codec selects elements, a form's patches write the selected elements and its stores the others;
a form that adds has no stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from gradwire.lang import ir, passes, shapes, verify
from gradwire.lang.codec import Codec
from gradwire.lang.ir import Node, Scope
from gradwire.lang.trace import Payload, Trace, Value, as_number, tracing

FORMS = (
    "encode", "encode_ef", "decode", "decode_add", "decode_sum",
    "reduce_encode", "reduce_encode_ef",
)  # fmt: skip
DEFAULT_BLOCK = 1024  # the block of codecs that do not call g.blocks(n)
FP16_END = 65520.0  # from here on, values round to Inf
ENTRIES_PER_BLOCK = 8  # expected, when the block size is chosen for a codec with a selection

# target -> (store or None, (patch, selection) or None)
Written = dict[str, tuple[Node | None, tuple[Node, Node] | None]]


@dataclass(frozen=True)
class Field:
    """One field of a payload.

    Attributes:
        name, dtype, scope: as given to `concat`.
        capacity: of a selection.
        flag: for kept codes, the name of the field that flags the kept blocks.
        shape: of a matrix.
    """

    name: str
    dtype: str
    scope: Scope
    capacity: ir.Size | None = None
    flag: str | None = None
    shape: ir.Shape | None = None

    @property
    def item_nbytes(self) -> int:
        """Bytes per number of tensor or block scope."""
        return (ir.BITS.get(self.dtype, 8) + 7) // 8


@dataclass(frozen=True)
class Forms:
    """A codec's programs for one dtype of values.

    Attributes:
        programs: form -> program.
        fields: in the order of `concat`.
        block: values per block.
        operators: names of the language's operators that the codec uses.
        table: the numbers of `ops.table`, passed to the kernels.
    """

    programs: dict[str, ir.Function]
    fields: tuple[Field, ...]
    block: int
    operators: tuple[str, ...]
    table: tuple[float, ...]

    @property
    def fused(self) -> bool:
        """Whether all forms can be compiled. If not, every target interprets them."""
        return all(program.fused for program in self.programs.values())


@lru_cache(maxsize=512)
def derive(codec: Codec, native: str) -> Forms:
    """Trace the codec, verify it, and compose its programs.

    `native` is the dtype of values: "fp32", "fp16" or "bf16". Raises `LanguageError`.
    """
    tracer = _Tracer(codec, native)
    composer = _Composer(tracer, native)
    programs = {p.form: p for p in composer.programs()}
    verify.gathered(codec, max(len(passes.gathered(p)) for p in programs.values()))
    return Forms(programs, tracer.fields, tracer.block, tuple(tracer.operators), tracer.table)


Codec._operators = lambda codec: derive(codec, "fp32").operators


class _Tracer:
    """Traces the codec's methods on given nodes, with the same stream numbers in every trace.

    The random numbers of decode are those of encode again, in the order of the calls: `drawn` has
    the number and the scope of each that every trace of encode has drawn.
    """

    def __init__(self, codec: Codec, native: str) -> None:
        self.codec = codec
        self.native = native
        self.block = DEFAULT_BLOCK
        self.drawn: frozenset[tuple[int, Scope]] | None = None
        self.operators: list[str] = []
        self.table: tuple[float, ...] = ()
        self.fields: tuple[Field, ...] = ()

    def encode(
        self, x: Node, latest: Node, again: bool = False, feedback: bool = False
    ) -> tuple[tuple[str, Node], ...]:
        """The stored fields of `x`; `again`: x is a sum of decoded payloads."""
        with tracing(Trace(self.native, feedback=feedback), self.codec) as trace:
            # Codec.encode_sum calls encode without `latest`, so call encode itself
            own = type(self.codec).encode_sum is not Codec.encode_sum
            encode = self.codec.encode_sum if again and own else self.codec.encode
            given = (Value(x), Value(latest)) if verify.takes_latest(encode) else (Value(x),)
            payload = encode(*given)
        verify.payload(self.codec, payload)
        assert isinstance(payload, Payload)
        stored = tuple((name, value.node) for name, value in payload.fields)
        fields = tuple(_field(name, n, dict(stored)) for name, n in stored)
        block = trace.block or _block(fields)
        if self.fields:
            verify.same(self.codec, (fields, block), (self.fields, self.block))
        self.fields = fields
        self.block = block
        verify.block(self.codec, self.block, any(f.capacity is not None for f in fields))
        drawn = verify.drawn(n for _, n in stored)
        self.drawn = drawn if self.drawn is None else self.drawn & drawn
        self.take_table(trace.table)
        self.operators = self.operators or trace.operators
        return stored

    def decode(self, fields: tuple[tuple[str, Node], ...], source: bool = False) -> Node:
        """The decoded elements of these fields; `source`: they are those of a fold's peer."""
        trace = Trace(self.native, block=self.block, source=source, table=self.table)
        with tracing(trace, self.codec):
            trace.uses("extract")
            elements = self.codec.decode(**{name: Value(n) for name, n in fields})
        verify.elements(self.codec, elements, {n for _, n in fields}, self.drawn or frozenset())
        self.take_table(trace.table)
        self.operators += [op for op in trace.operators if op not in self.operators]
        return as_number(elements.node)

    def take_table(self, table: tuple[float, ...]) -> None:
        """Record the table: all traces of a codec share one, but some may not use it."""
        verify.table(self.codec, table, self.table)
        self.table = self.table or table

    def received(self, source: bool) -> Node:
        """The decoded elements of the own payload or, with `source`, of a fold's peer."""
        nodes: dict[str, Node] = {}
        for f in self.fields:
            selection = next((n for n in nodes.values() if n.dtype == "selection"), None)
            below = [nodes[f.flag]] if f.flag else []
            if f.scope is Scope.SELECTION and f.dtype != "selection" and selection is not None:
                below = [selection]
            ref = ir.FieldRef(f.name, source, f.shape)
            nodes[f.name] = ir.node("field", below, ref, dtype=f.dtype, scope=f.scope)
        return self.decode(tuple(nodes.items()), source)


class _Composer:
    """Composes a codec's traces into programs."""

    def __init__(self, tracer: _Tracer, native: str) -> None:
        self.tracer = tracer
        self.native = native
        self.values = ir.node("load", attr="values", dtype=native, scope=Scope.ELEMENT)
        self.residual = ir.node("load", attr="residual", scope=Scope.ELEMENT)
        self.factor = ir.node("param", attr="factor")

    def programs(self) -> list[ir.Function]:
        plain = as_number(self.values)
        own = ir.alu("add", plain, self.residual)
        encoded = self.tracer.encode(plain, plain)
        if self.native != "fp16" and any(_is_half(n, plain) for _, n in encoded):
            fits = ir.alu("lt", ir.alu("abs", plain), ir.const(FP16_END))
            own = ir.alu("where", fits, own, ir.alu("mul", plain, ir.const(math.inf)))
        with_residual = self.tracer.encode(own, plain, feedback=True)
        received, peers = self.tracer.received(False), self.tracer.received(True)
        mean, mean_ef = self.mean(plain, peers), self.mean(own, peers)
        reduced = self.tracer.encode(mean, mean, again=True)
        reduced_ef = self.tracer.encode(mean_ef, mean_ef, again=True, feedback=True)

        def times(v: Node) -> Node:
            return ir.alu("mul", v, self.factor)

        def feedback(error: Node) -> Node:
            return ir.alu("div", error, self.factor)

        return [
            self.program("encode", encoded),
            self.program("encode_ef", with_residual, self.error(own, with_residual)),
            self.program("decode", (), self.result(received, times)),
            self.program("decode_add", (), self.sum(plain, received)),
            self.program("decode_sum", (), {"values": (self.out(mean), None)}),
            self.program("reduce_encode", reduced, self.result(self.tracer.decode(reduced))),
            self.program(
                "reduce_encode_ef",
                reduced_ef,
                self.result(self.tracer.decode(reduced_ef))
                | self.error(mean_ef, reduced_ef, feedback),
            ),
        ]

    def program(
        self, form: str, fields: tuple[tuple[str, Node], ...], written: Written | None = None
    ) -> ir.Function:
        written = written or {}
        stores = tuple((t, n) for t, (n, _) in written.items() if n is not None)
        patches = tuple((t, *patch) for t, (_, patch) in written.items() if patch is not None)
        return ir.Function(form, stores, fields, self.tracer.block, patches)

    def mean(self, own: Node, peers: Node) -> Node:
        args = (own, *peers.args) if peers.op == "scatter" else (own, peers)
        return ir.alu("mul", ir.node("fold", args, scope=Scope.ELEMENT), self.factor)

    def result(self, decoded: Node, change: Callable[[Node], Node] = lambda v: v) -> Written:
        """values = change(decoded)."""
        if decoded.op != "scatter":
            return {"values": (self.out(change(decoded)), None)}
        entries, selection = decoded.args
        nothing = ir.node("const", attr=0.0, scope=Scope.ELEMENT)
        entries = self.out(change(entries), Scope.SELECTION)
        return {"values": (self.out(nothing), (entries, selection))}

    def sum(self, own: Node, decoded: Node) -> Written:
        """values = own + decoded."""
        if decoded.op != "scatter":
            return {"values": (self.out(ir.alu("add", own, decoded)), None)}
        entries, selection = decoded.args
        total = ir.alu("add", _gather(own, selection), entries)
        return {"values": (None, (self.out(total, Scope.SELECTION), selection))}

    def error(
        self,
        x: Node,
        stored: tuple[tuple[str, Node], ...],
        change: Callable[[Node], Node] = lambda v: v,
    ) -> Written:
        """residual = change(x - decoded) where that is finite."""
        decoded = self.tracer.decode(stored)

        def kept(error: Node, residual: Node) -> Node:
            error = change(error)
            return ir.alu("where", ir.alu("isfinite", error), error, residual)

        if decoded.op != "scatter":
            return {"residual": (kept(ir.alu("sub", x, decoded), self.residual), None)}
        entries, selection = decoded.args
        error = ir.alu("sub", _gather(x, selection), entries)
        patch = (kept(error, _gather(self.residual, selection)), selection)
        return {"residual": (kept(x, self.residual), patch)}

    def out(self, x: Node, scope: Scope = Scope.ELEMENT) -> Node:
        """Rounded to the dtype of values."""
        rounding = "stored" if self.native == "fp32" else "nearest"
        return ir.node("cast", (x,), rounding, dtype=self.native, scope=scope)


def _is_half(stored: Node, x: Node) -> bool:
    """Whether an element of x itself, not scaled by another number, is stored as fp16."""
    if stored.op != "cast" or stored.dtype != "fp16":
        return False
    chosen = [stored.args[0]]
    for n in chosen:
        made_of: tuple[Node, ...] = ()
        if n.op in ("gather", "reduce"):
            made_of = n.args[:1]
        elif n.attr == "where":
            made_of = n.args[1:]
        elif n.attr == "mul" and any(a.op == "const" for a in n.args):
            made_of = n.args
        chosen += [a for a in made_of if a not in chosen]
    return x in chosen


def _gather(x: Node, selection: Node) -> Node:
    return ir.node("gather", (x, selection), scope=Scope.SELECTION)


def _field(name: str, n: Node, stored: dict[str, Node]) -> Field:
    if n.op == "select":
        assert isinstance(n.attr, ir.Size)
        return Field(name, n.dtype, n.scope, capacity=n.attr)
    if n.op == "keep":
        flag = next((other for other, node in stored.items() if node is n.args[1]), None)
        return Field(name, n.dtype, n.scope, flag=flag)
    if n.scope is Scope.MATRIX:
        return Field(name, n.dtype, n.scope, shape=shapes.shape_of(n))
    return Field(name, n.dtype, n.scope)


def _block(fields: tuple[Field, ...]) -> int:
    """The block of a codec that sets none: positions cost least with a few entries per block."""
    fraction = next((f.capacity.fraction for f in fields if f.capacity is not None), None)
    if fraction is None:
        return DEFAULT_BLOCK
    return int(2 ** min(max(round(math.log2(ENTRIES_PER_BLOCK / max(fraction, 1e-6))), 8), 14))
