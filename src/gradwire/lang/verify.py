"""What a well-formed codec must be; each error names the line of the codec that breaks it.

Kinds of operands and block sizes are checked where the operators are (trace.py, ops.py), since the
line is at hand there. Here stands what can be said only of a whole method.
"""

from __future__ import annotations

import inspect

from gradwire.lang import ir
from gradwire.lang.codec import Codec
from gradwire.lang.source import LanguageError
from gradwire.lang.trace import Payload, Value


def payload(codec: Codec, result: object) -> None:
    """`encode` returned concat(...) of storable values, named as `decode` takes them."""
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
    for name, value in result.fields:
        n = value.node
        if n.dtype not in ir.STORABLE or n.scope is ir.Scope.CONSTANT:
            raise LanguageError(n.location or at, f"field {name}: a {n.dtype} cannot be stored")


def elements(codec: Codec, result: object, allowed: set[ir.Node]) -> None:
    """`decode` returned one number an element, made from the payload's fields alone."""
    at = _definition(codec, "decode")
    if not isinstance(result, Value):
        raise LanguageError(at, f"decode must return elements, not {type(result).__name__}")
    if result.node.dtype == "bool":
        raise LanguageError(at, "decode must return numbers, not conditions")
    if result.node.scope is not ir.Scope.ELEMENT:
        raise LanguageError(at, "decode must return one value an element")
    below = set(ir.walk(allowed))
    stack = [result.node]
    while stack:
        n = stack.pop()
        if n in below:
            continue
        if n.op == "load":
            raise LanguageError(n.location or at, "decode sees the payload only, not the gradient")
        if n.op == "reduce":
            # a decoder that reduces would need sweeps of its own in every derived form
            raise LanguageError(
                n.location or at, "decode cannot reduce: send the result as a field"
            )
        stack.extend(n.args)


def _definition(codec: Codec, method: str) -> str:
    function = getattr(type(codec), method)
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"
