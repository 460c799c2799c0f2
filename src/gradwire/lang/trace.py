"""Tracing: a codec's `encode` and `decode` run once on symbols, which records IR.

Vocabulary
    Value   a symbol: a node; `blocked`: whether it came from `g.blocks(n)`, so that reductions are
            per block; `within`: whether its elements did, and not only numbers of blocks
    Trace   the record of one run of a codec: its block, its random streams, its operators

Python's `if` works on the codec's own fields and is evaluated while tracing. A symbol has no truth
value, so data-dependent choices are written as `where(condition, a, b)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from gradwire.errors import ConfigError
from gradwire.lang import ir, shapes
from gradwire.lang.source import LanguageError, here, line_of, mistake

MAX_BLOCK = 65536
MAX_SELECTION_BLOCK = 32768
ORIGINS = 2**16
MAX_POWER = 16
MAX_SIZE = 2**31 - 1  # of what kernels count in 32 bits
_ZEROS = (ir.const(0.0), ir.const(-0.0))


@dataclass
class Trace:
    """The record of one run.

    Attributes:
        native: dtype of the values, one of "fp32", "fp16", "bf16".
        block: set by `g.blocks(n)`, or None.
        source: whether it decodes the peer payload of a fold, rather than the own payload.
        feedback: whether a residual keeps the error of what it encodes.
        streams: number of `random()` calls so far; each has a stream of its own.
        operators: names of the language's operators used, in order of first use.
        table: the numbers given to `table()`, or empty.
    """

    native: str
    block: int | None = None
    source: bool = False
    feedback: bool = False
    streams: int = 0
    operators: list[str] = field(default_factory=list)
    table: tuple[float, ...] = ()

    def uses(self, operator: str) -> None:
        if operator not in self.operators:
            self.operators.append(operator)


_active: ContextVar[Trace | None] = ContextVar("gradwire_trace", default=None)


@contextmanager
def tracing(trace: Trace, codec: object) -> Iterator[Trace]:
    """Make `trace` the active trace, which operators record into; what a method of the codec
    raises, but for a `ConfigError` of its own, is a `LanguageError` at its line."""
    token = _active.set(trace)
    try:
        yield trace
    except Exception as error:
        at, found = line_of(error, codec), error
        if not isinstance(error, ConfigError | RecursionError | MemoryError):
            found = LanguageError("", f"{type(error).__name__}: {error}".rstrip(": "))
        if isinstance(found, LanguageError) and at not in ("", found.location):
            raise LanguageError(at, found.problem) from error
        raise
    finally:
        _active.reset(token)


def active() -> Trace:
    """The active trace; a `LanguageError` outside encode and decode."""
    trace = _active.get()
    if trace is None:
        raise mistake("codec operators work only inside a codec's encode or decode")
    return trace


Operand = "Value | float | int"
_OPERATORS = "use the operators of gradwire.lang.ops"
_OF_NUMPY = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne",
}  # fmt: skip


def _refused(why: str) -> Any:
    def refuse(*_: object) -> Value:
        raise mistake(why)

    return refuse


_Operator = Callable[["Value", object], "Value"]


def _both_ways(function: str) -> tuple[_Operator, _Operator]:
    """An operator with the symbol on its left, and with it on its right."""

    def left(symbol: Value, other: object) -> Value:
        return apply(function, symbol, other)

    def right(symbol: Value, other: object) -> Value:
        return apply(function, other, symbol)

    return left, right


class Value:
    """A symbol in a traced codec. Arithmetic is fp32; comparisons give symbolic booleans."""

    __slots__ = ("blocked", "node", "within")
    __hash__ = object.__hash__

    def __init__(self, node: ir.Node, blocked: bool = False, within: bool = False) -> None:
        self.node = node
        self.blocked = blocked
        self.within = within

    def blocks(self, n: int) -> Value:
        """The same elements in blocks of `n`: reductions over them give one value per block."""
        trace = active()
        size = integer(n)
        if size is None or not 1 <= size <= MAX_BLOCK:
            raise mistake(f"blocks({n!r}): a block holds 1 to {MAX_BLOCK} values")
        if self.node.scope is not ir.Scope.ELEMENT:
            raise mistake("blocks(): only elements can be divided into blocks")
        if trace.block not in (None, size):
            raise mistake(f"blocks({n}): this codec uses blocks of {trace.block}")
        trace.block = size
        return Value(self.node, blocked=True, within=True)

    __bool__ = _refused("a symbol has no truth value while tracing: use where()")
    __iter__ = _refused("a symbol cannot be iterated: operators act on all elements")
    __getitem__ = _refused("a symbol cannot be indexed: use topk(), filter() or sort()")
    __len__ = _refused("the number of values is not known while tracing: use count()")
    __float__ = _refused(f"a symbol is not a number while tracing: {_OPERATORS}")
    __int__ = __index__ = __complex__ = __float__

    def __format__(self, form: str) -> str:
        return format(float(self), form) if form else repr(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and numpy ask of every object
            raise AttributeError(name)
        raise mistake(f"a symbol has no {name}: {_OPERATORS}")

    def __array_ufunc__(self, function: Any, method: str, *operands: object, **_: object) -> Value:
        # of numpy's numbers, which take the operator from the symbol on their right
        import numpy  # whose function this is; sources are also generated without it

        name = _OF_NUMPY.get(function.__name__)
        if name is None or method != "__call__":
            raise mistake(f"numpy's {function.__name__} does not take symbols: {_OPERATORS}")
        # a number that is compared comes as an array of no dimension
        given = [x.item() if isinstance(x, numpy.ndarray) and not x.ndim else x for x in operands]
        if name in ("gt", "ge"):
            return apply({"gt": "lt", "ge": "le"}[name], *reversed(given))
        return apply(name, *given)

    def __pow__(self, exponent: object, modulus: object = None) -> Value:
        if modulus is not None:
            raise mistake(f"symbols have no operator %: {_OPERATORS}")
        times = integer(exponent)
        if times is None and isinstance(exponent, float) and exponent.is_integer():
            times = int(exponent)
        if times is None or not 1 <= times <= MAX_POWER:
            raise mistake(
                f"x ** {exponent!r}: an exponent is 1 to {MAX_POWER}: write sqrt(x), inverse(x) or "
                "products",
            )
        product = self
        for _ in range(times - 1):
            product = product * self
        return product

    def __pos__(self) -> Value:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, *_: object) -> Value:
        name = getattr(function, "__name__", str(function))
        raise mistake(f"torch's {name} does not take symbols: {_OPERATORS}")

    __add__, __radd__ = _both_ways("add")
    __sub__, __rsub__ = _both_ways("sub")
    __mul__, __rmul__ = _both_ways("mul")
    __truediv__, __rtruediv__ = _both_ways("div")
    __and__, __rand__ = _both_ways("and")
    __or__, __ror__ = _both_ways("or")
    __lt__, __gt__ = _both_ways("lt")
    __le__, __ge__ = _both_ways("le")
    __eq__ = _both_ways("eq")[0]  # type: ignore[assignment]
    __ne__ = _both_ways("ne")[0]  # type: ignore[assignment]

    def __neg__(self) -> Value:
        return apply("neg", self)

    def __abs__(self) -> Value:
        return apply("abs", self)

    def __invert__(self) -> Value:
        return apply("not", self)


for _name, _operator in {
    "rpow": "**", "mod": "%", "rmod": "%", "floordiv": "//", "rfloordiv": "//", "divmod": "divmod",
    "rdivmod": "divmod", "matmul": "@", "rmatmul": "@", "xor": "^", "rxor": "^", "lshift": "<<",
    "rlshift": "<<", "rshift": ">>", "rrshift": ">>", "round": "round", "trunc": "trunc",
    "floor": "math.floor", "ceil": "math.ceil", "contains": "in", "setitem": "x[...] =",
}.items():  # fmt: skip
    setattr(Value, f"__{_name}__", _refused(f"symbols have no operator {_operator}: {_OPERATORS}"))


@dataclass(frozen=True)
class Payload:
    """The result of `concat`, which `encode` must return: the fields in wire order."""

    fields: tuple[tuple[str, Value], ...]


def lift(operand: object) -> Value:
    """A symbol for a symbol or a Python number; anything else is a `LanguageError`."""
    if isinstance(operand, Value):
        return operand
    return Value(ir.const(constant(operand)))


def constant(number: object) -> float:
    """A number of Python or numpy; anything else is a `LanguageError`."""
    if isinstance(number, bool) or not isinstance(number, Real):
        kind = type(number).__name__
        raise mistake(f"expected a symbol or a number, not {kind}")
    try:
        return float(number)
    except OverflowError:
        raise mistake("a constant is too large: use float('inf')") from None


def integer(number: object) -> int | None:
    """A whole number of Python or numpy, as Python's; None for anything else."""
    whole = isinstance(number, Integral) and not isinstance(number, bool)
    return int(number) if whole else None  # type: ignore[call-overload]


