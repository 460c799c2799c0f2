"""C over the entries of a selection, which a sweep stages, then stores, and which decoding visits.
Also the tables of rules per step and sink."""

from __future__ import annotations

from gradwire.lang import ir, passes
from gradwire.lang.emit.c_blocks import Blocks
from gradwire.lang.emit.c_nodes import MEMORY, code_cell
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import RUN, planes, run_nbytes
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
    Stage,
    Step,
    Unpack,
    Visit,
)


class GroupRows(Blocks):
    """Adds the steps and sinks of selections."""

    # steps ---------------------------------------------------------------------------------------

    def stage(self, step: Stage) -> None:
        """Stage the elements of this group that may be selected, with the gathered values."""
        key = f"k{self.number[step.node]}"
        self.over_blocks(step.loop.operands)
        self.enter_sparse(step.loop)
        self.arrays(step.loop)
        self.memory(" + b * BLOCK")
        self.put("Staging *staging = place->staging;")
        self.put(f"const uint32_t *restrict keys = {key}_[g];")
        self.open("for (int i0 = 0; i0 < m; i0 += 16)")
        self.put("if (!any_above(keys + i0, staging->threshold)) continue;")
        self.open("for (int i = i0; i < i0 + 16; i++)")
        self.put("if (keys[i] <= staging->threshold) continue;")
        self.put("const int64_t e = staging->count++;")
        self.put("column(staging, 0)[e] = (uint32_t)(b * BLOCK + i);")
        self.put("column(staging, 1)[e] = keys[i];")
        for n in step.loop.nodes:
            self.define(n)
        for sink in step.loop.sinks:
            at = 2 + self.gathered.index(sink.node)
            self.put(f"column(staging, {at})[e] = bits_of({self.name(sink.element)});")
        self.close()
        self.close()
        ranked = int(passes.is_ranked(self.program))
        self.put(f"trim(staging, {2 + len(self.gathered)}, {ranked});")
        self.close()
        self.leave_sparse()

    def visit(self, step: Visit) -> None:
        """Process every entry of this block in a payload."""
        base, cursor = self.received(step.selection)
        if not self.folding:
            self.over_blocks(step.loop.operands)
        self.enter_sparse(step.loop)
        self.memory(" + b * BLOCK")
        self.put(f"Cursor *cursor = {cursor};")
        self.put(f"const int64_t count = count_at(cursor, {self.address(step.selection)}, b);")
        for n in (step.selection, *step.loop.nodes):
            if n.op == "field" and n.scope is Scope.SELECTION:
                at = self.tail(n)
                self.put(f"const uint8_t *tail{at} = {base} + tail_{at}(place, cursor->entries);")
        self.put("int before = -1;")
        self.open("for (int64_t e = cursor->next; e < cursor->next + count; e++)")
        bits = ir.BITS[self.layout.position]
        positions = f"tail{self.tail(step.selection)}"
        self.put(f"const int i = (int)code_at({positions}, e, cursor->entries, {bits});")
        self.put("if (i <= before || i >= m) { fail(call, place->row); break; }")
        self.put("before = i;")
        for n in step.loop.nodes:
            self.define(n)
        for sink in step.loop.sinks:
            if sink.fold is not None:
                self.put(f"a{self.number[sink.fold]}_[g][i] += {self.name(sink.node)};")
            else:
                self.put(f"{sink.name}[i] = {self.name(sink.node)};")
        self.close()
        self.put("cursor->next += count;")
        if not self.folding:
            self.close()
        self.leave_sparse()

    def enter_sparse(self, loop: Loop) -> None:
        self.loop, self.sparse = loop, True

    def leave_sparse(self) -> None:
        self.loop, self.sparse = None, False

    # entries -------------------------------------------------------------------------------------

    def emit_run(self, steps: tuple[Step, ...]) -> str:
        """The function that stores a run of at most RUN entries, after `done` earlier entries."""
        scalars, loop = steps
        assert isinstance(scalars, Scalars)
        assert isinstance(loop, Loop)
        self.open(
            f"INLINE void {self.program.form}_run(const Call *call, const Place *place, "
            "const Run *run, int64_t done, const int m, int64_t entries)"
        )
        self.arguments()
        self.memory("")
        for n in scalars.nodes:
            self.define(n)
        self.enter_sparse(loop)
        self.positions()
        fields = [s for s in loop.sinks if s.kind == "field"]
        for sink in fields:
            at, dtype = self.field(sink.name), sink.node.dtype
            start = f"payload + tail_{at}(place, entries) + done / RUN * {run_nbytes(dtype, RUN)}"
            if dtype in ir.CODES:
                self.put(f"{code_cell(dtype)} c{at}[RUN + 8] = {{0}};")
                self.put(f"uint8_t *out{at} = {start};")
            else:
                self.put(f"{MEMORY[dtype]} *restrict out{at} = ({MEMORY[dtype]} *)({start});")
        self.open("for (int e = 0; e < m; e++)")
        self.put("const int64_t i = run->index[e];")
        for n in loop.nodes:
            self.define(n)
        for sink in loop.sinks:
            if sink.kind == "patch":
                self.put(f"{sink.name}[i] = {self.name(sink.node)};")
            elif sink.node.dtype in ir.CODES:
                code = f"({code_cell(sink.node.dtype)}){self.name(sink.node)}"
                self.put(f"c{self.field(sink.name)}[e] = {code};")
            else:
                memory = MEMORY[sink.node.dtype]
                self.put(f"out{self.field(sink.name)}[e] = ({memory}){self.name(sink.node)};")
        self.close()
        for sink in fields:
            if sink.node.dtype in ir.CODES:
                at = self.field(sink.name)
                self.pack(f"out{at}", f"c{at}", sink.node.dtype)
        self.leave_sparse()
        self.close()
        return "\n".join([*self.lines, ""])

    def positions(self) -> None:
        """Pack the positions of the entries in their blocks, from low and high bytes."""
        bits = ir.BITS[self.layout.position]
        at = next(i for i, f in enumerate(self.layout.fields) if f.capacity is not None)
        size = run_nbytes(self.layout.position, RUN)
        self.put(f"uint8_t *at = payload + tail_{at}(place, entries) + done / RUN * {size};")
        self.put("uint8_t low[RUN + 8] = {0}, high[RUN + 8] = {0};")
        self.open("for (int e = 0; e < m; e++)")
        self.put("const uint32_t position = run->index[e] % BLOCK;")
        self.put("low[e] = (uint8_t)position, high[e] = (uint8_t)(position >> 8);")
        self.close()
        for width, bit in planes(bits):
            half, shift = ("low", bit) if bit < 8 else ("high", bit - 8)
            self.put(f"at = pack(at, {half}, m, {width}, {shift});")

    # sinks ---------------------------------------------------------------------------------------

    def before_key(self, sink: Sink) -> None:
        key = f"k{self.number[sink.node]}"
        self.put(f"uint32_t *restrict {key} = {key}_[g];")
        self.put(f"memset({key} + m, 0, 64);")

    def in_key(self, sink: Sink) -> None:
        n = sink.node
        conditions = [self.name(a) for a in n.args if a.dtype == "bool"]
        keys = [f"key_of({self.name(a)})" for a in n.args if a.dtype != "bool"]
        key = keys[0] if keys else "1u"
        chosen = f"{conditions[0]} ? {key} : 0u" if conditions else key
        self.put(f"k{self.number[n]}[i] = {chosen};")

    # order statistics ----------------------------------------------------------------------------

    def before_sample(self, sink: Sink) -> None:
        self.put(f"uint32_t sample{self.number[sink.node]}[BLOCK];")

    def in_sample(self, sink: Sink) -> None:
        self.put(f"sample{self.number[sink.node]}[i] = key_of({self.name(sink.element)});")

    def after_sample(self, sink: Sink) -> None:
        """Store the samples of the windows whose chosen element is in this block."""
        rank = sink.node.attr
        assert isinstance(rank, ir.Rank)
        self.put("const int64_t from = b * BLOCK, windows_end = from + m;")
        self.open(f"for (int64_t w = from / {rank.every}; w * {rank.every} < windows_end; w++)")
        self.window(rank)
        inside = "at >= from && at < windows_end"
        self.put(f"if ({inside}) place->samples[w] = sample{self.number[sink.node]}[at - from];")
        self.close()

    def window(self, rank: ir.Rank) -> None:
        """Compute `at`, the element that represents window `w`."""
        name = f"place->streams[{self.streams.index(rank.stream)}]"
        self.put(f"const float u = uniform({name}, ((uint32_t)w + {name}.low) * WEYL);")
        self.put(f"int64_t at = w * {rank.every} + (int64_t)(u * {rank.every}.0f);")
        self.put("at = at < place->row->numel ? at : place->row->numel - 1;")

    def fill_sample(self, reduction: Node, rank: ir.Rank) -> None:
        """Compute the elements of the sample one by one, without a sweep."""
        scalars, nodes = passes.rank_nodes(reduction)
        self.arguments()
        self.memory("")
        for n in scalars.nodes:
            self.define(n)
        self.open("for (int64_t w = 0; w < windows; w++)")
        self.window(rank)
        self.put("const int64_t i = at;")
        self.put("const uint32_t first = (uint32_t)place->row->start;")
        self.enter_sparse(Loop(nodes, ()))
        for n in nodes:
            self.define(n)
        self.put(f"place->samples[w] = key_of({self.name(reduction.args[0])});")
        self.leave_sparse()
        self.close()


