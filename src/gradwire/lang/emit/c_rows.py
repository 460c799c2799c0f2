"""The C around the blocks: the offsets of a row's fields, the loops over rows, the entry point.

Place           a row's field offsets, random streams and workspace, computed once per row
FORM_sweepN     divides the blocks of all rows among threads, and takes GROUP at a time; a sweep
                that selects goes row by row, since a selection belongs to one row
FORM            the entry point, with the signature that lang/kernels.py calls
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from string import Template
from textwrap import indent

from gradwire.lang import ir
from gradwire.lang.forms import Field
from gradwire.lang.ir import Scope
from gradwire.lang.layout import COUNT_NBYTES, RUN, Layout, element_nbytes, planes
from gradwire.lang.sweeps import Sweep

LARGE_VALUES = 1 << 18  # values of a call that exceed the cache of a core
# Values per group: 16 KiB in fp32, so that the group and its prefetched data fit in L1; fewer if
# the group has several arrays, such as a residual, rotated values or looked-up numbers.
GROUP_VALUES = 4096
GROUP_VALUES_OF_SEVERAL = 1024
MAX_GROUP = 32  # blocks per group, whose scalars are vectorised


@lru_cache(maxsize=16)
def text(name: str) -> str:
    """A file of C that stands beside this one."""
    return resources.files("gradwire.lang.emit").joinpath(name).read_text("utf-8")


def filled(name: str, **values: object) -> str:
    """The text of a template."""
    return Template(text(name)).substitute(values)


def group(layout: Layout, sweep: Sweep) -> int:
    """Blocks per group of a sweep; the scalars of a group are vectorised."""
    memory = {str(n.attr) for loop in sweep.loops for n in loop.nodes if n.op == "load"}
    memory |= {s.name for loop in sweep.loops for s in loop.sinks if s.kind == "store"}
    values = GROUP_VALUES if len(memory) + sweep.fills <= 1 else GROUP_VALUES_OF_SEVERAL
    return max(1, min(MAX_GROUP, values // layout.block))


def group_size(layout: Layout, sweep: Sweep) -> str:
    """The declaration of GROUP."""
    return f"enum {{ GROUP = {group(layout, sweep)} }};"


def place(layout: Layout, streams: tuple[ir.Stream, ...]) -> str:
    """The struct Place, the function that fills it, and offsets of variable parts of fields."""
    own = [s for s in streams if not s.source]
    sizes = {"BLOCK": layout.block, "PARTIALS": layout.partials}
    if layout.variable:
        sizes["STAGED"] = layout.staged
    lines = [
        "enum { " + ", ".join(f"{name} = {size}" for name, size in sizes.items()) + " };",
        "",
        "/* Where a row's fields begin, its random streams, its part of the workspace. */",
        "typedef struct {",
        "  const Row *row;",
        f"  int64_t blocks, at[{len(layout.fields) + 1}];",
        f"  Stream streams[{max(1, len(own))}];",
        *(["  const Stream *peers;"] if len(own) < len(streams) else []),
        "  float *partials;",
        *(["  uint32_t *samples;"] if layout.samples else []),
        *(["  Staging *staging;", "  Cursor *cursors;"] if layout.variable else []),
        "} Place;",
        "",
        "INLINE Place place_of(const Row *row, float *partials) {",
        "  Place p = {.row = row, .blocks = blocks_of(row->numel, BLOCK), .partials = partials};",
        "  const int64_t full = row->numel / BLOCK, rest = row->numel % BLOCK;",
        "  int64_t at = 0;",
    ]
    for number, f in enumerate(layout.fields):
        lines.append(f"  p.at[{number}] = at, at += {_known(f, layout)};  /* {f.name} */")
    lines.append(f"  p.at[{len(layout.fields)}] = at;")
    for number, s in enumerate(own):
        key = "shared" if s.shared else "key"
        lines.append(f"  p.streams[{number}] = stream(row->{key}, {s.number}u);")
    if layout.samples:
        lines.append("  p.samples = (uint32_t *)partials + (p.blocks + 1) * PARTIALS;")
    lines += ["  return p;", "}", ""]
    samples = f" + blocks_of(numel, {layout.samples})" if layout.samples else ""
    lines += [
        "/* The part of the workspace that belongs to a row. */",
        "INLINE int64_t floats_of(int64_t numel) {",
        f"  return (blocks_of(numel, BLOCK) + 1) * PARTIALS{samples};",
        "}",
        "",
    ]
    if layout.variable:
        lines += _tails(layout)
    return "\n".join(lines)


def _known(f: Field, layout: Layout) -> str:
    """Bytes of a field's part of known length."""
    if f.capacity is not None:
        return f"p.blocks * {COUNT_NBYTES}"
    if f.flag is not None or f.scope is Scope.SELECTION:
        return "0"
    if f.scope is Scope.TENSOR:
        return str(f.item_nbytes)
    if f.scope is Scope.BLOCK:
        return f"p.blocks * {f.item_nbytes}"
    return f"full * {element_nbytes(f.dtype, layout.block)} + {_rest(f.dtype)}"


