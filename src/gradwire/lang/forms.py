"""The kernel forms, derived from a codec's two traces by composing them: no codec writes them.

| form | reads | writes |
| --- | --- | --- |
| encode | values | payload |
| encode_ef | values, residual | payload of x = values + residual; residual = x - decoded |
| decode | payload | values = decoded * factor |
| decode_add | payload, values | values += decoded |
| decode_sum | peers' payloads, values | values = sum * factor |
| reduce_encode | values, peers' payloads | payload of x = sum * factor; values = decoded |
| reduce_encode_ef | the same, residual | also residual = (x - decoded) / factor |

`sum` runs over the ranks in their order: own values (plus residual, in the _ef form) and what the
peers' payloads decode to; with rank -1, over payloads alone. `decoded` is `decode` traced on what `encode` *stored*, after its casts,
so it is bit for bit what a receiver gets. A residual that would not be finite keeps its old value:
a bad step never enters it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gradwire.lang import ir, verify
from gradwire.lang.codec import Codec
from gradwire.lang.trace import Payload, Trace, Value, as_number, tracing

FORMS = (
    "encode", "encode_ef", "decode", "decode_add", "decode_sum", "reduce_encode", "reduce_encode_ef",
)  # fmt: skip
PACKING_BLOCK = 1024  # of codecs that do not call g.blocks(n)


@dataclass(frozen=True)
class Forms:
    """A codec's programs for one dtype of values.

    Attributes:
        programs: form -> program.
        fields: (name, dtype, scope) in wire order.
        block: values per block.
        operators: names of the language's operators the codec uses.
    """

    programs: dict[str, ir.Program]
    fields: tuple[tuple[str, str, ir.Scope], ...]
    block: int
    operators: tuple[str, ...]


@lru_cache(maxsize=512)
def derive(codec: Codec, native: str) -> Forms:
    """Trace the codec, verify it, and compose its programs.

    `native` is the dtype of values: "fp32", "fp16" or "bf16". Raises `LanguageError`.
    """
    values = ir.node("load", attr="values", dtype=native, scope=ir.Scope.ELEMENT)
    residual = ir.node("load", attr="residual", scope=ir.Scope.ELEMENT)
    factor = ir.node("param", attr="factor")
    tracer = _Tracer(codec, native)

    plain = as_number(values)
    stored = tracer.encode(plain)
    fields = tuple((name, n.dtype, n.scope) for name, n in stored)
    received = tracer.decode(_receive(fields, source=False))
    peers = tracer.decode(_receive(fields, source=True))
    own = ir.alu("add", plain, residual)

    def kept(error: ir.Node) -> ir.Node:
        return ir.alu("where", ir.alu("isfinite", error), error, residual)

    def summed(own: ir.Node) -> ir.Node:
        total = ir.node("fold", (own, peers), scope=ir.Scope.ELEMENT)
        return ir.alu("mul", total, factor)

    def program(form: str, x: ir.Node | None = None, **stores: ir.Node) -> ir.Program:
        encoded = () if x is None else tracer.encode(x)
        return ir.Program(form, tuple(stores.items()), encoded, tracer.block)

    def sent(x: ir.Node) -> ir.Node:
        return tracer.decode(tracer.encode(x))

    def out(x: ir.Node) -> ir.Node:
        rounding = "stored" if native == "fp32" else "nearest"
        return ir.node("cast", (x,), rounding, dtype=native, scope=ir.Scope.ELEMENT)

    mean, mean_ef = summed(plain), summed(own)
    error = ir.alu("sub", own, sent(own))
    error_ef = ir.alu("div", ir.alu("sub", mean_ef, sent(mean_ef)), factor)
    programs = {
        p.form: p
        for p in (
            program("encode", plain),
            program("encode_ef", own, residual=kept(error)),
            program("decode", values=out(ir.alu("mul", received, factor))),
            program("decode_add", values=out(ir.alu("add", plain, received))),
            program("decode_sum", values=out(mean)),
            program("reduce_encode", mean, values=out(sent(mean))),
            program(
                "reduce_encode_ef", mean_ef, values=out(sent(mean_ef)), residual=kept(error_ef)
            ),
        )
    }
    return Forms(programs, fields, tracer.block, tuple(tracer.operators))


def _receive(
    fields: tuple[tuple[str, str, ir.Scope], ...], source: bool
) -> tuple[tuple[str, ir.Node], ...]:
    return tuple(
        (name, ir.node("field", attr=ir.FieldRef(name, source), dtype=dtype, scope=scope))
        for name, dtype, scope in fields
    )


class _Tracer:
    """Runs the codec's methods on given nodes; every run numbers its random streams alike."""

    def __init__(self, codec: Codec, native: str) -> None:
        self.codec = codec
        self.native = native
        self.block = PACKING_BLOCK
        self.streams = 0
        self.operators: list[str] = []

    def encode(self, x: ir.Node) -> tuple[tuple[str, ir.Node], ...]:
        with tracing(Trace(self.native)) as trace:
            payload = self.codec.encode(Value(x))
        verify.payload(self.codec, payload)
        assert isinstance(payload, Payload)
        self.block = trace.block or PACKING_BLOCK
        self.streams = trace.streams
        self.operators = self.operators or trace.operators
        return tuple((name, value.node) for name, value in payload.fields)

    def decode(self, fields: tuple[tuple[str, ir.Node], ...]) -> ir.Node:
        trace = Trace(self.native, block=self.block, streams=self.streams)
        with tracing(trace):
            trace.uses("extract")
            elements = self.codec.decode(**{name: Value(n) for name, n in fields})
        verify.elements(self.codec, elements, allowed={n for _, n in fields})
        self.operators += [op for op in trace.operators if op not in self.operators]
        return as_number(elements.node)
