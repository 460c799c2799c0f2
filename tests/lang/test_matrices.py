# ruff: noqa: F405
"""Matrices: shapes are checked while tracing, so a wrong one is an error at the codec's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from other_codecs import MATRICES, Residual
from test_verify import misplaced

from codec_calls import SUMS, call, gradient, round_trip
from gradwire.codecs import LowRank
from gradwire.lang import eager, forms, ir, layout, shapes
from gradwire.lang.forms import FORMS
from gradwire.lang.ops import *  # noqa: F403


def factors(g: Any, left: tuple[Any, Any] = (2, 8), right: tuple[Any, Any] = (2, 8)) -> Any:
    """A payload of two factors, each of a decomposition of its rank and number of columns."""
    (p, _), (_, q) = (decomp(matrix(g, columns), rank) for rank, columns in (left, right))
    return concat(p=bf16(p), q=bf16(q))


def low_rank(g: Any) -> Any:
    return factors(g)


def of_ranks_2_and_3(g: Any) -> Any:
    return factors(g, right=(3, 8))


def of_widths_8_and_16(g: Any) -> Any:
    return factors(g, right=(2, 16))


def at_8(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """An encode: what `change` makes of a matrix of 8 columns, its factors, and the elements."""

    def encode(g: Any) -> Any:
        m = matrix(g, 8)
        return concat(x=change(m, *decomp(m, 2), g))

    return encode


MIXED = "a matrix and elements do not mix"
FACTOR = "field x: a stored matrix must be a factor of decomp, as floats"
# (part of the message, encode)
ENCODED: list[tuple[str, Callable[..., Any]]] = [
    ("columns=0 must be 1 to", lambda g: factors(g, (2, 0))),
    ("columns=8.0", lambda g: factors(g, (2, 8.0))),
    ("rank=0 must be 1 to", lambda g: factors(g, (0, 8))),
    ("rank=9 for 8 columns: it must be 1 to 8", lambda g: factors(g, (9, 8))),
    ("takes matrix(x, columns)", lambda g: decomp(g, 2)),
    ("takes matrix(x, columns)", lambda g: decomp(3.0, 2)),
    ("takes numbers of elements, not block scope", lambda g: matrix(reduce(max, g.blocks(8)), 8)),
    ("takes numbers of elements, not matrix scope", lambda g: matrix(matrix(g, 8), 8)),
]
# (part of the message, change of a matrix, its factors and the elements)
CHANGED: list[tuple[str, Callable[..., Any]]] = [
    ("matmul: takes a matrix; this is of element scope", lambda m, p, q, g: matmul(p, g)),
    (f"{MIXED}: use elements(matrix)", lambda m, p, q, g: m - g),
    (MIXED, lambda m, p, q, g: m / reduce(max, abs(g.blocks(8)))),
    (MIXED, lambda m, p, q, g: where(g > 0.0, m, 0.0)),
    ("of ceil(n / 8) x 8 and ceil(n / 16) x 16 cannot", lambda m, p, q, g: m - matrix(g, 16)),
    ("use elements(", lambda m, p, q, g: reduce(max, m)),
    ("use elements(", lambda m, p, q, g: count(m)),
    ("only elements can be divided into blocks", lambda m, p, q, g: m.blocks(8)),
    ("a factor of decomp", lambda m, p, q, g: m),
    (FACTOR, lambda m, p, q, g: bf16(p * 2.0)),
    (FACTOR, lambda m, p, q, g: uint(4, p)),
    ("a factor of decomp", lambda m, p, q, g: fp32(matmul(p, q))),
]
# (part of the message, decode, encode if it is not low_rank)
DECODED: list[tuple[Any, ...]] = [
    ("8 x ceil(n / 8) does not hold the row's values", lambda p, q: elements(matmul(q, p))),
    ("these are ceil(n / 8) x 8 and 8 x 2", lambda p, q: elements(matmul(matmul(p, q), q))),
    ("these are ceil(n / 8) x 2 and 8 x 3", lambda p, q: elements(matmul(p, q)), of_ranks_2_and_3),
    (
        "a matrix of 16 x 16 does not hold the row's values",
        lambda p, q: elements(matmul(matmul(q, p), matmul(q, p))),
        of_widths_8_and_16,
    ),
    ("of ceil(n / 8) x 2 does", lambda p, q: elements(p)),
    ("takes a matrix; this is of constant scope", lambda p, q: elements(2.0)),
    ("use where(condition, 1, 0)", lambda p, q: elements(matmul(p, q) > 0.0)),
    ("matmul: takes a matrix; this is of constant scope", lambda p, q: elements(matmul(p, 2.0))),
    ("matmul: takes numbers", lambda p, q: elements(matmul(p > 0.0, q))),
    (MIXED, lambda p, q: elements(matmul(p, q) + index())),
    (MIXED, lambda p, q: elements(matmul(p, q) * random(shared="x"))),
    (
        "matrices of ceil(n / 8) x 2 and 8 x 2 cannot be combined elementwise",
        lambda p, q: elements(matmul(p + q, q)),
    ),
    (
        "cannot be combined elementwise",
        lambda p, q: elements(matmul(where(isfinite(q), p, 0.0), q)),
    ),
    ("return elements, not a matri", lambda p, q: matmul(p, q) + 0.0),
]


def test_errors_point_to_the_source() -> None:
    faults = misplaced(ENCODED, [factors])
    for message, change in CHANGED:
        faults += misplaced([(message, at_8(change))], [change])
    decoded = [(message, *(encode or (low_rank,)), decode) for message, decode, *encode in DECODED]
    assert faults + misplaced(decoded) == []


def test_matrices_have_their_traced_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, seen = eager._Row.evaluate, set()

    def checked(self: Any, n: ir.Node, frame: Any) -> torch.Tensor:
        result = evaluate(self, n, frame)
        if n.scope is ir.Scope.MATRIX:
            assert tuple(result.shape) == shapes.shape_of(n).of(self.numel), (n, self.numel)
            seen.add((codec, n.op))
        return result

    monkeypatch.setattr(eager._Row, "evaluate", checked)
    for codec in MATRICES:
        for numel in (1, 2, 7, 8, 9, 50, 51, 400):
            values = gradient(numel)
            peer = call(codec, "encode", values, target="eager").payload
            for form in FORMS:
                peers = [peer] * (form in SUMS)
                call(codec, form, values, target="eager", payload=peer, peers=peers)
        assert seen >= {(codec, op) for op in ("matrix", "decompose", "product", "field")}


def test_matrices_of_two_codecs_are_distinguished_by_shape() -> None:
    """The fields of both codecs have the same names."""
    for columns in (8, 4, 8):
        codec, values = Residual(columns), torch.arange(64.0)
        assert torch.allclose(round_trip(codec, values), values, atol=2.0)
    fields = forms.derive(Residual(4), "fp32").fields
    assert [str(f.shape) for f in fields[:2]] == ["ceil(n / 4) x 2", "4 x 2"]
    assert layout(Residual(4)).offsets(9) == [0, 3 * 2 * 2, 12 + 4 * 2 * 4, 44 + 4, 48 + 2]


def test_an_empty_row_needs_no_matrix() -> None:
    from gradwire.lang.call import ROW

    eager.Interpreter(LowRank(), torch.float32, "eager").run("encode", np.zeros(1, ROW))
