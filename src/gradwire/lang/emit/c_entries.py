"""C over the entries of a selection: a sweep stages, then stores them, and decoding visits them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.lang import ir, passes
from gradwire.lang.emit.c_blocks import Blocks
from gradwire.lang.emit.c_nodes import MEMORY, code_cell
from gradwire.lang.ir import Node, Scope
from gradwire.lang.layout import RUN, planes, run_nbytes
from gradwire.lang.sweeps import Loop, Scalars, Sink, Stage, Step, Visit


class GroupRows(Blocks):
    """Adds the steps and sinks of selections."""

    # steps ---------------------------------------------------------------------------------------

    def step_stage(self, step: Stage) -> None:
        """Stage the elements of this group that may be selected, with the gathered values."""
        with self.over_blocks(step.loop.operands), self.sparsely(step.loop):
            self.arrays(step.loop)
            self.memory(" + b * BLOCK")
            self.put("Staging *staging = place->staging;")
            self.put(f"const uint32_t *restrict keys = k{self.number[step.node]}_[g];")
            with self.braces("for (int i0 = 0; i0 < m; i0 += 16)"):
                self.put("if (!any_above(keys + i0, staging->threshold)) continue;")
                self.put("uint32_t above = all_above(keys + i0, staging->threshold);")
                with self.braces("for (; above; above &= above - 1)"):
                    self.put("const int i = i0 + __builtin_ctz(above);")
                    self.put("const int64_t e = staging->count++;")
                    self.put("column(staging, 0)[e] = (uint32_t)(b * BLOCK + i);")
                    self.put("column(staging, 1)[e] = keys[i];")
                    self.define(*step.loop.nodes)
                    for sink in step.loop.sinks:
                        at = 2 + self.gathered.index(sink.node)
                        value = self.name(sink.element)
                        self.put(f"column(staging, {at})[e] = bits_of({value});")
            ranked = int(passes.is_ranked(self.program))
            self.put(f"trim(staging, {2 + len(self.gathered)}, {ranked});")

    def step_visit(self, step: Visit) -> None:
        """Process every entry of this block in a payload."""
        base, cursor = self.received(step.selection)
        with self.over_blocks(step.loop.operands), self.sparsely(step.loop):
            self.memory(" + b * BLOCK")
            self.put(f"Cursor *cursor = {cursor};")
            self.put(f"const int64_t count = count_at(cursor, {self.address(step.selection)}, b);")
            for n in (step.selection, *step.loop.nodes):
                if n.op == "field" and n.scope is Scope.SELECTION:
                    at = self.tail(n)
                    tail = f"{base} + tail_{at}(place, cursor->entries)"
                    self.put(f"const uint8_t *tail{at} = {tail};")
            self.put("int before = -1;")
            with self.braces("for (int64_t e = cursor->next; e < cursor->next + count; e++)"):
                bits = ir.BITS[self.layout.position]
                positions = f"tail{self.tail(step.selection)}"
                self.put(f"const int i = (int)code_at({positions}, e, cursor->entries, {bits});")
                self.put("if (i <= before || i >= m) { fail(call, place->row); break; }")
                self.put("before = i;")
                self.define(*step.loop.nodes)
                for sink in step.loop.sinks:
                    self.write(sink)
            self.put("cursor->next += count;")

    @contextmanager
    def sparsely(self, loop: Loop) -> Iterator[None]:
        """In a loop that visits some elements only."""
        self.loop, self.sparse = loop, True
        yield
        self.loop, self.sparse = None, False

    # entries -------------------------------------------------------------------------------------

    def emit_run(self, steps: tuple[Step, ...]) -> str:
        """The function that stores a run of at most RUN entries, after `done` earlier entries."""
        scalars, loop = steps
        assert isinstance(scalars, Scalars)
        assert isinstance(loop, Loop)
        with self.braces(
            f"INLINE void {self.program.form}_run(const Call *call, const Place *place, "
            "const Run *run, int64_t done, const int m, int64_t entries)"
        ):
            self.arguments()
            self.memory("")
            self.define(*scalars.nodes)
            with self.sparsely(loop):
                self.run_body(loop)
        return "\n".join([*self.lines, ""])

    def run_body(self, loop: Loop) -> None:
        self.positions()
        fields = {s: self.field(s.name) for s in loop.sinks if s.kind == "field"}
        for sink, at in fields.items():
            dtype = sink.node.dtype
            start = f"payload + tail_{at}(place, entries) + done / RUN * {run_nbytes(dtype, RUN)}"
            if dtype in ir.CODES:
                self.put(f"{code_cell(dtype)} c{at}[RUN + 8] = {{0}};")
                self.put(f"uint8_t *out{at} = {start};")
            else:
                self.put(f"{MEMORY[dtype]} *restrict out{at} = ({MEMORY[dtype]} *)({start});")
        with self.braces("for (int e = 0; e < m; e++)"):
            self.put("const int64_t i = run->index[e];")
            self.define(*loop.nodes)
            for sink in loop.sinks:
                dtype = sink.node.dtype
                if sink not in fields:
                    self.write(sink)
                elif dtype in ir.CODES:
                    self.put(f"c{fields[sink]}[e] = ({code_cell(dtype)}){self.name(sink.node)};")
                else:
                    self.put(f"out{fields[sink]}[e] = ({MEMORY[dtype]}){self.name(sink.node)};")
        for sink, at in fields.items():
            if sink.node.dtype in ir.CODES:
                self.pack(f"out{at}", f"c{at}", sink.node.dtype)

    def positions(self) -> None:
        """Pack the positions of the entries in their blocks, from low and high bytes."""
        bits = ir.BITS[self.layout.position]
        at = next(i for i, f in enumerate(self.layout.fields) if f.capacity is not None)
        size = run_nbytes(self.layout.position, RUN)
        self.put(f"uint8_t *at = payload + tail_{at}(place, entries) + done / RUN * {size};")
        self.put("uint8_t low[RUN + 8] = {0}, high[RUN + 8] = {0};")
        with self.braces("for (int e = 0; e < m; e++)"):
            self.put("const uint32_t position = run->index[e] % BLOCK;")
            self.put("low[e] = (uint8_t)position, high[e] = (uint8_t)(position >> 8);")
        for width, bit in planes(bits):
            half, shift = ("low", bit) if bit < 8 else ("high", bit - 8)
            self.put(f"at = pack(at, {half}, m, {width}, {shift}, 8);")

    # sinks ---------------------------------------------------------------------------------------

    def sink_key(self, sink: Sink) -> Iterator[None]:
        n, key = sink.node, f"k{self.number[sink.node]}"
        self.put(f"uint32_t {key}_[GROUP][BLOCK + 16];")
        yield
        self.put(f"uint32_t *restrict {key} = {key}_[g];")
        self.put(f"memset({key} + m, 0, 64);")
        yield
        self.put(f"{key}[i] = {self.key(n.args)};")

    def key(self, elements: tuple[Node, ...]) -> str:
        conditions = [self.name(a) for a in elements if a.dtype == "bool"]
        keys = [f"key_of({self.name(a)})" for a in elements if a.dtype != "bool"]
        value = keys[0] if keys else "1u"
        return f"{conditions[0]} ? {value} : 0u" if conditions else value

    def sink_sample(self, sink: Sink) -> Iterator[None]:
        """Store the samples of the windows whose chosen element is in this block."""
        rank, sample = sink.node.attr, f"sample{self.number[sink.node]}"
        assert isinstance(rank, ir.Rank)
        yield
        self.put(f"uint32_t {sample}[BLOCK];")
        yield
        self.put(f"{sample}[i] = key_of({self.name(sink.element)});")
        yield
        self.put("const int64_t from = b * BLOCK, windows_end = from + m;")
        every = rank.every
        with self.braces(f"for (int64_t w = from / {every}; w * {every} < windows_end; w++)"):
            self.window(rank)
            inside = "at >= from && at < windows_end"
            self.put(f"if ({inside}) place->samples[w] = {sample}[at - from];")

    # order statistics ----------------------------------------------------------------------------

    def window(self, rank: ir.Rank) -> None:
        """Compute `at`, the element that represents window `w`."""
        name = f"place->streams[{self.streams.index(rank.stream)}]"
        self.put(f"const float u = uniform(drawn({name}, ((uint32_t)w + {name}.low) * WEYL));")
        self.put(f"int64_t at = w * {rank.every} + (int64_t)(u * {rank.every}.0f);")
        self.put("at = at < place->row->numel ? at : place->row->numel - 1;")

    def fill_sample(
        self, elements: tuple[Node, ...], samples: str, rank: ir.Rank | None = None
    ) -> None:
        """Compute the keys of a sample one by one, without a sweep."""
        scalars, nodes = passes.sample_nodes(elements)
        self.arguments()
        self.memory("")
        self.put("const uint32_t first = (uint32_t)place->row->start;")
        self.define(*scalars.nodes)
        with self.braces("for (int64_t w = 0; w < windows; w++)"):
            if rank is not None:
                self.window(rank)
            at = "sampled_at(place, w, every)" if rank is None else "at"
            self.put(f"const int64_t i = {at};")
            with self.sparsely(Loop(nodes, ())):
                self.define(*nodes)
                self.put(f"{samples}[w] = {self.key(elements)};")

    def emit_floor(self, selection: Node) -> str:
        """The function that computes the key from which on a row's entries are staged."""
        name = f"{self.program.form}_floor"
        with self.braces(f"static uint32_t {name}(const Call *call, const Place *place)"):
            self.put("const int64_t every = sample_every(place);")
            self.put("const int64_t windows = blocks_of(place->row->numel, every);")
            self.fill_sample(selection.args, "place->staging->numbers")
            self.put("return floor_of(place, windows);")
        return "\n".join([*self.lines, ""])


def rank_function(group: GroupRows, index: int, reduction: Node) -> str:
    """The function that computes an order statistic of every row's sample."""
    rank, form, put = reduction.attr, group.program.form, group.put
    assert isinstance(rank, ir.Rank)
    with group.braces(f"static void {form}_rank{index}(const Call *call, int thread, int threads)"):
        put("float *partials = call->workspace;")
        with group.braces("for (int64_t r = 0; r < call->n; r++)"):
            put("const Row *row = &call->rows[r];")
            with group.braces("if (r % threads == thread && row->numel)"):
                put("const Place here = place_of(row, partials), *place = &here;")
                put(f"const int64_t windows = blocks_of(row->numel, {rank.every});")
                if passes.is_local(reduction.args[0]):
                    group.fill_sample(reduction.args, "place->samples", rank)
                put("const Keys keys = {place->samples, windows};")
                size = f"size_of(windows, {rank.size.fraction.hex()}, {rank.size.least})"
                put(f"const float value = from_key(cut_of(&keys, 1, {size}).key);")
                put(f"partials[PARTIALS * place->blocks + {index}] = value;")
            put("partials += floats_of(row->numel);")
    return "\n".join([*group.lines, ""])
