"""Operators on matrices that are made of a row; shapes.py checks their shapes.

Codecs import them from ops.py. They call torch's BLAS and are not fused.
"""

from __future__ import annotations

from gradwire.lang import ir, shapes
from gradwire.lang.source import mistake
from gradwire.lang.trace import (
    Value,
    active,
    as_number,
    lift,
    numbers_of_elements,
    record,
    size,
    stream,
    whole,
)


def matrix(value: Value, columns: int) -> Value:
    """The elements as a matrix of `columns` columns; its last row is padded with zeros."""
    width = size(columns, 1, "matrix: columns")
    value = whole(value, "matrix")
    node, shape = numbers_of_elements(value, "matrix"), shapes.of_row(width)
    return Value(record("matrix", (node,), shape, scope=ir.Scope.MATRIX))


def decomp(value: Value, rank: int) -> tuple[Value, Value]:
    """P and Q of `rank` columns with P Q^T close to a matrix: one step of subspace iteration.

    For matrix(x, columns) of n values, P is ceil(n / columns) x rank and Q is columns x rank.
    """
    active().uses("decomp")
    node = lift(value).node
    if node.op != "matrix":
        raise mistake("decomp: takes matrix(x, columns)")
    number = size(rank, 1, "decomp: rank")
    shapes.factors(node, number)
    drawn = stream("decomp")
    left, right = (
        record("decompose", (node,), ir.Factor(number, side, drawn)) for side in ("left", "right")
    )
    return Value(left), Value(right)


def matmul(a: Value, b: Value) -> Value:
    """A times B transposed: matrices r x k and c x k give r x c."""
    active().uses("matmul")
    left, right = (as_number(shapes.matrix(lift(v).node, "matmul")) for v in (a, b))
    shapes.product(left, right)
    return Value(record("product", (left, right)))


def elements(value: Value) -> Value:
    """The elements of a matrix that has the shape of matrix(x, columns)."""
    node = as_number(shapes.matrix(lift(value).node, "elements"))
    shapes.flat(node)
    return Value(record("flatten", (node,), scope=ir.Scope.ELEMENT))
