"""Lowering: a program becomes sweeps over memory, made of steps over one block.

Vocabulary
    stage  the number of block reductions that a node depends on in sequence: loop s computes the
           elements of stage s
    (sweep, step, sink, entry: see gradwire.lang.sweeps)

The passes, in the order of `lower`:
    1. tensor_reductions   number the whole-tensor reductions: their index in the workspace
    2. cut_sweeps          assign sinks to sweeps: partial results, then the stores
    3. stages              assign a stage to every node
    4. fill_loops          compute each element where it is first needed; keep the costly ones
    5. order_steps         order scalars, unpacking, folds and loops by stage
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence

from gradwire.lang import ir
from gradwire.lang.ir import Node, Scope
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
    Sweep,
    Unpack,
    Visit,
    operands,
)

RECOMPUTE = 2  # an element of this cost or less is recomputed instead of kept in an array
COSTLY = 100  # the cost from which on it no longer matters
_COST = {"random": 10, "div": 8, "sqrt": 8, "lookup": 4, "cast": 1, "alu": 1}


def lower(program: ir.Function) -> tuple[Sweep, ...]:
    """The sweeps of a program."""
    reductions = tensor_reductions(program)
    entries = entry_steps(program)
    cut = cut_sweeps(program, reductions)
    sweeps = []
    stored: dict[Node, int] = {}  # block results of earlier sweeps -> their tensor reduction
    for number, (sinks, partials) in enumerate(cut):
        ranks = [p for p in partials if isinstance(p.node.attr, ir.Rank)]
        plain = [p for p in partials if p not in ranks]
        sampled = [Sink("sample", p.node) for p in ranks if not is_local(p.node.args[0])]
        key = next((s.node for s in sinks if s.kind == "key" and is_foreseen(s.node)), None)
        selects = [s for s in sinks if s.kind in ("key", "stage")]
        others = [s for s in sinks if key and s not in selects]
        sweeps.append(
            Sweep(
                order_steps([s for s in sinks if s not in others] + sampled, plain, stored),
                tuple((p.index, str(p.node.attr)) for p in plain),
                tuple((p.index, p.node) for p in ranks),
                entries if number == len(cut) - 1 else (),
                key,
                order_steps(others, [], stored) if others else (),
                clears=any(s.kind == "flag" for s in sinks),
            )
        )
        # not sums: completing them overwrites the block results
        stored |= {p.node.args[0]: p.index for p in plain if p.node.attr in ("min", "max")}
    return tuple(sweeps)


def entry_steps(program: ir.Function) -> tuple[Step, ...]:
    """The steps for every entry of the selection that a program makes."""
    if not any(n.op == "select" for _, n in program.fields):
        return ()
    sinks = [
        Sink("field", n, name)
        for name, n in program.fields
        if n.scope is Scope.SELECTION and n.op != "select"
    ]
    sinks += [Sink("patch", n, target) for target, n, s in program.patches if s.op == "select"]
    return (_row_scalars([s.node for s in sinks]), Loop(_entry_nodes(sinks), tuple(sinks)))


def is_local(element: Node) -> bool:
    """Whether an element does not depend on other elements of its block or on a payload."""
    local = ("const", "param", "load", "alu", "lookup", "cast", "index")
    needed = _needed([element])
    return all((n.op in local or n.scope <= Scope.TENSOR) and not looked_up(n) for n in needed)


def is_foreseen(selection: Node) -> bool:
    """Whether a sample tells, before the sweep, how large the keys are that will be selected."""
    return any(a.dtype != "bool" for a in selection.args) and all(map(is_local, selection.args))


def sample_nodes(elements: Iterable[Node]) -> tuple[Scalars, tuple[Node, ...]]:
    """The scalars of the row, and the elements, to compute for every value of a sample."""
    roots = list(elements)
    computed = (n for n in _needed(roots) if n.scope is Scope.ELEMENT and n.op != "const")
    return _row_scalars(roots), tuple(computed)


def _row_scalars(roots: Iterable[Node]) -> Scalars:
    """The scalars of the row that these nodes depend on."""
    needed = _needed(roots)
    return Scalars(tuple(n for n in needed if n.scope <= Scope.TENSOR and _is_computed(n)))


def _entry_nodes(sinks: list[Sink]) -> tuple[Node, ...]:
    """The nodes computed per entry: those of selection scope, and gathered elements."""

    def computed(n: Node) -> bool:
        return n.scope in (Scope.SELECTION, Scope.ELEMENT) and n.op != "const"

    def below(n: Node) -> tuple[Node, ...]:
        if not computed(n) or n.op == "field":
            return ()
        if n.op == "gather":  # the program's own selection has been staged
            return n.args[:1] if n.args[1].op != "select" else ()
        return n.args

    return tuple(n for n in ir.walk((s.node for s in sinks), below) if computed(n))


def tensor_reductions(program: ir.Function) -> tuple[Node, ...]:
    """The whole-tensor reductions; the position of each is its index in the workspace."""
    return tuple(n for n in ir.walk(program.roots) if n.op == "reduce" and n.scope is Scope.TENSOR)


def value_reads(program: ir.Function) -> int:
    """How often values must be read: twice if the program reduces the whole tensor, else once."""
    return 1 + any(not isinstance(n.attr, ir.Rank) for n in tensor_reductions(program))


def staged_numbers(program: ir.Function) -> int:
    """Numbers per entry in the workspace: its index, its key, and the gathered nodes."""
    nodes = list(ir.walk(program.roots))
    selects = any(n.op == "select" for n in nodes)
    return 2 + len(gathered(program)) if selects else 0


def is_ranked(program: ir.Function) -> bool:
    """Whether a program selects by the size of a key, not only by a condition."""
    selections = [n for _, n in program.fields if n.op == "select"]
    return any(a.dtype != "bool" for n in selections for a in n.args)


def gathered(program: ir.Function) -> tuple[Node, ...]:
    """The nodes that gather at the program's own selection, in order."""
    return tuple(n for n in ir.walk(program.roots) if n.op == "gather" and n.args[1].op == "select")


