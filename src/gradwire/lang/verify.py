"""The rules for a well-formed codec; each error names the line of the codec that breaks one.

trace.py and ops.py check operand kinds and block sizes, since they know the current line. This file
has the checks that need a whole method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from gradwire.lang import ir
from gradwire.lang.codec import Codec
from gradwire.lang.ir import Scope
from gradwire.lang.source import LanguageError
from gradwire.lang.trace import MAX_SELECTION_BLOCK, Payload, Value, selection_of

MAX_GATHERED = 16  # of Run in emit/selection.h


def takes_latest(encode: Callable[..., Any]) -> bool:
    """Whether `encode` takes the new gradient besides the sum with the residual."""
    return len(inspect.signature(encode).parameters) > 1


def payload(codec: Codec, result: object) -> None:
    """Check that `encode` returned concat(...) of storable values with the names of `decode`."""
    at = _definition(codec, "encode")
    if not isinstance(result, Payload):
        raise LanguageError(at, f"encode must return concat(...), not {type(result).__name__}")
    names = [name for name, _ in result.fields]
    parameters = inspect.signature(codec.decode).parameters.values()
    taken = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not (set(taken) <= set(names) if rest else set(taken) == set(names)):
        raise LanguageError(
            _definition(codec, "decode"),
            f"decode takes ({', '.join(taken)}), but the payload has ({', '.join(names)})",
        )
    own = set(inspect.signature(type(codec).decode).parameters) - {p.name for p in parameters}
    for name, value in result.fields:
        if name in own:
            raise LanguageError(at, f"field {name}: decode has its codec by that name: use another")
        n = value.node
        if n.dtype not in ir.STORABLE or n.scope is Scope.CONSTANT:
            problem = f"field {name}: a {n.dtype} cannot be stored"
            raise LanguageError(_at(codec, "encode", n), problem)
        if n.scope is Scope.MATRIX and not _is_factor(n):
            problem = f"field {name}: a stored matrix must be a factor of decomp, as floats"
            raise LanguageError(_at(codec, "encode", n), problem)
    nodes = [value.node for _, value in result.fields]
    if len(set(nodes)) < len(nodes):
        raise LanguageError(at, "concat: one value has two names: store it once")
    for n in ir.walk(nodes):
        if n.op == "scatter":
            raise LanguageError(_at(codec, "encode", n), "scatter belongs in decode")
    _tails(codec, result, at)


def _is_factor(n: ir.Node) -> bool:
    made = n.args[0] if n.op == "cast" else n
    return n.dtype in ir.FLOATS and made.op == "decompose"


def _tails(codec: Codec, result: Payload, at: str) -> None:
    """Check that fields whose length depends on data come after the field that determines it."""
    nodes = [value.node for _, value in result.fields]
    selections = [n for n in nodes if n.op == "select"]
    kept = [n for n in nodes if n.op == "keep"]
    if len(selections) + len(kept) > 1:
        raise LanguageError(at, "a payload can hold only one selection or one field of kept codes")
    sorts = {n for n in ir.walk(nodes) if isinstance(n.attr, ir.Rank)}
    if len(sorts) > 1:
        raise LanguageError(at, "a codec can use one value of one sort")
    for number, n in enumerate(nodes):
        if n.op == "keep" and n.args[1] not in nodes[:number]:
            problem = "keep: its flag must be a field before it"
            raise LanguageError(_at(codec, "encode", n), problem)
        entries = n.scope is Scope.SELECTION and n.op != "select"
        if entries and selection_of(n) not in nodes[:number]:
            problem = "the selection must be a field before its entries"
            raise LanguageError(_at(codec, "encode", n), problem)


def same(codec: Codec, found: object, before: object) -> None:
    """Check that every trace of encode and encode_sum stores the same fields and blocks."""
    if found != before:
        raise LanguageError(
            _definition(codec, "encode_sum"),
            "encode_sum must store the same fields as encode, in blocks of the same size",
        )


def table(codec: Codec, found: tuple[float, ...], before: tuple[float, ...]) -> None:
    """Check that a codec has one table."""
    if found and before and not ir.same_numbers(found, before):
        raise LanguageError(_definition(codec, "encode"), "a codec has one table of numbers")


def block(codec: Codec, size: int, selects: bool) -> None:
    """Check that a block's count of selected elements fits in two bytes."""
    if size > MAX_SELECTION_BLOCK and selects:
        raise LanguageError(
            _definition(codec, "encode"),
            f"blocks({size}): with a selection a block holds at most {MAX_SELECTION_BLOCK} values",
        )


