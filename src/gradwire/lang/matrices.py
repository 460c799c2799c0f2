"""Operators on matrices that are made of a row; shapes.py checks their shapes.

Codecs import them from ops.py. They call torch's BLAS and are not fused.
"""

from __future__ import annotations

from gradwire.lang import ir, shapes
from gradwire.lang.source import LanguageError, here
from gradwire.lang.trace import (
    Value,
    active,
    as_number,
    lift,
    numbers_of_elements,
    size,
    stream,
    whole,
)


def matrix(value: Value, columns: int) -> Value:
    """The elements as a matrix of `columns` columns; its last row is padded with zeros."""
    location = here()
    width = size(columns, 1, "matrix: columns", location)
    value = whole(value, "matrix", location)
    node, shape = numbers_of_elements(value, "matrix", location), shapes.of_row(width)
    return Value(ir.node("matrix", (node,), shape, scope=ir.Scope.MATRIX, location=location))


def decomp(value: Value, rank: int) -> tuple[Value, Value]:
    """P and Q of `rank` columns with P Q^T close to a matrix: one step of subspace iteration.

    For matrix(x, columns) of n values, P is ceil(n / columns) x rank and Q is columns x rank.
    """
    location = here()
    active().uses("decomp")
    node = lift(value).node
    if node.op != "matrix":
        raise LanguageError(location, "decomp: takes matrix(x, columns)")
    number = size(rank, 1, "decomp: rank", location)
    shapes.factors(node, number, location)
    drawn = stream("decomp")
    left, right = (
        ir.node("decompose", (node,), ir.Factor(number, side, drawn), location=location)
        for side in ("left", "right")
    )
    return Value(left), Value(right)


def matmul(a: Value, b: Value) -> Value:
    """A times B transposed: matrices r x k and c x k give r x c."""
    location = here()
    active().uses("matmul")
    left, right = (as_number(shapes.matrix(lift(v).node, "matmul", location)) for v in (a, b))
    shapes.product(left, right, location)
    return Value(ir.node("product", (left, right), location=location))


def elements(value: Value) -> Value:
    """The elements of a matrix that has the shape of matrix(x, columns)."""
    location = here()
    node = as_number(shapes.matrix(lift(value).node, "elements", location))
    shapes.flat(node, location)
    return Value(ir.node("flatten", (node,), scope=ir.Scope.ELEMENT, location=location))
