"""Plain C from lowered programs: the functions of a codec's forms, in order.

c_nodes.py has a rule per operation, c_blocks.py and c_entries.py one per step and sink, c_loops.py
the loop over elements, c_rows.py the code around all; c_stack.py places large arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from functools import partial
from typing import TYPE_CHECKING

from gradwire.lang import forms, ir, passes
from gradwire.lang.codec import Codec
from gradwire.lang.emit import c_rows, c_stack
from gradwire.lang.emit.c_entries import GroupRows, rank_function
from gradwire.lang.emit.c_nodes import streams
from gradwire.lang.forms import FORMS
from gradwire.lang.layout import Layout, layout, native_name
from gradwire.lang.sweeps import Loop, Sweep

if TYPE_CHECKING:  # sources are also generated without torch
    import torch

# The functions of the sources: the types of their arguments and results. Of a codec:
_ROWS = c_void_p, c_int64, c_int32
_FORM = *_ROWS, c_int32, c_void_p, c_float, c_int32, c_void_p, c_void_p
FORM = dict.fromkeys(FORMS, (_FORM, c_int))
SERIES = {"run_series": ((c_void_p, c_int64), c_int64)}  # of `series`
LOWRANK = {
    "lowrank_left": (_ROWS, None),
    "lowrank_columns": ((*_ROWS, c_int32, c_void_p, c_int64), None),
    "lowrank_right": (_ROWS, None),
    "lowrank_finish": (_ROWS, None),
}


# The beginning of every generated file, what runs several forms in one call, PowerSGD's arithmetic.
prelude = partial(c_rows.text, "prelude.h")
series = partial(c_rows.text, "series.c")
lowrank = partial(c_rows.text, "lowrank.c")


def source(codec: Codec, dtype: torch.dtype | str = "fp32", names: Sequence[str] = FORMS) -> str:
    """The C source of the named forms of a codec, without the prelude that all kernels share."""
    native = native_name(dtype)
    programs = forms.derive(codec, native).programs
    return emit([programs[name] for name in names], layout(codec, native), native)


def emit(programs: Iterable[ir.Function], layout: Layout, native: str) -> str:
    """The C source of all forms of a codec, without the prelude; depends on its arguments only."""
    programs = tuple(programs)
    drawn = streams(programs)
    parts = [c_rows.text("selection.h")] if layout.variable or layout.samples else []
    if any(isinstance(n.attr, ir.Rotation) for p in programs for n in ir.walk(p.roots)):
        parts.append(c_rows.text("rotation.h"))
    if any(n.op == "lookup" for p in programs for n in ir.walk(p.roots)):
        parts.append(c_rows.text("lookup.h"))
    parts.append(c_rows.place(layout, drawn))
    if layout.partials:
        parts.append(c_rows.text("partials.h"))
    if layout.variable:
        parts.append(c_rows.text("staging.h"))
    for program in programs:
        sweeps = passes.lower(program)
        for number, sweep in enumerate(sweeps):
            parts += _sweep(program, layout, native, drawn, number, sweep)
        parts.append(c_rows.entry(program.form, sweeps, layout))
    return c_stack.placed("\n".join(parts), layout.block)


def _sweep(
    program: ir.Function,
    layout: Layout,
    native: str,
    drawn: tuple[ir.Stream, ...],
    number: int,
    sweep: Sweep,
) -> list[str]:
    """The functions of one sweep."""
    form, group = program.form, partial(GroupRows, program, layout, native, drawn)
    parts = [rank_function(group(), index, node) for index, node in sweep.ranks]
    if sweep.steps:
        parts += [group().emit(number, sweep), c_rows.rest(form, number)]
        cursors = c_rows.cursors(*_visited(program, sweep))
        if any(s.source for s in streams([program])):
            cursors += c_rows.peers([s for s in drawn if s.source])
        size = c_rows.group_size(layout, sweep)
        if sweep.entries:
            after = ""
            given: dict[str, object] = {"gathered": len(passes.gathered(program)), "floor": "0"}
            given["ranked"] = int(passes.is_ranked(program))
            if sweep.after:
                rest = Sweep(sweep.after)
                parts += [group().emit(number + 1, rest), c_rows.rest(form, number + 1)]
                after = c_rows.group_size(layout, rest)
            if sweep.key:
                parts.append(group().emit_floor(sweep.key))
                given["floor"] = f"alone ? 0 : {form}_floor(call, &place)"
            parts.append(group().emit_run(sweep.entries))
            parts.append(c_rows.select(form, number, layout, (size, after), given, cursors))
        else:
            parts.append(c_rows.sweep(form, number, size, cursors, final=not sweep.completes))
    return parts


def _visited(program: ir.Function, sweep: Sweep) -> tuple[bool, bool]:
    """Whether a sweep reads entries or kept blocks of the own payload, and of peer payloads."""
    own = sources = False
    for n in ir.walk(program.roots):
        if n.op == "field" and (n.dtype == "selection" or n.args):
            assert isinstance(n.attr, ir.FieldRef)
            own, sources = own or not n.attr.source, sources or n.attr.source
    stores_kept = any(
        sink.node.op == "keep"
        for step in sweep.steps
        if isinstance(step, Loop)
        for sink in step.sinks
        if sink.kind == "field"
    )
    return own or stores_kept, sources