def gathered(codec: Codec, number: int) -> None:
    """Check the number of values gathered per entry; error feedback needs two of them."""
    if number > MAX_GATHERED:
        raise LanguageError(
            _definition(codec, "encode"),
            f"gather: encode can gather {MAX_GATHERED - 2} numbers per entry, not {number - 2}",
        )


def drawn(fields: Iterable[ir.Node]) -> frozenset[tuple[int, Scope]]:
    """The number and scope of each random number that these fields are made of."""
    return frozenset(
        (n.attr.number, n.scope)
        for n in ir.walk(fields)
        if n.op == "random" and isinstance(n.attr, ir.Stream) and not n.attr.shared
    )


def elements(
    codec: Codec,
    result: object,
    allowed: set[ir.Node],
    again: frozenset[tuple[int, Scope]] = frozenset(),
) -> None:
    """Check that `decode` returned one number per element, computed from the fields and the
    encoder's random numbers only.

    `allowed`: the fields; `again`: the random numbers, as `drawn` gives them.
    """
    at = _definition(codec, "decode")
    if not isinstance(result, Value):
        raise LanguageError(at, f"decode must return elements, not {type(result).__name__}")
    if result.node.dtype == "bool":
        raise LanguageError(at, "decode must return numbers, not conditions")
    if result.node.scope is Scope.MATRIX:
        raise LanguageError(at, "decode must return elements, not a matrix: use elements(matrix)")
    if result.node.scope is not Scope.ELEMENT:
        raise LanguageError(at, "decode must return one value per element")
    below = set(ir.walk(allowed))
    if result.node.op == "scatter" and result.node.args[1] not in allowed:
        raise LanguageError(at, "decode must scatter to the selection that the payload holds")
    stack = [result.node]
    while stack:
        n = stack.pop()
        if n in below:
            continue
        below.add(n)
        problem = _misplaced(n, result.node, again)
        if problem is not None:
            raise LanguageError(_at(codec, "decode", n), problem)
        stack.extend(n.args)


def _misplaced(n: ir.Node, root: ir.Node, again: frozenset[tuple[int, Scope]]) -> str | None:
    """Why a node cannot be used in decode, or None."""
    if n.op == "scatter" and n is not root:
        return "scatter must come last in decode: compute before it"
    if n.op == "load":
        return "decode can use the payload only, not the gradient"
    if n.op == "reduce":  # it would need more sweeps in every derived form
        return "decode cannot reduce: send the result as a field"
    for number, scope in drawn([n]) - again if n.op == "random" else ():
        return (
            f"random() number {number + 1} of decode is that of encode again, and encode makes no "
            f"field of one per {scope.name.lower()}: draw it there, or use random(shared=NAME)"
        )
    if n.op == "gather" and n.args[0].scope is Scope.ELEMENT:
        computed = ("alu", "lookup", "cast", "const", "param", "index", "random")
        below = (a for a in ir.walk([n.args[0]]) if a.scope is Scope.ELEMENT)
        if any(a.op not in computed for a in below):
            return "decode can gather only what depends on positions: send the rest as entries"
    return None


def _at(codec: Codec, method: str, n: ir.Node) -> str:
    """The line of the codec that made a node, unless an equal node of another codec came first."""
    definition = _definition(codec, method)
    file = definition.rpartition(":")[0]
    return n.location if n.location.rpartition(":")[0] == file else definition


def _definition(codec: Codec, method: str) -> str:
    function = getattr(type(codec), method)
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"
