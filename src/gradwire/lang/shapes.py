"""Shapes of matrices, checked while tracing: extents are numbers, or depend on the number n of
values of the row.

| node | shape |
| --- | --- |
| matrix | ceil(n / columns) x columns |
| decompose | for a matrix r x c: P is r x rank, Q is c x rank |
| product | for a of r x k and b of c x k: r x c |
| field | the shape of the stored node |
| others | the shape of their operands, which must be equal: they are elementwise |

Extents are compared symbolically: ceil(n / 8) never equals a number.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.lang import ir
from gradwire.lang.ir import Node, Quotient, Scope, Shape
from gradwire.lang.source import mistake


def of_row(columns: int) -> Shape:
    """The shape that matrix(x, columns) gives a row."""
    return Shape(Quotient(columns), columns)


def _matrices(n: Node) -> list[Node]:
    return [a for a in n.args if a.scope is Scope.MATRIX]


@ir.memoised(_matrices)
def shape_of(n: Node) -> Shape:
    """The shape of a node of matrix scope."""
    assert n.scope is Scope.MATRIX, n
    if isinstance(n.attr, Shape):
        return n.attr
    if isinstance(n.attr, ir.FieldRef):
        assert n.attr.shape is not None, n
        return n.attr.shape
    shapes = [shape_of(a) for a in _matrices(n)]
    if isinstance(n.attr, ir.Factor):
        (whole,) = shapes
        return Shape(whole.rows if n.attr.side == "left" else whole.columns, n.attr.rank)
    if n.op == "product":
        return Shape(shapes[0].rows, shapes[1].rows)
    return shapes[0]


def none(n: Node, operator: str) -> None:
    """Raise `LanguageError` if the node is a matrix."""
    if n.scope is Scope.MATRIX:
        raise mistake(f"{operator}: takes elements, not a matrix: use elements(matrix)")


def alike(nodes: Iterable[Node]) -> None:
    """Raise `LanguageError` unless all matrices of an elementwise operation have one shape."""
    shapes = list(dict.fromkeys(shape_of(n) for n in nodes if n.scope is Scope.MATRIX))
    if len(shapes) > 1:
        raise mistake(f"matrices of {shapes[0]} and {shapes[1]} cannot be combined elementwise")