def cut_sweeps(
    program: ir.Function, reductions: tuple[Node, ...]
) -> list[tuple[list[Sink], list[Partial]]]:
    """The outputs of each sweep: one sweep per depth of tensor reductions, then the last."""
    depth: dict[Node, int] = {}
    ending = set(reductions)
    for n in ir.walk(program.roots):
        depth[n] = max((depth[a] for a in n.args), default=0) + (n in ending)
    last = max(depth.values())
    sweeps: list[tuple[list[Sink], list[Partial]]] = [
        ([], [Partial(i, n) for i, n in enumerate(reductions) if depth[n] == level])
        for level in range(1, last + 1)
    ]
    fields = dict(program.fields)
    # offsets of kept codes depend on the flags of all earlier blocks: flags need an earlier sweep
    flags = {n.args[1] for n in fields.values() if n.op == "keep"}
    early = [Sink("flag", n, name) for name, n in fields.items() if n in flags]
    if early:
        sweeps.append((early, []))
    sinks = [
        Sink("field", n, name)
        for name, n in fields.items()
        if n not in flags and (n.scope is not Scope.SELECTION)
    ]
    sinks += [Sink("key", n, name) for name, n in fields.items() if n.op == "select"]
    sinks += [Sink("store", n, target) for target, n in program.stores]
    sinks += [Sink("stage", n) for n in gathered(program)]
    sinks += [Sink("patch", n, t, selection=s) for t, n, s in program.patches if s.op != "select"]
    return [*sweeps, (sinks, [])]


def stages(nodes: Iterable[Node], ready: Container[Node] = ()) -> dict[Node, int]:
    """The stage of every node; operands come first, and tensor reductions have stage 0."""
    stage: dict[Node, int] = {}
    for n in nodes:
        if n in ready or (n.op == "reduce" and n.scope is Scope.TENSOR):
            stage[n] = 0
        elif n.op in ("reduce", "fold", "rotate"):
            stage[n] = stage[n.args[0]] + 1
        elif n.op == "select":
            stage[n] = max(stage[a] for a in n.args) + 1
        elif found := looked_up(n):  # codes that a loop computes are looked up after it
            stage[n] = stage[found.code] + (not is_packed(found.code))
        else:
            stage[n] = max((stage[a] for a in n.args), default=0)
    return stage


