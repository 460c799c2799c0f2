"""Kernels get addresses: what these point to is checked, by errors, where they are taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.aggregators.local import run_local
from gradwire.aggregators.local_codecs import Ends
from gradwire.codecs import OneBit
from gradwire.errors import CodecError, ConfigError
from gradwire.lang import ROW, KernelCall, Series, kernels
from gradwire.lang.call import Call
from gradwire.lang.lowrank import Compiled, Factored
from rooms.handles import Payloads, Piece


def refused(said: str, call: Callable[..., Any], *given: Any, **more: Any) -> None:
    with pytest.raises((ConfigError, CodecError), match=said):
        call(*given, **more)


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


def test_a_series() -> None:
    made = kernels(OneBit(), torch.float32, "eager")
    numels, memory = np.zeros(2, np.int64), torch.zeros(0, dtype=torch.uint8)
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
        with pytest.raises(ConfigError, match="equally spaced"):
            _ = Call(4, distances=np.array(given, dtype="i8")).stride


def test_origins_follow_the_distances() -> None:
    call = Call(3, rank=-1, distances=np.array([0, 48, 96, 7, 9, 2, 1], dtype="i8"))
    assert call.stride == 48
    assert call.origins.tolist() == [7, 9, 2]
