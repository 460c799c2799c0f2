"""Lowering: from a program to sweeps over memory, made of steps over one block.

Vocabulary
    sweep  one pass over memory; a whole-tensor reduction ends one and the next uses its result
    step   what a sweep does to a block while it lies in L1: loops, scalars, packing
    stage  how many block reductions stand below a node: loop s computes elements of stage s
    sink   what a loop does with an element besides computing it

The passes, in the order of `lower`:
    1. tensor_reductions   number the whole-tensor reductions: their place in the workspace
    2. cut_sweeps          give every sweep its sinks: partial results, at last the stores
    3. stages              place every node in a stage
    4. fill_loops          compute each element where it is first needed; keep the costly ones
    5. order_steps         scalars, unpacking, folds and loops in an order that respects all this
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradwire.lang import ir
from gradwire.lang.ir import Node, Scope

RECOMPUTE = 2  # an element this cheap is computed again rather than kept in an array
_COST = {"random": 10, "div": 8, "sqrt": 8, "cast": 1, "alu": 1}


@dataclass(frozen=True)
class Sink:
    """kind: "reduce" (name unused), "keep", "field" (name of the field), "store" (values or
    residual), "accumulate" (into the fold that `fold` names)."""

    kind: str
    node: Node
    name: str = ""
    fold: Node | None = None


@dataclass(frozen=True)
class Loop:
    """Over the block's elements: compute `nodes` in order, then serve the sinks."""

    nodes: tuple[Node, ...]
    sinks: tuple[Sink, ...]


@dataclass(frozen=True)
class Scalars:
    """Numbers of the block, the row or the call, in order."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Unpack:
    """Bring a field of uint codes from its planes into an array."""

    node: Node


@dataclass(frozen=True)
class Fold:
    """For every rank in order: run `own` or, with a peer's payload, `body`; both accumulate."""

    node: Node
    own: Loop
    body: tuple[Step, ...]


@dataclass(frozen=True)
class Put:
    """Write a field of block or tensor scope."""

    name: str
    node: Node


@dataclass(frozen=True)
class Partial:
    """Leave the block's share of tensor reduction number `index` in the workspace."""

    index: int
    node: Node


Step = Loop | Scalars | Unpack | Fold | Put | Partial


@dataclass(frozen=True)
class Sweep:
    """Steps for every block, then the tensor reductions (index, kind) that this sweep completes."""

    steps: tuple[Step, ...]
    completes: tuple[tuple[int, str], ...]


def lower(program: ir.Program) -> tuple[Sweep, ...]:
    """The sweeps of a program."""
    reductions = tensor_reductions(program)
    return tuple(
        Sweep(order_steps(sinks, partials), tuple((p.index, str(p.node.attr)) for p in partials))
        for sinks, partials in cut_sweeps(program, reductions)
    )


def tensor_reductions(program: ir.Program) -> tuple[Node, ...]:
    """The whole-tensor reductions; the position of each is its index in the workspace."""
    return tuple(n for n in ir.walk(program.roots) if n.op == "reduce" and n.scope is Scope.TENSOR)


def staged_numbers(program: ir.Program) -> int:
    """Numbers that an entry takes in the workspace: its index, its key, what is gathered."""
    nodes = list(ir.walk(program.roots))
    selects = any(n.op == "select" for n in nodes)
    return 2 + len(gathered(program)) if selects else 0


def gathered(program: ir.Program) -> tuple[Node, ...]:
    """What is gathered at the selection that a program makes, in order."""
    return tuple(n for n in ir.walk(program.roots) if n.op == "gather" and n.args[1].op == "select")


def cut_sweeps(
    program: ir.Program, reductions: tuple[Node, ...]
) -> list[tuple[list[Sink], list[Partial]]]:
    """What each sweep must produce: a sweep for every depth of tensor reductions, then the last."""
    depth: dict[Node, int] = {}
    for n in ir.walk(program.roots):
        depth[n] = max((depth[a] for a in n.args), default=0) + (n in reductions)
    last = max(depth.values())
    sweeps: list[tuple[list[Sink], list[Partial]]] = [
        ([], [Partial(i, n) for i, n in enumerate(reductions) if depth[n] == level])
        for level in range(1, last + 1)
    ]
    sinks = [Sink("field", n, name) for name, n in program.fields]
    sinks += [Sink("store", n, target) for target, n in program.stores]
    return [*sweeps, (sinks, [])]


def stages(nodes: Iterable[Node]) -> dict[Node, int]:
    """The stage of every node, given operands first; tensor reductions are ready from the start."""
    stage: dict[Node, int] = {}
    for n in nodes:
        if n.op == "reduce" and n.scope is Scope.TENSOR:
            stage[n] = 0
        elif n.op in ("reduce", "fold"):
            stage[n] = stage[n.args[0]] + 1
        else:
            stage[n] = max((stage[a] for a in n.args), default=0)
    return stage