def order_steps(
    sinks: list[Sink], partials: list[Partial], stored: Mapping[Node, int] | None = None
) -> tuple[Step, ...]:
    """The steps of a block: for every stage its scalars, unpacking, transforms, folds and loop.

    `stored`: block results of earlier sweeps -> the index of their tensor reduction.
    """
    stored = stored or {}
    visits = [s for s in sinks if s.selection is not None]
    staged = [s for s in sinks if s.kind == "stage"]
    roots = [n for s in sinks for n in (*s.reads, s.node) if s.kind != "sample" or n is not s.node]
    needed = _needed(roots + [p.node.args[0] for p in partials], stored)
    stage = stages(needed, stored)
    for n in needed:
        if n.op == "select":  # staging comes after all gathered nodes
            stage[n] = max(stage[a] for a in (*n.args, *(s.element for s in staged))) + 1
    last = max((stage[n] for n in needed), default=0)

    # stores overwrite what loads read, so they are in the last loop
    at: dict[int, list[Sink]] = {s: [] for s in range(last + 1)}
    for n in needed:
        if n.op == "reduce" and n.scope is Scope.BLOCK and n not in stored:
            at[stage[n] - 1].append(Sink("reduce", n))
        elif n.op == "rotate":
            at[stage[n] - 1].append(Sink("rotate", n))
        elif n.op == "select":
            at[stage[n] - 1].append(Sink("key", n))
        elif (found := looked_up(n)) and not is_packed(found.code):
            kept = Sink("keep", found.code)
            at[stage[n] - 1] += [kept] if kept not in at[stage[n] - 1] else []
    for sink in sinks:
        if sink.kind == "sample":
            at[stage[sink.element]].append(sink)
        elif sink.node.scope is Scope.ELEMENT:
            at[last if sink.kind == "store" else stage[sink.node]].append(sink)

    of_stage: list[list[Node]] = [[] for _ in range(last + 1)]
    for n in needed:
        of_stage[stage[n]].append(n)
    order: list[tuple[int, Node | None]] = []  # (stage, the fold or selection, or None: its loop)
    wanted: list[list[Sink]] = []
    for s in range(last + 1):
        for n in of_stage[s]:
            if n.op == "fold":
                order.append((s, n))
                wanted.append([Sink("accumulate", n.args[0], fold=n)])
            elif n.op == "select":
                order.append((s, n))
                wanted.append(staged)
        order.append((s, None))
        wanted.append(at[s])
    loops = fill_loops(wanted)

    steps: list[Step] = [Recall(stored[n], n) for n in needed if n in stored]
    for (s, special), loop in zip(order, loops, strict=True):
        ready, of_stage[s] = [n for n in of_stage[s] if n not in stored], []
        scalars = tuple(n for n in ready if n.scope <= Scope.BLOCK and _is_computed(n))
        if scalars:
            steps.append(Scalars(scalars))
        steps += [Unpack(n) for n in ready if is_packed(n)]
        steps += [found for n in ready if (found := looked_up(n))]
        steps += [Rotate(n) for n in ready if n.op == "rotate"]
        if special is None:
            if loop.sinks:
                steps.append(loop)
        elif special.op == "select":
            steps.append(Stage(special, loop))
        else:
            steps.append(Fold(special, loop, _fold_body(special)))
    steps += [
        Put(s.name, s.node)
        for s in sinks
        if s.kind in ("field", "flag") and s.node.scope <= Scope.BLOCK
    ]
    steps += [Partial(p.index, p.node.args[0]) for p in partials]
    if visits:
        assert visits[0].selection is not None
        steps.append(Visit(visits[0].selection, Loop(_entry_nodes(visits), tuple(visits))))
    return tuple(steps)


def _fold_body(fold: Node) -> tuple[Step, ...]:
    """The steps for the payload of one peer."""
    selection = fold.args[2] if len(fold.args) > 2 else None
    return order_steps([Sink("accumulate", fold.args[1], fold=fold, selection=selection)], [])