def rank_function(group: GroupRows, index: int, reduction: Node) -> str:
    """The function that computes an order statistic of every row's sample."""
    rank, form = reduction.attr, group.program.form
    assert isinstance(rank, ir.Rank)
    group.open(f"static void {form}_rank{index}(const Call *call, int thread, int threads)")
    group.put("float *partials = call->workspace;")
    group.open("for (int64_t r = 0; r < call->n; r++)")
    group.put("const Row *row = &call->rows[r];")
    group.open("if (r % threads == thread && row->numel)")
    group.put("const Place here = place_of(row, partials), *place = &here;")
    group.put(f"const int64_t windows = blocks_of(row->numel, {rank.every});")
    if passes.is_local(reduction.args[0]):
        group.fill_sample(reduction, rank)
    group.put("const Keys keys = {place->samples, windows};")
    size = f"size_of(windows, {rank.size.fraction.hex()}, {rank.size.least})"
    group.put(f"const float value = from_key(cut_of(&keys, 1, {size}).key);")
    group.put(f"partials[PARTIALS * place->blocks + {index}] = value;")
    group.close()
    group.put("partials += floats_of(row->numel);")
    group.close()
    group.close()
    return "\n".join([*group.lines, ""])


GroupRows.STEPS = {
    Scalars: GroupRows.scalars,
    Recall: GroupRows.recall,
    Loop: GroupRows.element_loop,
    Unpack: GroupRows.unpack,
    LookUp: GroupRows.look_up,
    Rotate: GroupRows.rotate,
    Stage: GroupRows.stage,
    Visit: GroupRows.visit,
    Fold: GroupRows.fold,
    Put: GroupRows.put_field,
    Partial: GroupRows.partial,
}

# before a block's loop, in its body, after it
GroupRows.SINKS = {
    "reduce": (GroupRows.before_reduce, GroupRows.in_reduce, GroupRows.after_reduce),
    "keep": (GroupRows.nothing, GroupRows.in_keep, GroupRows.nothing),
    "rotate": (GroupRows.nothing, GroupRows.in_rotate, GroupRows.nothing),
    "sample": (GroupRows.before_sample, GroupRows.in_sample, GroupRows.after_sample),
    "key": (GroupRows.before_key, GroupRows.in_key, GroupRows.nothing),
    "field": (GroupRows.before_field, GroupRows.in_field, GroupRows.after_field),
    "store": (GroupRows.nothing, GroupRows.in_store, GroupRows.nothing),
    "accumulate": (GroupRows.nothing, GroupRows.in_accumulate, GroupRows.nothing),
}