def size(number: object, least: int, option: str) -> int:
    """A whole number from `least` to `MAX_SIZE`, as Python's; anything else is a
    `LanguageError`."""
    whole = integer(number)
    if whole is None or not least <= whole <= MAX_SIZE:
        raise mistake(f"{option}={number!r} must be {least} to {MAX_SIZE}")
    return whole


def record(
    op: str,
    args: Iterable[ir.Node] = (),
    attr: object = None,
    dtype: str = "fp32",
    scope: ir.Scope | None = None,
) -> ir.Node:
    """An operation, as a node with the codec's current line."""
    return ir.node(op, args, attr, dtype=dtype, scope=scope, location=here())


def apply(function: str, *operands: object) -> Value:
    """An alu operation on symbols and numbers; checks the kinds of the operands."""
    values = [lift(operand) for operand in operands]
    _, kind, _ = ir.ALU[function]
    for position, value in enumerate(values):
        wants_bool = kind == "bool" or (kind == "choice" and position == 0)
        dtype = value.node.dtype
        if dtype == "selection" or (dtype == "bool") != wants_bool:
            wanted = "a condition" if wants_bool else "a number"
            raise mistake(
                f"{function}: operand {position + 1} must be {wanted}, not {dtype}",
            )
    nodes = meet([as_number(v.node) for v in values])
    if function == "div" and nodes[1] in _ZEROS and nodes[0].op != "const":  # as in inverse(0)
        raise mistake("a division by 0")
    result = ir.alu(function, *nodes, location=here())
    return Value(result, any(v.blocked for v in values), any(v.within for v in values))