def fill_loops(wanted: list[list[Sink]]) -> list[Loop]:
    """The loops for these sinks; each element is computed in the first loop that needs it."""
    computed: list[list[Node]] = []
    loop_of: dict[Node, int] = {}
    kept = {(i, s.node) for i, sinks in enumerate(wanted) for s in sinks if s.kind == "keep"}
    for number, sinks in enumerate(wanted):
        nodes = _needed_in_loop(sinks, loop_of)
        here = set(nodes)
        if all(sink.kind != "stage" for sink in sinks):  # staging skips elements
            for n in nodes:
                loop_of.setdefault(n, number)
        for n in operands(nodes, sinks):
            if n in loop_of and n not in here and (loop_of[n], n) not in kept:
                kept.add((loop_of[n], n))
                wanted[loop_of[n]].append(Sink("keep", n))
        computed.append(nodes)
    return [Loop(tuple(nodes), tuple(sinks)) for nodes, sinks in zip(computed, wanted, strict=True)]


def _needed_in_loop(sinks: list[Sink], loop_of: dict[Node, int]) -> list[Node]:
    """The elements to compute in a loop: those its sinks depend on, unless they are in arrays."""

    def computed(n: Node) -> bool:
        if n.scope is not Scope.ELEMENT or n.op == "const" or in_array(n):
            return False
        return n not in loop_of or cost(n) <= RECOMPUTE

    def below(n: Node) -> tuple[Node, ...]:
        return n.args if computed(n) else ()

    return [n for n in ir.walk((n for s in sinks for n in s.reads), below) if computed(n)]


def in_array(n: Node) -> bool:
    """Whether a step other than a loop stores the element in an array."""
    return n.op in ("fold", "rotate") or is_packed(n) or looked_up(n) is not None


def is_packed(n: Node) -> bool:
    """Whether it is a field of codes, packed in planes."""
    return n.op == "field" and n.scope is Scope.ELEMENT and n.dtype in ir.CODES


@ir.memoised(lambda n: ())
def looked_up(n: Node) -> LookUp | None:
    """The step that looks numbers up for the codes of a whole array, or None."""
    if n.op != "lookup" or n.scope is not Scope.ELEMENT or n.args[0].op != "cast":
        return None
    code, numbers = n.args[0].args[0], n.args[1:]
    if code.dtype == "trit" or code.dtype not in ir.CODES:
        return None
    size = 2 ** ir.BITS[code.dtype]
    return LookUp(n, code, (numbers + numbers[-1:] * size)[:size])


def is_table(numbers: Sequence[Node]) -> bool:
    """Whether these are numbers of the codec's table, in its order."""
    first = numbers[0].attr
    return isinstance(first, int) and all(n.attr == first + k for k, n in enumerate(numbers))


@ir.memoised()
def cost(n: Node) -> int:
    """The approximate cost of recomputing an element from memory and scalars, or COSTLY."""
    if n.scope is not Scope.ELEMENT or in_array(n):
        return 0
    own = _COST.get(str(n.attr), _COST.get(n.op, 0))
    return min(COSTLY, own + sum(cost(a) for a in n.args))


@ir.memoised()
def known_range(n: Node) -> tuple[float, float] | None:
    """The range of an expression of constants, `where` and `add`; None for any other."""
    if n.op == "const" and isinstance(n.attr, float) and math.isfinite(n.attr):
        return n.attr, n.attr
    if n.op != "alu" or n.attr not in ("where", "add"):
        return None
    first, second = (known_range(a) for a in n.args[-2:])
    if first is None or second is None:
        return None
    if n.attr == "add":  # rounded as the target rounds it: else 2^24 + 1 - 2^24 would be 1
        low, high = (ir.single(a + b) for a, b in zip(first, second, strict=True))
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None
    return min(first[0], second[0]), max(first[1], second[1])


def _is_computed(n: Node) -> bool:
    """Whether it is a computed value: constants and arguments of the call are inlined."""
    return n.op not in ("const", "param")


def _needed(roots: Iterable[Node], ready: Container[Node] = ()) -> list[Node]:
    """Every node a sweep computes, operands first; stops at tensor reductions and fold bodies."""

    def below(n: Node) -> tuple[Node, ...]:
        if n.op == "fold":
            return n.args[:1]
        if n in ready or (n.op == "reduce" and n.scope is Scope.TENSOR):
            return ()
        found = looked_up(n)
        return (found.code, *found.numbers) if found else n.args

    return list(ir.walk(roots, below))