def _rest(dtype: str, m: str = "rest") -> str:
    """Bytes of `m` values, fewer than a block or run."""
    if dtype == "trit":
        return f"({m} + 4) / 5"
    if not dtype.startswith("uint"):
        return f"{m} * {ir.BITS[dtype] // 8}"
    return " + ".join(f"({m} * {width} + 7) / 8" for width, _ in planes(ir.BITS[dtype]))


def _tails(layout: Layout) -> list[str]:
    """Functions for the offsets and maximum sizes of parts whose length depends on data."""
    lines, before = [], f"p->at[{len(layout.fields)}]"
    for number, f in enumerate(layout.fields):
        lines += [
            f"/* {f.name} */",
            f"INLINE int64_t tail_{number}(const Place *p, int64_t entries) {{",
            f"  return {before};",
            "}",
        ]
        dtype = layout.position if f.capacity is not None else f.dtype
        if f.capacity is not None or f.scope is Scope.SELECTION:
            size = f"entries / RUN * {element_nbytes(dtype, RUN)}"
            rest = _rest(dtype, "(entries % RUN)")
            before = f"tail_{number}(p, entries) + {size} + {rest}"
    selection = next((f for f in layout.fields if f.capacity is not None), None)
    lines.append("INLINE int64_t capacity_of(int64_t numel) {")
    if selection is not None:
        assert selection.capacity is not None
        size = f"{selection.capacity.fraction.hex()}, {selection.capacity.least}"
        lines.append(f"  return size_of(numel, {size});")
    else:
        lines.append("  return numel;")
    lines += ["}", "", "/* Bytes that a payload may take beyond its parts of known length. */"]
    lines.append("INLINE int64_t tails_of(const Place *p) {")
    kept = next((f for f in layout.fields if f.flag is not None), None)
    if kept is not None:
        full = element_nbytes(kept.dtype, layout.block)
        lines += [
            "  const int64_t rest = p->row->numel % BLOCK;",
            f"  return p->row->numel / BLOCK * {full} + {_rest(kept.dtype)};",
        ]
    else:
        end = before.replace("entries", "k")
        lines += [
            "  const int64_t k = capacity_of(p->row->numel);",
            f"  return {end} - p->at[{len(layout.fields)}];",
        ]
    names = [f.name for f in layout.fields]
    if selection is not None:
        number = names.index(selection.name)
        cursor = f"entries_from(call, p->row, payload + p->at[{number}], p->blocks, b,\n"
        cursor += "                      capacity_of(p->row->numel))"
    else:
        assert kept is not None
        assert kept.flag is not None
        cursor = f"blocks_from(payload + p->at[{names.index(kept.flag)}], b)"
    return [
        *lines,
        "}",
        "INLINE Cursor cursor_at(",
        "    const Call *call, const Place *p, const uint8_t *payload, int64_t b) {",
        f"  return {cursor};",
        "}",
        "",
    ]


def cursors(own: bool, sources: bool) -> str:
    """Cursors at block `b` of the payloads whose entries or kept blocks a sweep reads."""
    lines = [
        "      Cursor cursors[call->ranks + 1];  /* of the own payload, then of the peers' */",
        "      place.cursors = cursors;",
    ]
    if own:
        lines.append("      cursors[0] = cursor_at(call, &place, row->payload, b);")
    if sources:
        lines += [
            "      for (int k = 0; k < call->ranks - (call->rank >= 0); k++)",
            "        cursors[k + 1] =",
            "            cursor_at(call, &place, row->source + call->distances[k], b);",
        ]
    return "\n".join([*lines, ""]) if own or sources else ""


