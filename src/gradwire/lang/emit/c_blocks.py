"""C over blocks: a rule `step_CLASS` per step of a sweep, and `sink_KIND` per sink of its loops.

Every sweep of a form has a function over a group of blocks (`FORM_groupN`). Steps over elements run
block by block. The scalars of all blocks of the group are computed in one vectorised loop between
these steps: computed per block, the chain of divisions and roundings takes longer than the
elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from gradwire.lang import ir
from gradwire.lang.emit import c_loops, c_rows, stream_name
from gradwire.lang.emit.c_nodes import EXTREMES, MEMORY, Writer, cell, register
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import element_nbytes, planes
from gradwire.lang.sweeps import (
    Fold,
    LookUp,
    Loop,
    Partial,
    Put,
    Recall,
    Rotate,
    Scalars,
    Sink,
    Step,
    Sweep,
    Unpack,
)

MAX_STREAMED_BLOCK = 4096  # values of a block that is decoded into L1, then streamed to memory


class Blocks(Writer):
    """Emits the function over a group of blocks for one sweep.

    A rule of a sink is an iterator: what it puts before its `yield`s stands where storage is
    declared, before a block's loop, in its body, after it.
    """

    prefetching: Loop | None = None
    prefetched: tuple[str, ...] = ()  # addresses in the next group

    def emit(self, number: int, sweep: Sweep) -> str:
        with self.braces(
            f"INLINE void {self.program.form}_group{number}("
            "const Call *call, const Place *place, int64_t b0, const int count, const int m)"
        ):
            self.put(c_rows.group_size(self.layout, sweep))
            self.arguments()
            self.plan_prefetch(sweep)
            for step in sweep.steps:
                self.step(step)
        return "\n".join([*self.lines, ""])

    def plan_prefetch(self, sweep: Sweep) -> None:
        """Prefetch in the last loop if the CPU does not detect a sequential stream of loads.

        It does not if a sweep has several loops, of which only the first loads, unless it takes one
        block at a time. Nor does it if a loop skips the blocks whose codes are not kept.
        """
        loops = sweep.loops
        skips = any(sink.node.op == "keep" for loop in loops for sink in loop.sinks)
        if (len(loops) > 1 or skips) and c_rows.group(self.layout, sweep) > 1:
            self.prefetching = loops[-1]
            loads = {str(n.attr) for loop in loops for n in loop.nodes if n.op == "load"}
            # A group's last blocks are read soon after its first, unless a fold lies between.
            late = "" if any(isinstance(s, Fold) for s in sweep.steps) else " + GROUP / 4"
            self.prefetched = tuple(f"{load} + (GROUP{late}) * BLOCK" for load in sorted(loads))

    @contextmanager
    def over_blocks(self, reads: Iterable[Node] = (), vector: bool = False) -> Iterator[None]:
        """The loop over the group's blocks, with the scalars that it reads as locals; a fold is in
        one already."""
        if self.folding:
            yield
            return
        if vector:
            self.lines.append("#pragma omp simd")
        with self.braces("for (int g = 0; g < count; g++)"):
            self.put("const int64_t b = b0 + g;")
            self.put("const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);")
            for n in dict.fromkeys(reads):
                if n.scope is Scope.BLOCK:
                    self.put(f"const {register(n)} {self.name(n)} = s{self.number[n]}_[g];")
            yield

    # steps ---------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Put a step, by the rule of its class."""
        getattr(self, f"step_{type(step).__name__.lower()}")(step)

    def step_scalars(self, step: Scalars) -> None:
        blocks = dict.fromkeys(n for n in step.nodes if n.scope is Scope.BLOCK and not self.folding)
        for n in step.nodes:
            if n not in blocks:
                self.define(n)
        for n in blocks:
            self.put(f"{register(n)} s{self.number[n]}_[GROUP];")
        if blocks:
            reads = [a for n in blocks if n.op != "reduce" for a in n.args if a not in blocks]
            with self.over_blocks(reads, vector=True):
                for n in blocks:
                    self.define(n)
                    self.put(f"s{self.number[n]}_[g] = {self.name(n)};")

    def step_recall(self, step: Recall) -> None:
        at = f"place->partials + {step.index} * place->blocks + b0"
        self.put(f"const float *s{self.number[step.node]}_ = {at};")

    def step_loop(self, loop: Loop) -> None:
        sinks = self.declared(loop)
        with self.over_blocks(loop.operands):
            self.loop_body(loop, sinks)

    def declared(self, loop: Loop) -> list[Iterator[None]]:
        """The rules of a loop's sinks, after the storage that outlives the loop over blocks."""
        sinks = [getattr(self, f"sink_{sink.kind}")(sink) for sink in loop.sinks]
        c_loops.advance(sinks)
        return sinks

    def loop_body(self, loop: Loop, sinks: list[Iterator[None]]) -> None:
        """The loop over the elements of one block."""
        self.loop = loop
        self.arrays(loop)
        touches = any(n.op == "load" for n in loop.nodes) or loop is self.prefetching
        fresh = self.program.form == "decode" and self.layout.block <= MAX_STREAMED_BLOCK
        fresh = fresh and any(s.kind == "store" for s in loop.sinks)
        if fresh:
            self.streamed_memory()
        elif touches or any(s.kind == "store" for s in loop.sinks):
            self.memory(" + b * BLOCK")
        alone, asked = c_loops.sums_alone(self, loop), loop is self.prefetching
        for address in self.prefetched if asked and not alone else ():
            self.put(f"PREFETCH({address}, m);")
        flag = self.guard(loop)
        with nullcontext() if flag is None else self.braces(f"if ({self.name(flag)})"):
            rules = dict(zip(loop.sinks, sinks, strict=True))
            for piece in c_loops.pieces(loop) if asked else [loop]:
                self.loop = piece
                parts = [rules.get(s) or self.sink_pass(s) for s in piece.sinks]
                c_loops.advance(parts)
                if alone:
                    self.put(f"const int left = m == BLOCK ? BLOCK / {c_loops.WAYS} : m;")
                    with self.braces("if (m == BLOCK)"):
                        c_loops.over_ways(self, loop, self.prefetched if asked else ())
                with self.braces("if (m != BLOCK)") if alone else nullcontext():
                    c_loops.over_elements(self, piece, parts)
                c_loops.advance(parts)
        if fresh:
            self.put("if (call->large) past_cache(to, fresh, m * sizeof *to);")
        self.loop = None

    def guard(self, loop: Loop) -> Node | None:
        """The flag that guards a loop whose only sink stores kept codes."""
        stored = [s.node for s in loop.sinks if s.kind == "field" and s.node.op == "keep"]
        return stored[0].args[1] if len(stored) == len(loop.sinks) == 1 else None

    def arrays(self, loop: Loop) -> None:
        """Pointers to the elements that earlier steps stored in arrays."""
        for n in dict.fromkeys(loop.operands):
            if n.scope is Scope.ELEMENT and n.op != "const" and n not in loop.computes:
                self.put(f"const {cell(n)} *restrict a{self.number[n]} = a{self.number[n]}_[g];")

    def step_unpack(self, step: Unpack) -> None:
        n, i = step.node, self.number[step.node]
        self.put(f"{cell(n)} a{i}_[GROUP][BLOCK + 64] __attribute__((aligned(64)));")
        with self.over_blocks():
            if not n.args:
                self.put(f"const uint8_t *in{i} = {self.address(n)};")
                self.unpacked(n)
                return
            base, cursor = self.received(n)
            size = element_nbytes(n.dtype, self.layout.block)
            self.put(f"Cursor *cursor{i} = {cursor};")
            otherwise = f"}} else memset(a{i}_[g], 0, m * sizeof *a{i}_[g]);"
            with self.braces(f"if (({self.address(n.args[0])})[b])", otherwise):
                self.put(f"const uint8_t *in{i} = {base} + tail_{self.tail(n)}(place, 0)")
                self.put(f"    + cursor{i}->next++ * {size};")
                self.unpacked(n)

    def unpacked(self, n: Node) -> None:
        i = self.number[n]
        if n.dtype == "trit":
            self.put(f"unpack_trits(in{i}, a{i}_[g], m);")
            return
        for width, at in planes(ir.BITS[n.dtype]):
            self.put(f"in{i} = unpack(in{i}, a{i}_[g], m, {width}, {at});")

    def received(self, n: Node) -> tuple[str, str]:
        """The payload that a field belongs to, and its cursor."""
        assert isinstance(n.attr, ir.FieldRef)
        if n.attr.source:
            return "source", "&place->cursors[k - own_before + 1]"
        return "payload", "&place->cursors[0]"

    def tail(self, n: Node) -> int:
        assert isinstance(n.attr, ir.FieldRef)
        return self.field(n.attr.name)

    def step_lookup(self, step: LookUp) -> None:
        i, codes = self.number[step.node], self.number[step.code]
        self.put(f"float a{i}_[GROUP][BLOCK] __attribute__((aligned(64)));")
        numbers = ", ".join(self.name(n) for n in step.numbers)
        self.put(f"const float t{i}[] = {{{numbers}}};")
        with self.over_blocks():
            self.put(f"look_up(a{i}_[g], a{codes}_[g], m, t{i}, {len(step.numbers)});")

    def step_rotate(self, step: Rotate) -> None:
        with self.over_blocks():
            self.put(f"hadamard(a{self.number[step.node]}_[g], m);")

    def step_fold(self, step: Fold) -> None:
        i = self.number[step.node]
        self.put(f"float a{i}_[GROUP][BLOCK] __attribute__((aligned(64)));")
        with self.over_blocks(step.own.operands):
            self.folding = True
            self.put(f"for (int i = 0; i < m; i++) a{i}_[g][i] = -0.0f;")
            with self.braces("for (int k = 0; k < call->ranks; k++)"):
                with self.braces("if (k == call->rank)"):
                    self.loop_body(step.own, self.declared(step.own))
                with self.braces("else"):
                    self.peer(step)
            self.folding = False

    def peer(self, step: Fold) -> None:
        """Add the decoded payload of a peer."""
        self.put("const int own_before = 0 <= call->rank && call->rank < k;")
        self.put("const uint8_t *source = place->row->source + call->distances[k - own_before];")
        again = [s for s in self.streams if s.source]
        for at, s in enumerate(again):
            peer = f"(k - own_before) * {len(again)} + {at}"
            self.put(f"const Stream {stream_name(s)} = place->peers[{peer}];")
        for inner in step.body:
            self.step(inner)

    def step_put(self, step: Put) -> None:
        at = self.field(step.name)
        f = self.layout.fields[at]
        memory = MEMORY.get(f.dtype, "uint8_t")
        target = f"({memory} *)(payload + place->at[{at}])"
        if f.scope is Scope.TENSOR:
            self.put(f"if (b0 == 0) *{target} = ({memory}){self.name(step.node)};")
            return
        self.put(f"{memory} *restrict at{at} = {target} + b0;")
        with self.over_blocks([step.node], vector=True):
            self.put(f"at{at}[g] = ({memory}){self.name(step.node)};")

    def step_partial(self, step: Partial) -> None:
        with self.over_blocks([step.node]):
            self.put(f"place->partials[{step.index} * place->blocks + b] = {self.name(step.node)};")

    # sinks ---------------------------------------------------------------------------------------

    def sink_reduce(self, sink: Sink) -> Iterator[None]:
        n, i, x = sink.node, self.number[sink.node], self.number[sink.node.args[0]]
        if n.attr in ("sum", "count"):
            self.put(f"float sum{i}_[GROUP];")
        else:  # a min and a max of one operand share it
            for kind, _ in self.parts(sink.element):
                line = "  " * self.indent + f"{EXTREMES[kind][0]} {kind}{x}_[GROUP];"
                self.lines += [line] if line not in self.lines else []
        yield
        if n.attr == "sum":
            self.put(f"float t{i}[BLOCK] __attribute__((aligned(64)));")
        yield
        if n.attr == "sum":
            self.put(f"t{i}[i] = {self.name(n.args[0])};")
        elif n.attr == "count":
            self.put(f"count{i} += {self.name(n.args[0])};")
        yield
        if n.attr == "sum":
            assert self.loop is not None
            left = "left" if c_loops.sums_alone(self, self.loop) else "m"
            self.put(f"sum{i}_[g] = tree_sum(t{i}, {left});")
        elif n.attr == "count":
            self.put(f"sum{i}_[g] = (float)count{i};")

    def sink_rotate(self, sink: Sink) -> Iterator[None]:
        i, rotation = self.number[sink.node], sink.node.attr
        assert isinstance(rotation, ir.Rotation)
        self.put(f"float a{i}_[GROUP][BLOCK] __attribute__((aligned(64)));")
        yield
        yield
        element = self.name(sink.element)
        if not rotation.inverse:
            element = self.flipped(element, rotation)
        self.put(f"a{i}_[g][i] = {element};")

    def sink_keep(self, sink: Sink) -> Iterator[None]:
        n, i = sink.node, self.number[sink.node]
        self.put(f"{cell(n)} a{i}_[GROUP][BLOCK] __attribute__((aligned(64)));")
        yield
        yield
        self.put(f"a{i}_[g][i] = {self.name(n)};")

    def sink_pass(self, sink: Sink) -> Iterator[None]:
        """What a piece of a loop passes on: not a code's byte, which later pieces would widen."""
        n, i = sink.node, self.number[sink.node]
        self.put(f"{register(n)} a{i}[BLOCK] __attribute__((aligned(64)));")
        yield
        self.put(f"a{i}[i] = {self.drawn(n) if n.op == 'random' else self.name(n)};")
        yield

    def sink_field(self, sink: Sink) -> Iterator[None]:
        n, i = sink.node, self.number[sink.node]
        yield
        if n.dtype not in ir.CODES:
            memory = MEMORY[n.dtype]
            self.put(f"{memory} *restrict p{i} = ({memory} *)({self.target(sink)});")
            yield
            self.put(f"p{i}[i] = ({memory}){self.name(n)};")
            return
        narrow = c_loops.is_narrowed(n)
        kind = "uint8_t" if narrow else cell(n)
        self.put(f"{kind} c{i}[BLOCK + 8] __attribute__((aligned(64)));")
        self.put(f"memset(c{i} + m, 0, 8 * sizeof *c{i});")
        yield
        self.put(f"{f'CODE(c{i}, part{i})' if narrow else f'c{i}[i]'} = {self.name(n)};")
        yield
        if n.op != "keep":
            self.put(f"uint8_t *out{i} = {self.target(sink)};")
            self.pack(f"out{i}", f"c{i}", n.dtype)
            return
        with self.braces(f"if ({self.name(n.args[1])})"):
            size = element_nbytes(n.dtype, self.layout.block)
            tail = f"payload + tail_{self.field(sink.name)}(place, 0)"
            self.put(f"uint8_t *out{i} = {tail} + place->cursors[0].next++ * {size};")
            self.pack(f"out{i}", f"c{i}", n.dtype)

    def pack(self, out: str, codes: str, dtype: str) -> None:
        if dtype == "trit":
            self.put(f"pack_trits({out}, {codes}, m);")
            return
        for width, at in planes(ir.BITS[dtype]):
            self.put(f"{out} = pack({out}, {codes}, m, {width}, {at}, {ir.BITS[dtype]});")

    def sink_store(self, sink: Sink) -> Iterator[None]:
        yield
        yield
        self.write(sink)

    sink_accumulate = sink_store

    def write(self, sink: Sink) -> None:
        """Store an element in values or residual, or add it to a fold."""
        to = f"{sink.name}[i] =" if sink.fold is None else f"a{self.number[sink.fold]}_[g][i] +="
        self.put(f"{to} {self.name(sink.node)};")
