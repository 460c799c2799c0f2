"""C over blocks: a rule per step of a sweep, and per sink of its loops.

Every sweep of a form has a function over a group of blocks (`FORM_groupN`). Steps over elements run
block by block. The scalars of all blocks of the group are computed in one vectorised loop between
these steps: computed per block, the chain of divisions and roundings takes longer than the
elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from gradwire.lang import ir
from gradwire.lang.emit import c_rows
from gradwire.lang.emit.c_nodes import MEMORY, Writer, cell, register, stream_name
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
    Sweep,
    Unpack,
)

MAX_STREAMED_BLOCK = 4096  # values of a block that is decoded into L1, then streamed to memory


class Blocks(Writer):
    """Emits the function over a group of blocks for one sweep."""

    STEPS: ClassVar[dict[type, Callable[..., None]]]
    SINKS: ClassVar[dict[str, tuple[Callable[..., None], ...]]]
    prefetching: Loop | None = None
    prefetched: tuple[str, ...] = ()

    def emit(self, number: int, sweep: Sweep) -> str:
        self.open(
            f"INLINE void {self.program.form}_group{number}("
            "const Call *call, const Place *place, int64_t b0, const int count, const int m)"
        )
        self.put(c_rows.group_size(self.layout, sweep))
        self.arguments()
        self.plan_prefetch(sweep)
        for step in sweep.steps:
            self.STEPS[type(step)](self, step)
        self.close()
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
            self.prefetched = tuple(sorted(loads))

    def over_blocks(self, reads: Iterable[Node], vector: bool = False) -> None:
        """Open the loop over the group's blocks, with the scalars that it reads as locals."""
        if vector:
            self.lines.append("#pragma omp simd")
        self.open("for (int g = 0; g < count; g++)")
        self.put("const int64_t b = b0 + g;")
        self.put("const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);")
        for n in dict.fromkeys(reads):
            if n.scope is Scope.BLOCK:
                self.put(f"const {register(n)} {self.name(n)} = s{self.number[n]}_[g];")

    # steps ---------------------------------------------------------------------------------------

    def scalars(self, step: Scalars) -> None:
        of_blocks = dict.fromkeys(n for n in step.nodes if n.scope is Scope.BLOCK)
        if self.folding:
            for n in step.nodes:
                self.define(n)
            return
        for n in step.nodes:
            if n not in of_blocks:
                self.define(n)
        for n in of_blocks:
            self.put(f"{register(n)} s{self.number[n]}_[GROUP];")
        if of_blocks:
            reads = [a for n in of_blocks if n.op != "reduce" for a in n.args if a not in of_blocks]
            self.over_blocks(reads, vector=True)
            for n in of_blocks:
                self.define(n)
                self.put(f"s{self.number[n]}_[g] = {self.name(n)};")
            self.close()

    def recall(self, step: Recall) -> None:
        at = f"place->partials + {step.index} * place->blocks + b0"
        self.put(f"const float *s{self.number[step.node]}_ = {at};")

    def element_loop(self, loop: Loop) -> None:
        for sink in loop.sinks:
            self.declare(sink)
        if self.folding:
            self.loop_body(loop)
            return
        self.over_blocks(loop.operands)
        self.loop_body(loop)
        self.close()

    def loop_body(self, loop: Loop) -> None:
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
        if loop is self.prefetching:
            for target in self.prefetched:
                self.put(f"prefetch({target} + GROUP * BLOCK, m * sizeof *{target});")
        flag = self.guard(loop)
        if flag is not None:
            self.open(f"if ({self.name(flag)})")
        for sink in loop.sinks:
            self.SINKS[sink.kind][0](self, sink)
        extremes = self.extremes(loop)
        counts = [s.node for s in loop.sinks if s.kind == "reduce" and s.node.attr == "count"]
        for n in counts:
            self.put(f"int32_t count{self.number[n]} = 0;")
        clauses = "".join(f" reduction(min : low{x}) reduction(max : high{x})" for x in extremes)
        clauses += "".join(f" reduction(+ : count{self.number[n]})" for n in counts)
        for x in extremes:
            self.put(f"int32_t low{x} = INT32_MAX, high{x} = INT32_MIN;")
        drawn = self.streams_of(loop)
        for stream in drawn:
            self.put(f"uint32_t {stream}_weyl = (first + {stream}.low) * WEYL;")
            clauses += f" linear({stream}_weyl : WEYL)"
        self.lines.append(f"#pragma omp simd{clauses}")
        self.open("for (int i = 0; i < m; i++)")
        for n in loop.nodes:
            self.define(n)
        for x, operand in extremes.items():
            self.put(f"const int32_t o{x} = ordered({self.name(operand)});")
            self.put(f"low{x} = o{x} < low{x} ? o{x} : low{x};")
            self.put(f"high{x} = o{x} > high{x} ? o{x} : high{x};")
        for sink in loop.sinks:
            self.SINKS[sink.kind][1](self, sink)
        for stream in drawn:
            self.put(f"{stream}_weyl += WEYL;")
        self.close()
        for x in extremes:
            self.put(f"low{x}_[g] = low{x}, high{x}_[g] = high{x};")
        for sink in loop.sinks:
            self.SINKS[sink.kind][2](self, sink)
        if flag is not None:
            self.close()
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

    def streams_of(self, loop: Loop) -> list[str]:
        """The random streams that a loop uses: for random elements and for signs of rotations."""
        found = [n.attr for n in loop.nodes if isinstance(n.attr, ir.Stream)]
        for nodes, inverse in (([s.node for s in loop.sinks], False), (loop.operands, True)):
            turned = [n.attr for n in nodes if isinstance(n.attr, ir.Rotation)]
            found += [rotation.stream for rotation in turned if rotation.inverse is inverse]
        return [stream_name(s) for s in dict.fromkeys(found)]

    def extremes(self, loop: Loop) -> dict[int, Node]:
        """Operands of min and max by number; a min and a max of one operand share work."""
        operands = [
            s.element for s in loop.sinks if s.kind == "reduce" and s.node.attr in ("min", "max")
        ]
        return {self.number[x]: x for x in operands}

    def declare(self, sink: Sink) -> None:
        """Declare storage that outlives a loop over blocks."""
        n = sink.node
        if sink.kind == "keep":
            self.put(f"{cell(n)} a{self.number[n]}_[GROUP][BLOCK] __attribute__((aligned(64)));")
        elif sink.kind == "reduce" and n.attr in ("sum", "count"):
            self.put(f"float sum{self.number[n]}_[GROUP];")
        elif sink.kind == "rotate":
            self.put(f"float a{self.number[n]}_[GROUP][BLOCK] __attribute__((aligned(64)));")
        elif sink.kind == "key":
            self.put(f"uint32_t k{self.number[n]}_[GROUP][BLOCK + 16];")
        elif sink.kind == "reduce":
            x = self.number[n.args[0]]
            line = "  " * self.indent + f"int32_t low{x}_[GROUP], high{x}_[GROUP];"
            if line not in self.lines:
                self.lines.append(line)

    def unpack(self, step: Unpack) -> None:
        i = self.number[step.node]
        self.put(f"{cell(step.node)} a{i}_[GROUP][BLOCK + 64] __attribute__((aligned(64)));")
        if not self.folding:
            self.over_blocks([])
        if step.node.args:
            self.open_kept(step.node)
        else:
            self.put(f"const uint8_t *in{i} = {self.address(step.node)};")
        if step.node.dtype == "trit":
            self.put(f"unpack_trits(in{i}, a{i}_[g], m);")
        else:
            for width, at in planes(ir.BITS[step.node.dtype]):
                self.put(f"in{i} = unpack(in{i}, a{i}_[g], m, {width}, {at});")
        if step.node.args:
            self.close(f"}} else memset(a{i}_[g], 0, m * sizeof *a{i}_[g]);")
        if not self.folding:
            self.close()

    def open_kept(self, n: Node) -> None:
        """Open the branch that reads a block's kept codes at the cursor."""
        i = self.number[n]
        base, cursor = self.received(n)
        size = element_nbytes(n.dtype, self.layout.block)
        self.put(f"Cursor *cursor{i} = {cursor};")
        self.open(f"if (({self.address(n.args[0])})[b])")
        self.put(f"const uint8_t *in{i} = {base} + tail_{self.tail(n)}(place, 0)")
        self.put(f"    + cursor{i}->next++ * {size};")

    def received(self, n: Node) -> tuple[str, str]:
        """The payload that a field belongs to, and its cursor."""
        assert isinstance(n.attr, ir.FieldRef)
        if n.attr.source:
            return "source", "&place->cursors[k - own_before + 1]"
        return "payload", "&place->cursors[0]"

    def tail(self, n: Node) -> int:
        assert isinstance(n.attr, ir.FieldRef)
        return self.field(n.attr.name)

    def look_up(self, step: LookUp) -> None:
        i, codes = self.number[step.node], self.number[step.code]
        self.put(f"float a{i}_[GROUP][BLOCK] __attribute__((aligned(64)));")
        numbers = ", ".join(self.name(n) for n in step.numbers)
        self.put(f"const float t{i}[] = {{{numbers}}};")
        if not self.folding:
            self.over_blocks([])
        self.put(f"look_up(a{i}_[g], a{codes}_[g], m, t{i}, {len(step.numbers)});")
        if not self.folding:
            self.close()

    def rotate(self, step: Rotate) -> None:
        if not self.folding:
            self.over_blocks([])
        self.put(f"hadamard(a{self.number[step.node]}_[g], m);")
        if not self.folding:
            self.close()

    def fold(self, step: Fold) -> None:
        i = self.number[step.node]
        self.put(f"float a{i}_[GROUP][BLOCK] __attribute__((aligned(64)));")
        self.over_blocks(step.own.operands)
        self.folding = True
        self.put(f"for (int i = 0; i < m; i++) a{i}_[g][i] = -0.0f;")
        self.open("for (int k = 0; k < call->ranks; k++)")
        self.open("if (k == call->rank)")
        self.loop_body(step.own)
        self.close("} else {")
        self.indent += 1
        self.put("const int own_before = 0 <= call->rank && call->rank < k;")
        self.put("const uint8_t *source = place->row->source + call->distances[k - own_before];")
        again = [s for s in self.streams if s.source]
        for at, s in enumerate(again):
            peer = f"(k - own_before) * {len(again)} + {at}"
            self.put(f"const Stream {stream_name(s)} = place->peers[{peer}];")
        for inner in step.body:
            self.STEPS[type(inner)](self, inner)
        self.close()
        self.close()
        self.folding = False
        self.close()

    def put_field(self, step: Put) -> None:
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

    def partial(self, step: Partial) -> None:
        self.over_blocks([step.node])
        self.put(f"place->partials[{step.index} * place->blocks + b] = {self.name(step.node)};")
        self.close()

    # sinks: before a block's loop, in its body, after it -----------------------------------------

    def nothing(self, sink: Sink) -> None:
        """No code for a sink at this point."""

    def before_reduce(self, sink: Sink) -> None:
        if sink.node.attr == "sum":
            self.put(f"float t{self.number[sink.node]}[BLOCK] __attribute__((aligned(64)));")

    def in_reduce(self, sink: Sink) -> None:
        if sink.node.attr == "sum":
            self.put(f"t{self.number[sink.node]}[i] = {self.name(sink.node.args[0])};")
        elif sink.node.attr == "count":
            self.put(f"count{self.number[sink.node]} += {self.name(sink.node.args[0])};")

    def after_reduce(self, sink: Sink) -> None:
        i = self.number[sink.node]
        if sink.node.attr == "sum":
            self.put(f"sum{i}_[g] = tree_sum(t{i}, m);")
        elif sink.node.attr == "count":
            self.put(f"sum{i}_[g] = (float)count{i};")

    def in_rotate(self, sink: Sink) -> None:
        rotation, element = sink.node.attr, self.name(sink.element)
        assert isinstance(rotation, ir.Rotation)
        if not rotation.inverse:
            element = self.flipped(element, rotation)
        self.put(f"a{self.number[sink.node]}_[g][i] = {element};")

    def in_keep(self, sink: Sink) -> None:
        self.put(f"a{self.number[sink.node]}_[g][i] = {self.name(sink.node)};")

    def before_field(self, sink: Sink) -> None:
        i = self.number[sink.node]
        if sink.node.dtype in ir.CODES:
            self.put(f"{cell(sink.node)} c{i}[BLOCK + 8] __attribute__((aligned(64)));")
            self.put(f"memset(c{i} + m, 0, 8 * sizeof *c{i});")
        else:
            memory = MEMORY[sink.node.dtype]
            self.put(f"{memory} *restrict p{i} = ({memory} *)({self.target(sink)});")

    def in_field(self, sink: Sink) -> None:
        i, value = self.number[sink.node], self.name(sink.node)
        if sink.node.dtype in ir.CODES:
            self.put(f"c{i}[i] = ({cell(sink.node)}){value};")
        else:
            self.put(f"p{i}[i] = ({MEMORY[sink.node.dtype]}){value};")

    def after_field(self, sink: Sink) -> None:
        i = self.number[sink.node]
        if sink.node.dtype not in ir.CODES:
            return
        if sink.node.op == "keep":
            self.open(f"if ({self.name(sink.node.args[1])})")
            size = element_nbytes(sink.node.dtype, self.layout.block)
            tail = f"payload + tail_{self.field(sink.name)}(place, 0)"
            self.put(f"uint8_t *out{i} = {tail} + place->cursors[0].next++ * {size};")
        else:
            self.put(f"uint8_t *out{i} = {self.target(sink)};")
        self.pack(f"out{i}", f"c{i}", sink.node.dtype)
        if sink.node.op == "keep":
            self.close()

    def pack(self, out: str, codes: str, dtype: str) -> None:
        if dtype == "trit":
            self.put(f"pack_trits({out}, {codes}, m);")
            return
        for width, at in planes(ir.BITS[dtype]):
            self.put(f"{out} = pack({out}, {codes}, m, {width}, {at});")

    def in_store(self, sink: Sink) -> None:
        self.put(f"{sink.name}[i] = {self.name(sink.node)};")

    def in_accumulate(self, sink: Sink) -> None:
        assert sink.fold is not None
        self.put(f"a{self.number[sink.fold]}_[g][i] += {self.name(sink.node)};")