def peers(streams: Sequence[ir.Stream]) -> str:
    """The streams of the encoders of the peers' payloads, whose origins follow the distances."""
    each = len(streams)
    lines = [
        "      const int payloads = call->ranks - (call->rank >= 0);",
        f"      Stream peers[payloads * {each} + 1];",
        "      for (int k = 0; k < payloads; k++) {",
        "        const Stream of = stream(row->shared, call->distances[payloads + k]);",
        "        const uint64_t key = (uint64_t)of.high << 32 | of.low;",
        *(f"        peers[k * {each} + {at}] = stream(key, {s.number}u);"
          for at, s in enumerate(streams)),
        "      }",
        "      place.peers = peers;",
    ]  # fmt: skip
    return "\n".join([*lines, ""])


def _walk(form: str, number: int, cursors: str, final: bool = True) -> str:
    """Process blocks [b, end) of a row in groups; full groups have constant trip counts.

    Sweeps that only reduce use one copy of the function, which halves the compile time.
    """
    name = f"{form}_group{number}" if final else f"{form}_rest{number}"
    return f"""\
      const int64_t stop = end < full ? end : full;
{cursors}\
      for (; b + GROUP <= stop; b += GROUP) {name}(call, &place, b, GROUP, BLOCK);
      if (b < stop) {form}_rest{number}(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) {form}_rest{number}(call, &place, b, 1, (int)(row->numel - full * BLOCK));
"""


def rest(form: str, number: int) -> str:
    """A copy of the group function for groups that are not full.

    noipa hides its callers: if gcc 12 knows that `count` is 1, it drops the loop over blocks and
    no longer vectorises the loops over elements.
    """
    return f"""\
static __attribute__((noinline, noipa)) void {form}_rest{number}(
    const Call *call, const Place *place, int64_t b, int count, int m) {{
  {form}_group{number}(call, place, b, count, m);
}}
"""


def sweep(form: str, number: int, size: str, cursors: str, final: bool) -> str:
    """The loop over rows of one sweep; `size` declares GROUP."""
    walk = _walk(form, number, cursors, final)
    return filled("sweep.c", form=form, number=number, size=size, walk=walk)


def select(
    form: str,
    number: int,
    layout: Layout,
    sizes: tuple[str, str],
    given: dict[str, object],
    cursors: str,
) -> str:
    """The loop over rows of a sweep that selects, and the function that stores a selection.

    sizes: the declaration of GROUP, and that of a sweep to make when entries are staged, or "".
    given: how many numbers are `gathered`, whether entries are `ranked`, and the `floor`, see c.py.
    """
    counted = next(i for i, f in enumerate(layout.fields) if f.capacity is not None)
    walk = indent(_walk(form, number, cursors), "  ")
    stores = indent(f"  {sizes[1]}\n  int64_t b = from;\n{_walk(form, number + 1, '')}", "  ")
    return filled(
        "select.c", form=form, number=number, size=sizes[0], walk=walk, counted=counted,
        stores=f"      {{\n{stores}      }}\n" if sizes[1] else "", **given,
    )  # fmt: skip


def entry(form: str, sweeps: tuple[Sweep, ...], layout: Layout) -> str:
    """The function that lang/kernels.py calls."""
    lines = [
        f"int {form}(const Row *rows, int64_t n, int32_t ranks, int32_t rank,",
        "    const int64_t *distances, float factor, int32_t threads, void *workspace,",
        "    const float *table) {",
        "  int failed = 0;",
        "  Call call = {rows, n, distances, ranks, rank, factor, workspace, table, &failed};",
    ]
    if form == "decode":
        lines += [
            "  int64_t total = 0;",
            "  for (int64_t r = 0; r < n; r++) total += rows[r].numel;",
            f"  call.large = total >= {LARGE_VALUES};",
        ]
    if layout.staged:
        lines += [
            "  Staging staging[threads];",
            "  divide(&call, staging, threads);",
        ]
    lines += [
        "#pragma omp parallel num_threads(threads) if (threads > 1)",
        "  {",
        "    const int thread = omp_get_thread_num(), of = omp_get_num_threads();",
    ]
    calls = []
    function = {"min": "minimum", "max": "maximum", "sum": "tree_sum"}
    for number, s in enumerate(sweeps):
        calls += [[f"{form}_sweep{number}("]] if s.steps else []
        calls += [[f"{form}_rank{i}(" for i, _ in s.ranks]] if s.ranks else []
        calls += [["clear("]] if s.clears else []
        calls += [[f"complete({i}, {function[kind]}, " for i, kind in s.completes]]
    for at, functions in enumerate(filter(None, calls)):
        lines += ["#pragma omp barrier"] if at else []
        lines += [f"    {begin}&call, thread, of);" for begin in functions]
    lines += ["    past_cache_end();"] if form == "decode" else []
    return "\n".join([*lines, "  }", "  return failed;", "}", ""])
