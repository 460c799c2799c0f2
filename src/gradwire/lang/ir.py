"""The intermediate representation: one kind of node, twenty operations, one kind of program.

Vocabulary
    node       a pure computation; identical nodes are one object, so `is` means "same value"
    scope      how many values a node represents: one per call, per row, per block, per selected
               element, per element; or a matrix made of the row
    selection  some elements of a row, in the order of their positions; each is an entry
    program    what a kernel form writes: nodes stored to values, to the residual, to the payload

| op | args | attr | meaning |
| --- | --- | --- | --- |
| const | - | float | the number itself |
| load | - | "values", "residual" | the element in memory |
| param | - | "factor", or int | the factor of the call, or a number of the codec's table |
| field | - or selection or flag | FieldRef | a field of the own or a peer's payload |
| alu | 1 to 3 | function, see ALU | arithmetic in fp32, comparisons, logic |
| lookup | x, numbers | - | number floor(x); of NaN and beyond them the last, below 0 the first |
| cast | 1 | rounding: "nearest", "down", "up", "zero" | to `dtype`; finite values saturate, but \
those that fp16 cannot hold become infinite; in fp8, infinities become NaN |
| cast | 1 | "saturated" | to fp16, rounded to nearest; finite values saturate |
| reduce | 1 | "min", "max", "sum", "count"; Rank | ELEMENT to BLOCK scope, BLOCK to TENSOR |
| random | - | Stream | uniform in [0, 1), from (key, index, stream) |
| index | - | - or "block" | position in the parameter, modulo 2^32, or in the block |
| rotate | 1 | Rotation | randomised Hadamard transform of each block |
| select | condition, key, or key and condition | Size | where it holds; those of largest keys |
| keep | codes, flag | - | codes, stored only for blocks whose flag is set |
| gather | x, selection | - | x of each selected element |
| scatter | x, selection | - | x where an element is selected, else 0 |
| fold | own, decoded | - | sum in rank order; `decoded` is evaluated per peer payload |
| fold | own, x, selection | - | the same, if peer payloads hold selections |
| matrix | 1 | Shape | the row as a matrix, padded with zeros |
| decompose | 1 | Factor | one of the two factors of a low-rank approximation |
| product | a, b | - | a times b transposed |
| flatten | 1 | - | the elements of a matrix with the shape of the row |

All arithmetic is fp32 without contraction. docs/internals/wire-format.md and lang/eager.py define
the rest.
"""

from __future__ import annotations

import functools
import math
import os
import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


class Scope(IntEnum):
    """How many values a node represents; a node's scope is the widest of its operands'."""

    CONSTANT = 0
    TENSOR = 1
    BLOCK = 2
    SELECTION = 3
    ELEMENT = 4
    MATRIX = 5


# dtype name -> bits in memory. `bool` exists in registers only; index() gives `uint32`; a
# `selection` is stored as counts and positions (layout.py); five `trit`s make a byte.
BITS = {
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8,  # OCP E4M3: no infinities, one NaN; in payloads only
    "int32": 32,
    "uint32": 32,
    "bool": 1,
    **{f"uint{b}": b for b in range(1, 16)},  # more than 8 only as positions of a selection
}
FLOATS = ("fp32", "fp16", "bf16")
CODES = ("trit", *(f"uint{b}" for b in range(1, 9)))  # small integers, packed
STORABLE = (*FLOATS, "fp8", "int32", *CODES, "selection")
TOP = {"trit": 2, **{f"uint{b}": 2**b - 1 for b in range(1, 9)}}  # the largest code

# alu function -> (number of operands, kind of operands, kind of result)
ALU = {
    "add": (2, "number", "fp32"),
    "sub": (2, "number", "fp32"),
    "mul": (2, "number", "fp32"),
    "div": (2, "number", "fp32"),
    "max": (2, "number", "fp32"),  # a > b ? a : b, so NaN gives b
    "min": (2, "number", "fp32"),  # a < b ? a : b, so NaN gives b
    "neg": (1, "number", "fp32"),
    "abs": (1, "number", "fp32"),
    "floor": (1, "number", "fp32"),
    "sqrt": (1, "number", "fp32"),
    "isfinite": (1, "number", "bool"),
    "lt": (2, "number", "bool"),
    "le": (2, "number", "bool"),
    "eq": (2, "number", "bool"),
    "ne": (2, "number", "bool"),
    "and": (2, "bool", "bool"),
    "or": (2, "bool", "bool"),
    "not": (1, "bool", "bool"),
    "where": (3, "choice", "fp32"),  # bool, number, number
}

