"""Matrices: shapes are checked while tracing, so a wrong one is an error at the codec's line."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from test_verify import misplaced

from codec_calls import call, gradient
from gradwire.codecs import LowRank
from gradwire.lang import Codec, eager, forms, ir, layout, shapes
from gradwire.lang.call import Call
from gradwire.lang.forms import FORMS
from gradwire.lang.ops import (
    abs,
    bf16,
    concat,
    count,
    decomp,
    elements,
    fp32,
    index,
    isfinite,
    matmul,
    matrix,
    random,
    reduce,
    uint,
    where,
)


def factors(g: Any, rank: int = 2, columns: int = 8) -> tuple[Any, Any]:
    return decomp(matrix(g, columns), rank)


def sent(p: Any, q: Any) -> Any:
    return concat(p=bf16(p), q=bf16(q))


def low_rank(self: Any, g: Any) -> Any:
    return sent(*factors(g))


def at_8(g: Any, change: Callable[..., Any]) -> Any:
    """A payload with the result of `change` on a matrix of 8 columns and its factors."""
    m = matrix(g, 8)
    return concat(x=change(m, *decomp(m, 2)))


Method = Callable[..., Any]
# name -> (encode, decode, part of the message)
CASES: dict[str, tuple[Method, Method | None, str]] = {
    "columns": (lambda self, g: sent(*factors(g, 2, 0)), None, "columns=0 must be 1 to"),
    "no whole columns": (lambda self, g: sent(*factors(g, 2, 8.0)), None, "columns=8.0"),  # type: ignore[arg-type]
    "rank": (lambda self, g: sent(*decomp(matrix(g, 8), 0)), None, "rank=0 must be 1 to"),
    "high rank": (
        lambda self, g: sent(*decomp(matrix(g, 8), 9)),
        None,
        "rank=9 for 8 columns: it must be 1 to 8",
    ),
    "decomposed elements": (lambda self, g: sent(*decomp(g, 2)), None, "takes matrix(x, columns)"),
    "a decomposed number": (
        lambda self, g: sent(*decomp(3.0, 2)),  # type: ignore[arg-type]
        None,
        "takes matrix(x, columns)",
    ),
    "a matrix of numbers of blocks": (
        lambda self, g: sent(*decomp(matrix(reduce(max, g.blocks(8)), 8), 2)),
        None,
        "takes numbers of elements, not block scope",
    ),
    "a matrix of a matrix": (
        lambda self, g: sent(*decomp(matrix(matrix(g, 8), 8), 2)),
        None,
        "takes numbers of elements, not matrix scope",
    ),
    "two swapped factors": (
        low_rank,
        lambda self, p, q: elements(matmul(q, p)),
        "a matrix of 8 x ceil(n / 8) does not hold the row's values",
    ),
    "inner sizes": (
        low_rank,
        lambda self, p, q: elements(matmul(matmul(p, q), q)),
        "these are ceil(n / 8) x 8 and 8 x 2",
    ),
    "inner sizes of two ranks": (
        lambda self, g: concat(p=bf16(factors(g, 2)[0]), q=bf16(factors(g, 3)[1])),
        lambda self, p, q: elements(matmul(p, q)),
        "these are ceil(n / 8) x 2 and 8 x 3",
    ),
    "inner sizes that follow from the row": (
        lambda self, g: concat(p=bf16(factors(g, 2)[0]), q=bf16(factors(g, 2, 16)[1])),
        lambda self, p, q: elements(matmul(matmul(q, p), matmul(q, p))),
        "a matrix of 16 x 16 does not hold the row's values",
    ),
    "a factor as the row": (low_rank, lambda self, p, q: elements(p), "of ceil(n / 8) x 2 does"),
    "elements of a number": (
        low_rank,
        lambda self, p, q: elements(2.0),  # type: ignore[arg-type]
        "takes a matrix; this is of constant scope",
    ),
    "elements of a condition": (
        low_rank,
        lambda self, p, q: elements(matmul(p, q) > 0.0),
        "use where(condition, 1, 0)",
    ),
    "product with elements": (
        lambda self, g: at_8(g, lambda m, p, q: matmul(p, g)),
        None,
        "matmul: takes a matrix; this is of element scope",
    ),
    "product with a number": (
        low_rank,
        lambda self, p, q: elements(matmul(p, 2.0)),  # type: ignore[arg-type]
        "matmul: takes a matrix; this is of constant scope",
    ),
    "product of conditions": (
        low_rank,
        lambda self, p, q: elements(matmul(p > 0.0, q)),
        "matmul: takes numbers",
    ),
    "a matrix and elements": (
        lambda self, g: at_8(g, lambda m, p, q: m - g),
        None,
        "a matrix and elements do not mix: use elements(matrix)",
    ),
    "a matrix and an element's position": (
        low_rank,
        lambda self, p, q: elements(matmul(p, q) + index()),
        "a matrix and elements do not mix",
    ),
    "a matrix and random elements": (
        low_rank,
        lambda self, p, q: elements(matmul(p, q) * random(shared="x")),
        "a matrix and elements do not mix",
    ),
    "a matrix and numbers of blocks": (
        lambda self, g: at_8(g, lambda m, p, q: m / reduce(max, abs(g.blocks(8)))),
        None,
        "a matrix and elements do not mix",
    ),
    "a matrix chosen by elements": (
        lambda self, g: at_8(g, lambda m, p, q: where(g > 0.0, m, 0.0)),
        None,
        "a matrix and elements do not mix",
    ),
    "two shapes": (
        low_rank,
        lambda self, p, q: elements(matmul(p + q, q)),
        "matrices of ceil(n / 8) x 2 and 8 x 2 cannot be combined elementwise",
    ),
    "two shapes that a row may have": (
        lambda self, g: at_8(g, lambda m, p, q: m - matrix(g, 16)),
        None,
        "of ceil(n / 8) x 8 and ceil(n / 16) x 16 cannot",
    ),
    "two shapes and a choice": (
        low_rank,
        lambda self, p, q: elements(matmul(where(isfinite(q), p, 0.0), q)),
        "cannot be combined elementwise",
    ),
    "reduced": (lambda self, g: at_8(g, lambda m, p, q: reduce(max, m)), None, "use elements("),
    "counted": (lambda self, g: at_8(g, lambda m, p, q: count(m)), None, "use elements("),
    "blocks": (
        lambda self, g: at_8(g, lambda m, p, q: m.blocks(8)),
        None,
        "only elements can be divided into blocks",
    ),
    "stored": (lambda self, g: at_8(g, lambda m, p, q: m), None, "a factor of decomp"),
    "stored after a change": (
        lambda self, g: at_8(g, lambda m, p, q: bf16(p * 2.0)),
        None,
        "field x: a stored matrix must be a factor of decomp, as floats",
    ),
    "stored as codes": (
        lambda self, g: at_8(g, lambda m, p, q: uint(4, p)),
        None,
        "field x: a stored matrix must be a factor of decomp, as floats",
    ),
    "a stored product": (
        lambda self, g: at_8(g, lambda m, p, q: fp32(matmul(p, q))),
        None,
        "a factor of decomp",
    ),
    "a decoded matrix": (low_rank, lambda self, p, q: matmul(p, q), "return elements, not a matri"),
}


def plain(self: Any, **fields: Any) -> None:
    """Of codecs whose encode is wrong."""


def test_errors_point_to_the_source() -> None:
    lines = [line.strip() for line in linecache.getlines(__file__)]
    helpers = range(lines.index("Method = Callable[..., Any]") + 1)
    cases = {name: (e, d or plain, message) for name, (e, d, message) in CASES.items()}
    assert misplaced(cases, __file__, helpers) == []


@dataclass(frozen=True)
class Residual(Codec):
    """Low rank and the signs of the rest: every operator on matrices, in encode and in decode."""

    columns: int = 8
    rank: int = 2

    def encode(self, g: Any) -> Any:
        p, q = decomp(matrix(g, self.columns), self.rank)
        p, q = bf16(p), fp32(q)
        rest = g - elements(where(isfinite(matmul(p, q)), matmul(p, q), 0.0) * 1.0)
        return concat(p=p, q=q, largest=reduce(max, abs(rest)), sign=uint(1, rest >= 0.0))

    def decode(self, p: Any, q: Any, largest: Any, sign: Any) -> Any:
        gram = matmul(matmul(q, q), matmul(q, q))  # columns x columns
        product = matmul(p, q) + 0.0 * largest + 0.0 * matmul(matmul(p, q), gram)
        return elements(product) + where(sign > 0.0, largest, -largest) * 0.25


@dataclass(frozen=True)
class Whole(Codec):
    """A factor as wide as the matrix has the shape of the row."""

    def encode(self, g: Any) -> Any:
        p, q = decomp(matrix(g, 2), 2)
        return concat(p=bf16(p), q=fp32(q))

    def decode(self, p: Any, q: Any) -> Any:
        return elements(p) + 0.0 * elements(matmul(p, q))


CODECS: list[Codec] = [LowRank(2, 50), LowRank(1, 1), Residual(), Residual(5, 5), Whole()]


def test_matrices_have_their_traced_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, seen = eager._Row.evaluate, set()

    def checked(self: Any, n: ir.Node, frame: Any) -> torch.Tensor:
        result = evaluate(self, n, frame)
        if n.scope is ir.Scope.MATRIX:
            assert tuple(result.shape) == shapes.shape_of(n).of(self.numel), (n, self.numel)
            seen.add((codec, n.op))
        return result

    monkeypatch.setattr(eager._Row, "evaluate", checked)
    for codec in CODECS:
        for numel in (1, 2, 7, 8, 9, 50, 51, 400):
            values = gradient(numel)
            peer = call(codec, "encode", values, target="eager").payload
            for form in FORMS:
                summed = form.startswith("reduce") or form == "decode_sum"
                call(codec, form, values, target="eager", payload=peer, peers=[peer] * summed)
        assert seen >= {(codec, op) for op in ("matrix", "decompose", "product", "field")}


def test_matrices_of_two_codecs_are_distinguished_by_shape() -> None:
    """The fields of both codecs have the same names."""
    for columns in (8, 4, 8):
        codec, values = Residual(columns), torch.arange(64.0)
        decoded = call(
            codec, "decode", values, payload=call(codec, "encode", values).payload
        ).values
        assert torch.allclose(decoded, values, atol=2.0)
    fields = forms.derive(Residual(4), "fp32").fields
    assert [str(f.shape) for f in fields[:2]] == ["ceil(n / 4) x 2", "4 x 2"]
    assert layout(Residual(4)).offsets(9) == [0, 3 * 2 * 2, 12 + 4 * 2 * 4, 44 + 4, 48 + 2]


def test_an_empty_row_needs_no_matrix() -> None:
    from gradwire.lang.rows import ROW

    eager.Interpreter(LowRank(), torch.float32).run("encode", np.zeros(1, ROW), Call())
