"""Triton from programs: the kernels of a form and the order of their launches.

A program of the grid processes a *tile*: GROUP blocks of a row, or the ragged last block alone, so
all blocks of a tile have m values. A sweep is two kernels, each of which covers all rows in one
launch: one for *full* tiles, which have GROUP blocks of BLOCK values in aligned memory, one for the
others.

Elements are evaluated in tensors [G, W] of G blocks (triton_views.py).

triton_nodes.py has a rule per operation, triton_blocks.py those of reductions, rotations and sums,
triton_entries.py those of selections and kept codes, triton_rows.py the code around them. The
generated code calls triton_prelude.py, triton_numbers.py, triton_reductions.py, triton_selection.py
and triton_codes.py. A generated file ends with the steps of every form, which lang/gpu.py runs:

| step | meaning |
| --- | --- |
| ("sweep", full, others) | a launch over full tiles, one over the others, if there are any |
| ("pack", kernel) | a launch over all tiles |
| ("complete", index, number) | sum up a sweep's partial results to `number` results per row |
| ("survey", peers) | count the entries or kept blocks before every block of received payloads |
| ("sample", index, every, column) | the order statistic of the sample that a sweep stored |
| ("select", *keys, *picks) | the entries of a selection before every block; by two sweeps, of |
|  | which the second is only where keys are ranked |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from gradwire.errors import ConfigError
from gradwire.lang import forms, ir, passes
from gradwire.lang.codec import Codec
from gradwire.lang.emit import triton_rows
from gradwire.lang.emit.triton_entries import Kernel
from gradwire.lang.layout import Layout, layout, native_name
from gradwire.lang.sweeps import Partial

if TYPE_CHECKING:  # sources are also generated without torch
    import torch

NODES = {op for op in ir.OPS if hasattr(Kernel, f"node_{op}")}
# emitted as part of other nodes: of keys, of stores and sums
WITHIN = ("const", "select", "scatter")


def source(codec: Codec, dtype: torch.dtype | str = "fp32") -> str:
    """The generated Triton source of the codec's kernels, without the prelude.

    Raises `ConfigError` for a codec with operations that the target does not support.
    """
    native = native_name(dtype)
    programs = forms.derive(codec, native).programs.values()
    missing = lacking(programs)
    if missing:
        raise ConfigError(
            f"target 'triton' does not support {', '.join(missing)} of {codec!r}: use target 'c'"
        )
    return emit(programs, layout(codec, native), native)


def emit(programs: Iterable[ir.Function], layout: Layout, native: str) -> str:
    """The Python source of all forms of a codec; depends on its arguments only."""
    programs = tuple(programs)
    statistics = triton_rows.statistics(programs)
    parts, table = [triton_rows.head(layout)], []
    if layout.staged:
        parts.append(triton_rows.packing(layout))
    for program in programs:
        kernels, steps = _form(program, layout, native, statistics)
        parts += kernels
        table.append(f'    "{program.form}": [{", ".join(steps)}],')
    parts += ["# see emit/triton.py", "STEPS = {", *table, "}"]
    return "\n".join([*parts, ""])


def _form(
    program: ir.Function, layout: Layout, native: str, statistics: list[tuple[int, ir.Size]]
) -> tuple[list[str], list[str]]:
    """The kernels and the steps of a form."""
    kernels: list[str] = []
    steps = [f'("survey", {peers})' for peers in _surveyed(program)]

    def both(name: str, emit: Callable[[Kernel, str], str]) -> str:
        """Emit the two kernels of a sweep; their names."""
        kernels.extend(emit(Kernel(program, layout, native, full), name) for full in (True, False))
        return f"{name}, {name}_others"

    if any(n.op == "fold" and len(n.args) == 3 for n in ir.walk(program.roots)):
        steps.append(f'("sweep", {both(f"{program.form}_totals", Kernel.emit_totals)})')
    reductions = passes.tensor_reductions(program)
    for number, (sinks, partials) in enumerate(passes.cut_sweeps(program, reductions)):
        name = f"{program.form}_{number}"
        plain = [p for p in partials if not isinstance(p.node.attr, ir.Rank)]
        if any(s.kind == "key" for s in sinks):
            selecting = both(f"{name}_keys", Kernel.emit_keys)
            if passes.is_ranked(program):
                selecting += ", " + both(f"{name}_picks", Kernel.emit_picks)
            steps.append(f'("select", {selecting})')
        if plain or sinks:
            kernel = partial(Kernel.emit, sinks=sinks, partials=plain)
            steps.append(f'("sweep", {both(name, kernel)})')
        steps += [f'("complete", {i}, {many})' for i, many in _sums(plain)]
        for p in partials:
            if isinstance(p.node.attr, ir.Rank):
                rank, sample = p.node.attr, f"{name}_sample{p.index}"
                kernel = partial(Kernel.emit_sample, statistic=p.node)
                steps.append(f'("sweep", {both(sample, kernel)})')
                column = statistics.index((rank.every, rank.size))
                steps.append(f'("sample", {p.index}, {rank.every}, {column})')
        if any(s.kind == "flag" for s in sinks):
            steps.append('("survey", False)')
        if any(s.kind == "key" for s in sinks):
            steps.append('("pack", pack)')
    return kernels, steps


def _sums(partials: list[Partial]) -> list[tuple[int, int]]:
    """(first index, number) of consecutive sums, which one launch can complete."""
    at = [p.index for p in partials if p.node.attr == "sum"]
    return [(i, next(n for n in count(1) if i + n not in at)) for i in at if i - 1 not in at]


def _surveyed(program: ir.Function) -> list[bool]:
    """Which payloads need a survey: False for the own, True for the peers'."""
    found = set()
    for n in ir.walk(program.roots):
        if n.op == "field" and (n.dtype == "selection" or (n.args and n.scope is ir.Scope.ELEMENT)):
            assert isinstance(n.attr, ir.FieldRef)
            found.add(n.attr.source)
    return sorted(found)


def lacking(programs: Iterable[ir.Function]) -> list[str]:
    """The operations of these programs that this target does not support."""
    needed = {n.op for p in programs for n in ir.walk(p.roots)}
    return sorted(needed - {*NODES, *WITHIN})