def order_steps(sinks: list[Sink], partials: list[Partial]) -> tuple[Step, ...]:
    """A block's steps: for every stage its scalars, its unpacking, its folds, its loop."""
    needed = _needed([s.node for s in sinks] + [p.node.args[0] for p in partials])
    stage = stages(needed)
    last = max((stage[n] for n in needed), default=0)

    # a store overwrites what loads read, so it waits for the last loop
    at: dict[int, list[Sink]] = {s: [] for s in range(last + 1)}
    for n in needed:
        if n.op == "reduce" and n.scope is Scope.BLOCK:
            at[stage[n] - 1].append(Sink("reduce", n))
    for sink in sinks:
        if sink.node.scope is Scope.ELEMENT:
            at[last if sink.kind == "store" else stage[sink.node]].append(sink)

    folds = [n for n in needed if n.op == "fold"]
    order: list[tuple[int, Node | None]] = []  # (stage, the fold whose own part it is, or None)
    for s in range(last + 1):
        order += [(s, f) for f in folds if stage[f] == s]
        order.append((s, None))
    wanted = [at[s] if f is None else [Sink("accumulate", f.args[0], fold=f)] for s, f in order]
    loops = fill_loops(wanted)

    steps: list[Step] = []
    done: set[Node] = set()
    for (s, fold), loop in zip(order, loops, strict=True):
        ready = [n for n in needed if stage[n] <= s and n not in done]
        done.update(ready)
        scalars = tuple(n for n in ready if n.scope is not Scope.ELEMENT and _is_computed(n))
        if scalars:
            steps.append(Scalars(scalars))
        steps += [Unpack(n) for n in ready if is_packed(n)]
        if fold is not None:
            body = order_steps([Sink("accumulate", fold.args[1], fold=fold)], [])
            steps.append(Fold(fold, loop, body))
        elif loop.sinks:
            steps.append(loop)
    steps += [Put(s.name, s.node) for s in sinks if s.node.scope is not Scope.ELEMENT]
    steps += [Partial(p.index, p.node.args[0]) for p in partials]
    return tuple(steps)


def fill_loops(wanted: list[list[Sink]]) -> list[Loop]:
    """The loops that serve these sinks, each element computed where it is first needed."""
    computed: list[list[Node]] = []
    kept: dict[int, list[Node]] = {}
    home: dict[Node, int] = {}
    for number, sinks in enumerate(wanted):
        nodes: list[Node] = []
        for n in _needed_here(sinks, home):
            nodes.append(n)
            home.setdefault(n, number)
        for n in _operands(nodes, sinks):
            if n in home and n not in nodes and n not in kept.setdefault(home[n], []):
                kept[home[n]].append(n)
        computed.append(nodes)
    return [
        Loop(tuple(nodes), tuple(sinks) + tuple(Sink("keep", n) for n in kept.get(number, [])))
        for number, (nodes, sinks) in enumerate(zip(computed, wanted, strict=True))
    ]


def _needed_here(sinks: list[Sink], home: dict[Node, int]) -> list[Node]:
    """The elements to compute in a loop: below its sinks, but for what lies in an array."""
    nodes: list[Node] = []
    seen: set[Node] = set()

    def visit(n: Node) -> None:
        if n.scope is not Scope.ELEMENT or n.op == "const" or n in seen or in_array(n):
            return
        if n in home and cost(n) > RECOMPUTE:
            return
        seen.add(n)
        for a in n.args:
            visit(a)
        nodes.append(n)

    for sink in sinks:
        visit(_element(sink))
    return nodes


def _operands(nodes: list[Node], sinks: list[Sink]) -> list[Node]:
    return [a for n in nodes for a in n.args] + [_element(sink) for sink in sinks]


def _element(sink: Sink) -> Node:
    return sink.node.args[0] if sink.kind == "reduce" else sink.node


def in_array(n: Node) -> bool:
    """Whether the element lies in an array before any loop asks for it."""
    return n.op == "fold" or is_packed(n)


def is_packed(n: Node) -> bool:
    """Whether it is a field of codes that lie in planes."""
    return n.op == "field" and n.scope is Scope.ELEMENT and n.dtype.startswith("uint")


def cost(n: Node) -> int:
    """Rough cost of computing an element from memory and scalars again."""
    if n.scope is not Scope.ELEMENT or in_array(n):
        return 0
    own = _COST.get(str(n.attr), _COST.get(n.op, 0))
    return own + sum(cost(a) for a in n.args)


def _is_computed(n: Node) -> bool:
    """Constants and arguments of the call are written where they are used."""
    return n.op not in ("const", "param")


def _needed(roots: Iterable[Node]) -> list[Node]:
    """Every node a sweep computes, operands first; tensor reductions and fold bodies are closed."""
    order: list[Node] = []
    seen: set[Node] = set()

    def visit(n: Node) -> None:
        if n in seen:
            return
        seen.add(n)
        if n.op == "fold":
            visit(n.args[0])
        elif not (n.op == "reduce" and n.scope is Scope.TENSOR):
            for a in n.args:
                visit(a)
        order.append(n)

    for root in roots:
        visit(root)
    return order