OPS = (
    "const", "load", "param", "field", "alu", "lookup", "cast", "reduce", "random", "index",
    "rotate", "select", "keep", "gather", "scatter", "fold", "matrix", "decompose", "product",
    "flatten",
)  # fmt: skip
UNFUSED = ("matrix", "decompose", "product", "flatten")  # these call torch on every target


@dataclass(frozen=True, eq=False)
class Node:
    """One pure computation. Make it with `node` only: equality is identity."""

    op: str
    args: tuple[Node, ...] = field(repr=False)  # the text of shared operands would grow as 2^depth
    attr: object
    dtype: str
    scope: Scope
    location: str = field(repr=False)  # "file:line" of the codec that made it, for errors
    memo: dict[object, Any] = field(default_factory=dict, repr=False)  # of `memoised` functions


@dataclass(frozen=True)
class FieldRef:
    """attr of a field node: its name; source: it belongs to the peer payload of a fold; shape: of a
    matrix."""

    name: str
    source: bool = False
    shape: Shape | None = None

    def __repr__(self) -> str:
        name = f"peer's {self.name}" if self.source else self.name
        return name if self.shape is None else f"{name}: {self.shape}"


@dataclass(frozen=True)
class Stream:
    """attr of a random node: its unique number; shared: all ranks draw the same numbers; source:
    the numbers are those of the encoder of the peer payload of a fold."""

    number: int
    shared: bool = False
    source: bool = False

    def __repr__(self) -> str:
        text = f"Stream(number={self.number}, shared={self.shared})"
        return f"peer's {text}" if self.source else text


@dataclass(frozen=True)
class Size:
    """A number of n values: max(least, floor(fraction * n)), but at most n."""

    fraction: float
    least: int = 1

    def of(self, n: int) -> int:
        return min(n, max(self.least, int(self.fraction * n)))


@dataclass(frozen=True)
class Rank:
    """attr of a reduce node: the size-th largest of a sample, one of every `every` elements.

    Window w is represented by element w * every + floor(uniform(stream, w) * every).
    """

    every: int
    size: Size
    stream: Stream


@dataclass(frozen=True)
class Rotation:
    """attr of a rotate node.

    Every block is cut into powers of two, the largest first. For each part, random signs from the
    stream are applied, then a normalised Hadamard transform. The inverse transforms, then applies
    the signs. full: the whole row is one block; this is not fused.
    """

    stream: Stream
    inverse: bool = False
    full: bool = False


