"""Shapes of matrices, checked while tracing: rows and columns are numbers, or follow from how many
values the row will have.

| node | shape |
| --- | --- |
| matrix | ceil(n / columns) x columns |
| decompose | of a matrix r x c: P is r x rank, Q is c x rank |
| product | of a, r x k, and b, c x k: r x c |
| field | that of what is stored |
| others | that of their operands, which must agree: they go element by element |

Extents are compared as they are written: ceil(n / 8) is no number, though some rows may have it.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.lang import ir
from gradwire.lang.ir import Node, Quotient, Scope, Shape
from gradwire.lang.source import LanguageError


def of_row(columns: int) -> Shape:
    """The shape that matrix(x, columns) gives a row."""
    return Shape(Quotient(columns), columns)


def shape_of(n: Node) -> Shape:
    """The shape of a node of matrix scope."""
    assert n.scope is Scope.MATRIX, n
    if isinstance(n.attr, Shape):
        return n.attr
    if isinstance(n.attr, ir.FieldRef):
        assert n.attr.shape is not None, n
        return n.attr.shape
    shapes = [shape_of(a) for a in n.args if a.scope is Scope.MATRIX]
    if isinstance(n.attr, ir.Factor):
        (whole,) = shapes
        return Shape(whole.rows if n.attr.side == "left" else whole.columns, n.attr.rank)
    if n.op == "product":
        return Shape(shapes[0].rows, shapes[1].rows)
    return shapes[0]


def matrix(n: Node, operator: str, location: str) -> Node:
    """The node, which must be a matrix of numbers."""
    if n.scope is not Scope.MATRIX:
        found = "a condition" if n.dtype == "bool" else f"of {n.scope.name.lower()} scope"
        raise LanguageError(location, f"{operator}: takes a matrix; this is {found}")
    if n.dtype == "bool":
        raise LanguageError(location, f"{operator}: takes numbers: use where(condition, 1, 0)")
    return n


def none(n: Node, operator: str, location: str) -> None:
    """The node is no matrix: an operator of the row's elements takes none."""
    if n.scope is Scope.MATRIX:
        raise LanguageError(
            location, f"{operator}: takes elements, not a matrix: use elements(matrix)"
        )


def alike(nodes: Iterable[Node], location: str) -> None:
    """Matrices of one operation element by element have one shape."""
    shapes = list(dict.fromkeys(shape_of(n) for n in nodes if n.scope is Scope.MATRIX))
    if len(shapes) > 1:
        raise LanguageError(
            location, f"matrices of {shapes[0]} and {shapes[1]} do not go element by element"
        )


def product(a: Node, b: Node, location: str) -> None:
    """A times B transposed needs as many columns of the one as of the other."""
    left, right = shape_of(a), shape_of(b)
    if left.columns != right.columns:
        raise LanguageError(
            location,
            f"matmul: multiplies by the second matrix transposed, so both must have as many "
            f"columns; these are {left} and {right}",
        )


def factors(n: Node, rank: int, location: str) -> None:
    """A matrix has at most as many independent columns as columns."""
    columns = shape_of(n).columns
    if isinstance(columns, int) and rank > columns:
        raise LanguageError(
            location, f"decomp: rank={rank} of {columns} columns; it can be 1 to {columns}"
        )


def flat(n: Node, location: str) -> None:
    """The elements of the row are those of a matrix that is shaped as the row was."""
    found = shape_of(n)
    if not isinstance(found.columns, int) or found != of_row(found.columns):
        raise LanguageError(
            location,
            f"elements: a matrix of {found} does not hold the row's values; one that does is "
            "ceil(n / columns) x columns, as matrix(x, columns) is",
        )