def meet(nodes: list[ir.Node]) -> list[ir.Node]:
    """Operands of one operation; values of blocks are gathered if other operands are entries."""
    scopes = {n.scope for n in nodes}
    if ir.Scope.MATRIX in scopes and scopes & {
        ir.Scope.BLOCK, ir.Scope.SELECTION, ir.Scope.ELEMENT,
    }:  # fmt: skip
        raise mistake("a matrix and elements do not mix: use elements(matrix)")
    shapes.alike(nodes)
    if ir.Scope.SELECTION not in scopes:
        return nodes
    if ir.Scope.ELEMENT in scopes:
        raise mistake("elements and entries do not mix: use gather(x, selection)")
    chosen = {selection_of(n) for n in nodes if n.scope is ir.Scope.SELECTION}
    if len(chosen) > 1:
        raise mistake("entries of two selections do not mix")
    (selection,) = chosen
    return [_of_entries(n, selection) if n.scope is ir.Scope.BLOCK else n for n in nodes]


def _of_entries(n: ir.Node, selection: ir.Node) -> ir.Node:
    """A number or condition of a block, for each of its entries."""
    if n.dtype == "bool":
        number = ir.alu("where", n, ir.const(1.0), ir.const(0.0), location=here())
        return ir.alu("ne", _of_entries(number, selection), ir.const(0.0))
    return record("gather", (n, selection), scope=ir.Scope.SELECTION)


def _entries(n: ir.Node) -> list[ir.Node]:
    if n.dtype == "selection" or n.op == "gather":
        return []
    return [a for a in n.args if a.scope is ir.Scope.SELECTION][:1]


@ir.memoised(_entries)
def selection_of(n: ir.Node) -> ir.Node:
    """The selection that a node of selection scope belongs to."""
    if n.dtype == "selection":
        return n
    if n.op == "gather":
        return n.args[1]
    (entries,) = _entries(n)
    return selection_of(entries)


def as_number(node: ir.Node) -> ir.Node:
    """The node itself, or its exact fp32 value if it has a narrower dtype."""
    if node.dtype in ("fp32", "bool"):
        return node
    return ir.node("cast", (node,), "nearest", dtype="fp32", location=node.location)


def whole(value: Value, operator: str) -> Value:
    """The value, unless its elements are those of blocks: of those, `operator` takes no account."""
    if lift(value).within:
        raise mistake(
            f"{operator}: takes the whole tensor, and not each of blocks({active().block}): give "
            f"it what was there before blocks()",
        )
    return value


def numbers_of_elements(value: Value, operator: str) -> ir.Node:
    """The node as fp32, if it is numbers of elements; else a `LanguageError`."""
    node = as_number(lift(value).node)
    if node.scope is not ir.Scope.ELEMENT or node.dtype == "bool":
        found = "conditions" if node.dtype == "bool" else f"{node.scope.name.lower()} scope"
        raise mistake(f"{operator}: takes numbers of elements, not {found}")
    return node


def stream(shared: str | None = None) -> ir.Stream:
    """The next stream of random numbers, or the stream of this name that all ranks share."""
    if shared is not None:  # so its number must not depend on the order of calls
        try:
            name = bytes(shared, "utf-8")
        except (TypeError, UnicodeEncodeError):
            raise mistake(f"random: shared is a name, not {shared!r}") from None
        digest = hashlib.blake2b(name, digest_size=8).digest()
        # the first 2^16 numbers are left to origins, which are hashed with the same key (rng.py)
        number = ORIGINS + int.from_bytes(digest, "little") % (2**64 - ORIGINS)
        return ir.Stream(number, shared=True)
    trace = active()
    trace.streams += 1
    return ir.Stream(trace.streams - 1, source=trace.source)
