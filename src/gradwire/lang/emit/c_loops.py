"""The C loop over the elements of one block: what it reduces, which codes it narrows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.lang import ir
from gradwire.lang.emit import stream_name
from gradwire.lang.emit.c_nodes import EXTREMES, Writer
from gradwire.lang.ir import Node
from gradwire.lang.passes import fill_loops
from gradwire.lang.sweeps import Loop, Sink

WAYS = 4  # parts of a block that are summed up side by side


def over_elements(w: Writer, loop: Loop, sinks: list[Iterator[None]]) -> None:
    extrema = [part for x in extremes(w, loop) for part in w.parts(x)]
    drawn = streams_of(w, loop)
    rare = [] if drawn else [x for kind, x in extrema if kind == "top"]
    counted = [s.node for s in loop.sinks if s.kind == "reduce" and s.node.attr == "count"]
    for n in counted:
        w.put(f"int32_t count{w.number[n]} = 0;")
    clauses = "".join(
        f" reduction({'min' if kind == 'least' else 'max'} : {kind}{w.number[x]})"
        for kind, x in extrema
        if kind != "least" or x not in rare
    )
    clauses += "".join(f" reduction(+ : count{w.number[n]})" for n in counted)
    for kind, x in extrema:
        w.put(f"{EXTREMES[kind][0]} {kind}{w.number[x]} = {EXTREMES[kind][1]};")
    for stream in drawn:
        w.put(f"uint32_t {stream}_weyl = (first + {stream}.low) * WEYL;")
        clauses += f" linear({stream}_weyl : WEYL)"
    with parts_of(w, loop, whole="reduction" in clauses) as (begin, end):
        w.lines.append(f"#pragma omp simd{clauses}")
        with w.braces(f"for (int i = {begin}; i < {end}; i++)"):
            w.define(*loop.nodes)
            for kind, x in extrema:
                if kind != "least" or x not in rare:
                    extend(w, kind, x)
            advance(sinks)
            for stream in drawn:
                w.put(f"{stream}_weyl += WEYL;")
    for i, x in ((w.number[x], x) for x in rare):
        with w.braces(f"if (has_one_sign(most{i}, top{i}))"):
            w.lines.append(f"#pragma omp simd reduction(min : least{i})")
            with w.braces("for (int i = 0; i < m; i++)"):
                w.define(*loop.nodes)
                extend(w, "least", x)
    for kind, x in extrema:
        w.put(f"{kind}{w.number[x]}_[g] = {kind}{w.number[x]};")


def pieces(loop: Loop) -> list[Loop]:
    """The three loops that one becomes which draws random numbers, makes codes, and stores what
    they decode to: CPUs overlap more elements of short chains of operations than of a long one."""
    drawn = [Sink("keep", n) for n in loop.nodes if n.op == "random"]
    if not drawn or {s.kind for s in loop.sinks} != {"field", "store"}:
        return [loop]
    fields, stores = ([s for s in loop.sinks if s.kind == kind] for kind in ("field", "store"))
    return fill_loops([drawn, fields, stores])


def extend(w: Writer, kind: str, x: Node) -> None:
    """Include an element in an extreme of its block."""
    bits, so_far = f"({EXTREMES[kind][0]})bits_of({w.name(x)})", f"{kind}{w.number[x]}"
    order = "<" if kind == "least" else ">"
    w.put(f"{so_far} = {bits} {order} {so_far} ? {bits} : {so_far};")


@contextmanager
def parts_of(w: Writer, loop: Loop, whole: bool) -> Iterator[tuple[str, str]]:
    """Where a loop begins and ends: a loop over the parts of a block whose codes are narrowed
    in registers, unless it is to be `whole`."""
    codes = [s.node for s in loop.sinks if s.kind == "field" and is_narrowed(s.node)]
    if not codes:
        yield "0", "m"
        return
    size, array = ("BLOCK",) * 2 if whole or w.layout.block % 32 else ("STEP", "PART")
    with w.braces(f"for (int from = 0; from < m; from += {size})"):
        w.put(f"const int to = m == BLOCK || m - from > {size} ? from + {size} : m;")
        for n in codes:
            w.put(f"Code part{w.number[n]}[{array}] __attribute__((aligned(64)));")
        yield "from", "to"
        for n in codes:
            w.put(f"NARROW(c{w.number[n]}, part{w.number[n]});")


def sums_alone(w: Writer, loop: Loop) -> bool:
    """Whether a loop only sums up, over blocks of which each has `WAYS` parts of vectors."""
    block = w.layout.block
    sums = all(s.kind == "reduce" and s.node.attr == "sum" for s in loop.sinks)
    return sums and not streams_of(w, loop) and block >= 64 and not block & (block - 1)


def over_ways(w: Writer, loop: Loop, prefetched: tuple[str, ...]) -> None:
    """A whole block's first halvings of `tree_sum`, in registers: x[i] to x[i + 3 BLOCK / 4]
    become one. Memory is asked for a few lines at a time: more at once stall."""
    sums = [sink.node for sink in loop.sinks]
    part = 16 * WAYS if prefetched else "BLOCK"
    w.put(f"for (int from = 0; from < BLOCK; from += {part}) {{")
    for address in prefetched:
        w.put(f"  PREFETCH({address} + from, {part});")
    w.lines.append("#pragma omp simd")
    with w.braces(f"for (int h = from / {WAYS}; h < (from + {part}) / {WAYS}; h++)", "}}"):
        for n in sums:
            w.put(f"float {', '.join(f'v{w.number[n]}_{k}' for k in range(WAYS))};")
        for k in range(WAYS):
            with w.braces("", "}"):
                w.put(f"const int i = h + {k} * (BLOCK / {WAYS});")
                w.define(*loop.nodes)
                for n in sums:
                    w.put(f"v{w.number[n]}_{k} = {w.name(n.args[0])};")
        for n in sums:
            v = f"v{w.number[n]}_"
            w.put(f"t{w.number[n]}[h] = ({v}0 + {v}2) + ({v}1 + {v}3);")


def streams_of(w: Writer, loop: Loop) -> list[str]:
    """The random streams that a loop uses: for random elements and for signs of rotations."""
    found = [n.attr for n in loop.nodes if isinstance(n.attr, ir.Stream)]
    for nodes, inverse in (([s.node for s in loop.sinks], False), (loop.operands, True)):
        turned = [n.attr for n in nodes if isinstance(n.attr, ir.Rotation)]
        found += [rotation.stream for rotation in turned if rotation.inverse is inverse]
    return [stream_name(s) for s in dict.fromkeys(found)]


def extremes(w: Writer, loop: Loop) -> list[Node]:
    """Operands of min and max; a min and a max of one operand share work."""
    kinds = [s for s in loop.sinks if s.kind == "reduce" and s.node.attr in ("min", "max")]
    return list(dict.fromkeys(sink.element for sink in kinds))


def advance(rules: list[Iterator[None]]) -> None:
    """Run the rules of a loop's sinks to their next `yield`."""
    for rule in rules:
        next(rule, None)


def is_narrowed(n: Node) -> bool:
    """Whether a field has codes that a loop makes as wide as its other numbers; see `NARROW`."""
    return n.dtype in ir.CODES and n.dtype != "trit"
