"""What the language refuses, beside methods of codecs that are ill formed (test_verify.py).

Kernels get addresses: what these point to is checked where they are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from test_stack import Gathers, Many

from gradwire.aggregators.local import run_local
from gradwire.aggregators.local_codecs import Ends
from gradwire.codecs import QSGD, Codec, OneBit, TopK
from gradwire.errors import CodecError, ConfigError
from gradwire.lang import (
    ROW,
    Exact,
    KernelCall,
    Series,
    decode,
    encode,
    fingerprint,
    kernels,
    layout,
    ops,
    show,
)
from gradwire.lang.call import Call
from gradwire.lang.forms import FORMS
from gradwire.lang.lowrank import Compiled, Factored
from rooms.handles import Payloads, Piece


def refused(said: str, call: Callable[..., Any], *given: Any, **more: Any) -> None:
    with pytest.raises((ConfigError, CodecError), match=said):
        call(*given, **more)


@dataclass(frozen=True)
class Levels(Codec):
    levels: Any

    def encode(self, g: Any) -> Any:
        return ops.concat(code=ops.uint(1, g > self.levels[0]))

    def decode(self, code: Any) -> Any:
        return code + 0.0


def test_codecs() -> None:
    ones, codec = torch.ones(3), Levels((1.0,))
    payload = encode(codec, ones, key=2**64 - 1, target="eager")
    uses = ((encode, ones), (decode, payload, 3), (layout,), (show, "ir"))
    for use, *given in (*uses[:1], *uses[2:3], (hash,)):
        refused(r"^Levels: .*levels=\[1\.0\].* a tuple", use, Levels([1.0]), *given)
    remedies: dict[Any, str] = {
        "topk": r"gradwire\.codecs\.get\('topk'\)", TopK: r"TopK\(\.\.\.\)", 3: "a codec object",
    }  # fmt: skip
    for wrong, remedy in remedies.items():
        for use, *given in uses:
            refused(f"^codec=.*: give .*{remedy}", use, wrong, *given)
    for key in (-1, 2**64, 1.5, "a", None):
        for use, *given in uses[:2]:
            refused("^key=.*: give a whole number", use, codec, *given, key=key)
    refused("meta", encode, TopK(), torch.ones(4, device="meta"), target="c")
    refused("layout is torch.sparse_coo: give a dense one", encode, TopK(), ones.to_sparse())
    for numel in (-1, 3.0):
        refused(f"^numel={numel}: give a whole number, 0", decode, codec, payload, numel)
    refused(r"torch\.int64.*torch\.float32", layout, QSGD(), torch.int64)
    refused("'float64': use a torch\\.dtype", layout, Exact(), "float64")
    refused("a block holds 1 to 65536 values", layout, Many(1 << 20))
    refused("encode can gather 14 numbers per entry, not 15", layout, Gathers(15))


def test_operations_of_exact() -> None:
    undefined = [
        ("sum", torch.bool, "op='sum' is not defined for bool"),
        ("min", torch.complex64, "op='min' is not defined for complex64.*float64"),
        ("max", torch.uint16, "op='max' is not defined for uint16.*uint8, int8"),
        ("sum", torch.float8_e5m2, "op='sum' is not defined for float8_e5m2"),
        ("", torch.qint8, "qint8 values mean nothing"),
    ]
    for (op, dtype, said), refusing in product(undefined, (layout, kernels, fingerprint)):
        refused(said, refusing, Exact(op), dtype)
    for unknown in ("avg", "SUM", None, 3):
        refused("op=.* must be 'sum', 'min', 'max' or ''", Exact, unknown)
    for form in FORMS:
        if form.endswith("_ef"):
            run = kernels(Exact(), torch.float32).run
            refused("without error feedback", run, form, np.zeros(1, ROW))
            refused("without error feedback", kernels, Exact(), torch.float32, forms=[form])
        elif form not in ("encode", "decode"):
            said = f"'{form}' reduces: give it an op"
            refused(said, kernels, Exact(""), torch.int32, forms=[form])


def test_a_call_of_kernels() -> None:
    run = kernels(OneBit(), torch.float32, "eager").run
    none, two = np.zeros(0, ROW), np.zeros(2, np.int64)  # no rows: nothing is read or written
    for table in (np.zeros(0, np.int64), np.zeros(4, ROW)[::2]):
        refused("rows: give a C-contiguous", run, "encode", table)
    refused("rank 2 of 2", run, "encode", none, ranks=2, rank=2, distances=two)
    refused("threads=0", run, "encode", none, threads=0)
    refused("none are given, and the call reads 2", run, "decode_sum", none, ranks=3)
    refused("the call reads 3", run, "decode_sum", none, ranks=4, distances=two)
    refused("float64", run, "decode_sum", none, ranks=3, distances=two.astype("f8"))
    said = "unknown form 'encoed': did you mean 'encode'"
    refused(said, kernels, OneBit(), forms=["encode", "encoed"])


def test_a_series() -> None:
    made = kernels(OneBit(), torch.float32, "eager")
    numels, memory = np.zeros(2, np.int64), torch.zeros(0, dtype=torch.uint8)
    refused("unknown form 'code'", Series, [KernelCall(made, "code", 0, 1)], numels)
    refused("of 2 rows", Series, [KernelCall(made, "encode", 0, 3)], numels)
    series = Series([KernelCall(made, "decode_sum", 0, 2, ranks=3)], numels)
    refused("a table of 3; the series is of 2", series.bind, np.zeros(3, ROW), memory)
    refused("rows: give", series.bind, np.zeros(2), memory)
    refused("the call reads 2", series.bind(np.zeros(2, ROW), memory).run, 0, 1)
    series.workspace_nbytes = 8
    refused("0 bytes are given; the call needs 8", series.bind, np.zeros(2, ROW), memory)


def test_local_calls() -> None:
    codec, values, count = Ends(3), torch.zeros(8), torch.zeros(1)
    run_local(codec, "encode", [values], [count])
    for payload in (count.bfloat16(), count.double(), torch.zeros(4).bfloat16()[::2]):
        refused("8 values is 4 contiguous bytes", run_local, codec, "encode", [values], [payload])
    for bad in (values.double(), torch.zeros(16)[::2]):
        refused("must hold 8 x torch.float32", run_local, codec, "encode", [bad], [count])


def test_factors_of_matrices() -> None:
    n, m, r = 6, 4, 2
    shapes = [(n, m), (n, m), (m, r), (r, m), (r, n), (r, m), (r, m)]
    good = Factored(*map(torch.zeros, shapes))
    Compiled([good, replace(good, residual=None)])
    for name in ("values", "residual", "basis", "start", "left", "own", "right"):
        tensor = getattr(good, name)
        wrong = [tensor.bfloat16(), tensor.double(), tensor.new_zeros(tensor.shape[::-1]).mT]
        if name not in ("values", "left"):  # which say how many rows there are
            wrong.append(tensor[:-1])
        for bad in wrong:
            refused(f"`{name}` holds", Compiled, [replace(good, **{name: bad})])
    refused("`own` is missing", Compiled, [replace(good, own=None)])


def test_payloads_of_weights() -> None:
    of = Payloads([Piece(None, 0, 6, (5, 5))], [OneBit()], torch.float32, torch.device("cpu"))
    values, sent = torch.zeros(12), torch.zeros(sum(of.nbytes), dtype=torch.uint8)
    refused("must hold 6 x", of.encode, values, sent, 0, np.zeros(1, np.uint64))
    refused("must hold 12 x", of.decode, sent, values[:6])
    refused("torch.float64", of.decode, sent, values.double())
    refused("`payloads` holds", of.decode, sent[:-1], values)


# ---- the distances between the payloads of a sum


def test_equal_distances_have_a_stride() -> None:
    for given, stride in (([], 0), ([0], 0), ([0, 48, 96], 48), ([0, -16, -32], -16)):
        assert Call(len(given) + 1, distances=np.array(given, dtype="i8")).stride == stride
    assert Call(1, distances=None).stride == 0
    for given in ([0, 48, 95], [0, 48, 48], [0, 0, 1]):
        unequal = Call(4, distances=np.array(given, dtype="i8"))
        refused("equally spaced", lambda call: call.stride, unequal)


def test_origins_follow_the_distances() -> None:
    call = Call(3, rank=-1, distances=np.array([0, 48, 96, 7, 9, 2, 1], dtype="i8"))
    assert call.stride == 48
    assert call.origins.tolist() == [7, 9, 2]
