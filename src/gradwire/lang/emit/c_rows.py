"""The C around the blocks: where a row's fields lie, how rows are walked, the entry point.

Place         a row's field offsets, random streams and workspace, made once a row
FORM_sweepN   divides the blocks of all rows among threads, and takes GROUP at a time
FORM_completeN  ends a sweep whose partial results make tensor reductions
FORM          the entry point, with the signature that lang/kernels.py calls
"""

from __future__ import annotations

from gradwire.lang import ir, passes
from gradwire.lang.ir import Scope
from gradwire.lang.layout import Layout, element_nbytes, planes

GROUP_VALUES = 4096  # values of a group: 8 KiB in fp32, so that a group and its arrays stay in L1
MAX_GROUP = 32  # blocks whose scalars make one vector


def group(layout: Layout) -> int:
    """Blocks that are taken together, so that their scalars are computed as vectors."""
    return max(1, min(MAX_GROUP, GROUP_VALUES // layout.block))


def place(layout: Layout, streams: tuple[ir.Stream, ...]) -> str:
    """The struct Place and the function that fills it."""
    sizes = {"BLOCK": layout.block, "GROUP": group(layout), "PARTIALS": layout.partials}
    lines = [
        "enum { " + ", ".join(f"{name} = {size}" for name, size in sizes.items()) + " };",
        "",
        "/* Where a row's fields begin, its random streams, its part of the workspace. */",
        "typedef struct {",
        "  const Row *row;",
        f"  int64_t blocks, at[{len(layout.fields)}];",
        f"  Stream streams[{max(1, len(streams))}];",
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
    for number, s in enumerate(streams):
        key = "shared" if s.shared else "key"
        lines.append(f"  p.streams[{number}] = stream(row->{key}, {s.number});")
    return "\n".join([*lines, "  return p;", "}", ""])


def _rest_nbytes(dtype: str) -> str:
    if not dtype.startswith("uint"):
        return f"rest * {ir.BITS[dtype] // 8}"
    return " + ".join(f"(rest * {width} + 7) / 8" for width, _ in planes(ir.BITS[dtype]))


def sweep(form: str, number: int) -> str:
    """The walk over rows of one sweep; full groups see their trip counts as constants."""
    name = f"{form}_group{number}"
    return f"""\
static __attribute__((noinline)) void {form}_rest{number}(
    const Call *call, const Place *place, int64_t b, int count, int m) {{
  {name}(call, place, b, count, m);
}}

static void {form}_sweep{number}(const Call *call, int thread, int threads) {{
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
      const int64_t stop = end < full ? end : full;
      for (; b + GROUP <= stop; b += GROUP) {name}(call, &place, b, GROUP, BLOCK);
      if (b < stop) {form}_rest{number}(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) {form}_rest{number}(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }}
    seen += blocks;
    partials += (blocks + 1) * PARTIALS;
  }}
}}
"""


def complete(form: str, number: int, completes: tuple[tuple[int, str], ...]) -> str:
    """Make tensor reductions from the blocks' partial results, rows divided among threads."""
    function = {"min": "minimum", "max": "maximum", "sum": "tree_sum"}
    results = "\n".join(
        f"      partials[PARTIALS * blocks + {i}] =\n"
        f"          {function[kind]}(partials + {i} * blocks, blocks);"
        for i, kind in completes
    )
    return f"""\
static void {form}_complete{number}(const Call *call, int thread, int threads) {{
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n; r++) {{
    const int64_t blocks = blocks_of(call->rows[r].numel, BLOCK);
    if (r % threads == thread && blocks) {{
{results}
    }}
    partials += (blocks + 1) * PARTIALS;
  }}
}}
"""


def entry(form: str, sweeps: tuple[passes.Sweep, ...]) -> str:
    """The function that lang/kernels.py calls."""
    lines = [
        f"int {form}(const Row *rows, int64_t n, int32_t ranks, int32_t rank, int64_t stride,",
        "    float factor, int32_t threads, void *workspace) {",
        "  const Call call = {rows, n, stride, ranks, rank, factor, workspace};",
        "#pragma omp parallel num_threads(threads) if (threads > 1)",
        "  {",
        "    const int thread = omp_get_thread_num(), of = omp_get_num_threads();",
    ]
    for number, s in enumerate(sweeps):
        lines.append(f"    {form}_sweep{number}(&call, thread, of);")
        if s.completes:
            lines += [
                "#pragma omp barrier",
                f"    {form}_complete{number}(&call, thread, of);",
                "#pragma omp barrier",
            ]
    return "\n".join([*lines, "  }", "  return 0;", "}", ""])
