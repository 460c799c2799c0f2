"""Operators on matrices that are made of a row.

Codecs import them from ops.py. They call torch's BLAS and are not fused.
"""

from __future__ import annotations

from gradwire.lang import ir
from gradwire.lang.shapes import of_row, shape_of
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
    node, shape = numbers_of_elements(value, "matrix"), of_row(width)
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
    columns = shape_of(node).columns
    if isinstance(columns, int) and number > columns:
        raise mistake(f"decomp: rank={number} for {columns} columns: it must be 1 to {columns}")
    drawn = stream("decomp")
    left, right = (
        record("decompose", (node,), ir.Factor(number, side, drawn)) for side in ("left", "right")
    )
    return Value(left), Value(right)


def matmul(a: Value, b: Value) -> Value:
    """A times B transposed: matrices r x k and c x k give r x c."""
    active().uses("matmul")
    left, right = (_numbers(value, "matmul") for value in (a, b))
    first, second = shape_of(left), shape_of(right)
    if first.columns != second.columns:
        raise mistake(
            "matmul: multiplies by the second matrix transposed, so both need the same number of "
            f"columns; these are {first} and {second}"
        )
    return Value(record("product", (left, right)))


def elements(value: Value) -> Value:
    """The elements of a matrix that has the shape of matrix(x, columns)."""
    node = _numbers(value, "elements")
    found = shape_of(node)
    if not isinstance(found.columns, int) or found != of_row(found.columns):
        raise mistake(
            f"elements: a matrix of {found} does not hold the row's values; one that does is "
            "ceil(n / columns) x columns, as matrix(x, columns) is"
        )
    return Value(record("flatten", (node,), scope=ir.Scope.ELEMENT))


def _numbers(value: Value, operator: str) -> ir.Node:
    """The node as fp32, if it is a matrix of numbers; else a `LanguageError`."""
    n = lift(value).node
    if n.scope is not ir.Scope.MATRIX:
        found = "a condition" if n.dtype == "bool" else f"of {n.scope.name.lower()} scope"
        raise mistake(f"{operator}: takes a matrix; this is {found}")
    if n.dtype == "bool":
        raise mistake(f"{operator}: takes numbers: use where(condition, 1, 0)")
    return as_number(n)