@dataclass(frozen=True)
class Quotient:
    """An extent that depends on the number n of values of a row: max(1, ceil(n / divisor))."""

    divisor: int

    def __str__(self) -> str:
        return f"ceil(n / {self.divisor})"

    def of(self, n: int) -> int:
        return max(1, -(-n // self.divisor))


@dataclass(frozen=True)
class Shape:
    """attr of a matrix node, and the shape of every matrix: rows, columns. See shapes.py."""

    rows: int | Quotient
    columns: int | Quotient

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}"

    __repr__ = __str__

    def of(self, n: int) -> tuple[int, int]:
        """The numbers of rows and columns, for a row of n values."""
        rows, columns = (e if isinstance(e, int) else e.of(n) for e in (self.rows, self.columns))
        return rows, columns


@dataclass(frozen=True)
class Factor:
    """attr of a decompose node: P (rows, rank) is "left", Q (columns, rank) "right"."""

    rank: int
    side: str
    stream: Stream


_interned: weakref.WeakValueDictionary[tuple[object, ...], Node] = weakref.WeakValueDictionary()
_interning = threading.Lock()  # threads trace, too: one node per description even so
# In a forked child, the thread that may have held the lock is gone.
os.register_at_fork(after_in_child=lambda: globals().update(_interning=threading.Lock()))


def node(
    op: str,
    args: Iterable[Node] = (),
    attr: object = None,
    *,
    dtype: str = "fp32",
    scope: Scope | None = None,
    location: str = "",
) -> Node:
    """The unique node of this description; it keeps the location of its first use.

    `scope` defaults to the widest scope of the operands.
    """
    args = tuple(args)
    if scope is None:
        scope = max((arg.scope for arg in args), default=Scope.CONSTANT)
    # repr, because 0.0 == -0.0 and 1 == 1.0 must not share a node
    key = (op, args, repr(attr), dtype, scope)
    with _interning:
        found = _interned.get(key)
        if found is None:
            found = Node(op, args, attr, dtype, scope, location)
            _interned[key] = found
    return found


def alu(function: str, *args: Node, location: str = "") -> Node:
    """An alu node, with its dtype from the table."""
    return node("alu", args, function, dtype=ALU[function][2], location=location)


def const(value: float) -> Node:
    """A number, rounded to fp32 here, so that no target and no pass can round it otherwise."""
    return node("const", attr=single(value))


def single(value: float) -> float:
    """The nearest fp32 number; infinite beyond the largest."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)


@dataclass(frozen=True)
class Function:
    """What one kernel form computes for a row.

    Attributes:
        form: its name, as in `forms.FORMS`.
        stores: (target, node) with target "values" or "residual"; written after all reads.
        fields: (name, node) of the payload in wire order; empty for forms that only decode.
        block: values per block.
        patches: (target, node, selection): overwrite the selected elements after the stores.
    """

    form: str
    stores: tuple[tuple[str, Node], ...]
    fields: tuple[tuple[str, Node], ...]
    block: int
    patches: tuple[tuple[str, Node, Node], ...] = ()

    @property
    def roots(self) -> tuple[Node, ...]:
        patched = tuple(n for _, *nodes in self.patches for n in nodes)
        return tuple(n for _, n in (*self.fields, *self.stores)) + patched

    @property
    def fused(self) -> bool:
        """Whether it can be compiled into sweeps. If not, every target interprets it."""
        return not any(
            n.op in UNFUSED or (isinstance(n.attr, Rotation) and n.attr.full)
            for n in walk(self.roots)
        )


def same_numbers(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two tables hold the same bits; `==` takes -0 for 0, and NaN for no number."""
    return [x.hex() for x in a] == [x.hex() for x in b]


def operands(n: Node) -> tuple[Node, ...]:
    """The nodes that a node is computed from."""
    return n.args


def walk(
    roots: Iterable[Node], below: Callable[[Node], Iterable[Node]] = operands
) -> Iterator[Node]:
    """Every node reachable from `roots`, once, operands first. `below`: the operands to visit."""
    return post_order(roots, below)


def post_order(roots: Iterable[Key], below: Callable[[Key], Iterable[Key]]) -> Iterator[Key]:
    """What is reachable from `roots`, once, what is below first; without recursion, since Python
    bounds its depth and codecs do not bound that of their expressions."""
    seen: set[Key] = set()
    stack = [(root, False) for root in reversed(tuple(roots))]
    while stack:
        current, expanded = stack.pop()
        if expanded:
            yield current
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack.extend((k, False) for k in reversed(tuple(below(current))) if k not in seen)


def memoised(
    below: Callable[[Node], Iterable[Node]] = operands,
) -> Callable[[Callable[[Node], T]], Callable[[Node], T]]:
    """A function of a node, computed once per node, and for the nodes `below` first: a rule that
    calls itself on those neither recurses nor repeats work."""

    def of(rule: Callable[[Node], T]) -> Callable[[Node], T]:
        def open_below(n: Node) -> Iterable[Node]:
            return () if rule in n.memo else below(n)

        @functools.wraps(rule)
        def known(n: Node) -> T:
            if rule not in n.memo:
                for each in walk([n], open_below):
                    if rule not in each.memo:
                        each.memo[rule] = rule(each)
            return n.memo[rule]  # type: ignore[no-any-return]

        return known

    return of


def show(program: Function) -> str:
    """The program as text, one line per node."""
    names = {n: f"%{i}" for i, n in enumerate(walk(program.roots))}
    lines = [f"{program.form}: block {program.block}"]
    for n, name in names.items():
        attr = "" if n.attr is None else f"[{n.attr}]"
        operands = " ".join(names[a] for a in n.args)
        text = f"  {name:4} = {n.op}{attr} {operands}"
        lines.append(f"{text:58}{n.dtype} {n.scope.name.lower()}")
    lines += [f"  field {name} <- {names[n]}" for name, n in program.fields]
    lines += [f"  store {target} <- {names[n]}" for target, n in program.stores]
    lines += [f"  patch {target} <- {names[n]} at {names[s]}" for target, n, s in program.patches]
    return "\n".join(lines)
