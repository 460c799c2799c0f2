"""Exact: its forms against torch's operations, in every dtype and at every rank; its layout, its
errors, and its use by kernels, partitions and the registry."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import count, product
from typing import Any

import numpy as np
import pytest
import torch

import gradwire
from codec_calls import Result, call
from gradwire import codecs
from gradwire.errors import ConfigError
from gradwire.lang import Exact, decode, encode, fingerprint, kernels, layout
from gradwire.lang.exact_forms import PIECE
from gradwire.lang.forms import FORMS
from gradwire.partition import Spec, partition
from rooms.engine import ALIGNMENT
from typed_values import COMPLEX, DTYPES, EVERY_DTYPE, FLOATS

SIZES = [0, 1, 15, 17, 1023, 1025]
RANKS = [1, 2, 3, 5]
OPERATIONS = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
REDUCING = [f for f in FORMS if f not in ("encode", "decode") and not f.endswith("_ef")]
ANY = [
    *EVERY_DTYPE, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex32,
]  # fmt: skip
REAL = [*FLOATS, torch.float64]
PAIRS = [(op, dtype) for op in OPERATIONS for dtype in DTYPES[op]]
PAIRS += [("sum", dtype) for dtype in COMPLEX]
_fresh = count(1)


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits for integers and complex numbers; floats include NaN, infinities, both zeros."""
    made = torch.Generator().manual_seed(next(_fresh))
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=made).bool()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=made)
    values = raw.view(dtype)
    if dtype in REAL:
        ordinary = torch.randn(numel, generator=made, dtype=torch.float64).to(dtype)
        special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf], dtype=dtype)
        drawn = special[torch.randint(0, 5, (numel,), generator=made)]
        values = torch.where(torch.rand(numel, generator=made) < 0.3, drawn, ordinary)
    return values


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor, zeros: bool = True) -> bool:
    """Bitwise equal, except that all NaNs are equal; `zeros`: +0 differs from -0."""
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    nan = a.isnan()
    signs = torch.equal(a.signbit()[~nan], b.signbit()[~nan]) or not zeros
    return signs and torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan])


def exact(op: str, form: str, values: torch.Tensor, **how: Any) -> Result:
    """A call in memory as messages have it."""
    return call(Exact(op), form, values, aligned=ALIGNMENT, **how)


@pytest.mark.parametrize("target", ["c", "eager", "auto"])
def test_copies_change_no_bit(target: str) -> None:
    for dtype, n in product(ANY, SIZES):
        values, memory = numbers(n, dtype), numbers(n, dtype)
        sent = exact("", "encode", values, target=target)
        assert torch.equal(sent.payload, bits(values)), dtype
        assert torch.equal(bits(sent.values), bits(values)), dtype
        got = exact("", "decode", memory, payload=sent.payload, target=target)
        assert torch.equal(bits(got.values), bits(values)), dtype


def reduced(
    op: str, dtype: torch.dtype, form: str, ranks: int, rank: int, factor: float,
    sizes: Sequence[int] = SIZES,
) -> bool:  # fmt: skip
    """Whether reductions of random values equal torch's."""
    right = True
    for n in sizes:
        data = [numbers(n, dtype) for _ in range(ranks)]
        peers = [bits(values) for r, values in enumerate(data) if r != rank]
        own = data[rank] if rank >= 0 else numbers(n, dtype)
        if form == "decode_add":
            result = exact(op, form, own, payload=peers[0])
        else:
            result = exact(op, form, own, peers=peers, rank=rank, factor=factor)
        expected = functools.reduce(OPERATIONS[op], data)
        expected = expected if factor == 1 else expected * factor
        right &= same(result.values, expected, zeros=op == "sum")
        if form == "reduce_encode":
            right &= torch.equal(result.payload, bits(result.values))
    return right


@pytest.mark.parametrize("form", REDUCING)
def test_reductions_equal_torchs(form: str) -> None:
    """In rank order, with the caller at every rank, and without own values."""
    faults = []
    for number, (op, dtype) in enumerate(PAIRS):
        scales = dtype.is_floating_point or dtype.is_complex
        if form == "decode_add":
            calls = [(2, 0, 1.0)]
        else:
            ranks = RANKS[number % len(RANKS)], 3
            factors = [1.0, 1 / 3] if scales else [1.0]
            calls = [(n, rank, f) for n in ranks for rank in range(-1, n) for f in factors]
        faults += [(op, dtype, *c) for c in calls if not reduced(op, dtype, form, *c)]
    assert not faults


def test_decode_multiplies() -> None:
    for dtype in (torch.float16, torch.float64, torch.complex64):
        values = numbers(1025, dtype)
        found = exact("sum", "decode", numbers(1025, dtype), payload=bits(values), factor=0.3)
        assert same(found.values, values * 0.3), dtype
    with pytest.raises(AssertionError, match="int32"):
        exact("sum", "decode", torch.zeros(5).int(), factor=0.5)


def test_a_result_does_not_depend_on_its_position() -> None:
    """Law 1 needs one zero and one NaN; torch's vector and scalar code give different ones."""
    for op, dtype in product(OPERATIONS, REAL):
        nans = torch.tensor([torch.nan, -torch.nan], dtype=dtype)
        pairs = [(0.0, -0.0), (-0.0, 0.0), (nans[0], 1.0), (1.0, nans[1]), (nans[1], nans[0])]
        for own, peer in pairs:
            values, other = (torch.full((77,), float(x), dtype=dtype) for x in (own, peer))
            found = exact(op, "decode_sum", values, peers=[bits(other)]).values
            assert len(bits(found).view(77, -1).unique(dim=0)) == 1, (op, dtype, own, peer)
            assert not found.signbit().any(), (op, dtype, own, peer)


def test_large_rows_are_reduced_piece_by_piece() -> None:
    sizes = (PIECE, 2 * PIECE + 5)
    assert reduced("sum", torch.float64, "reduce_encode", 3, 1, 1 / 3, sizes)


def test_whole_tensors() -> None:
    values = numbers(30, torch.complex128).view(5, 6)
    payload = encode(Exact(""), values)
    assert torch.equal(bits(decode(Exact(""), payload, 30, torch.complex128)), payload)
    assert torch.equal(payload, bits(values.reshape(-1)))


def test_the_layout_is_the_values() -> None:
    for dtype in ANY:
        lay = layout(Exact(""), dtype)
        assert (lay.block, lay.splittable, lay.variable) == (1024, True, False)
        assert [lay.nbytes(n) for n in SIZES] == [n * dtype.itemsize for n in SIZES], dtype
        assert lay.workspace_nbytes(np.array(SIZES), threads=3) == 0


def test_dtypes_by_their_names_in_the_language() -> None:
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        assert layout(Exact(), name) == layout(Exact(), dtype)
        assert fingerprint(Exact(), name) == fingerprint(Exact(), dtype)


def test_target_triton_needs_a_gpu() -> None:
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET"):
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="target 'triton'"):
        kernels(Exact(), torch.int32, "triton")


def test_it_runs_without_a_compiler_and_on_target_triton() -> None:
    """In a process where Triton interprets kernels, if it is installed."""
    script = """if True:
        import importlib.util, warnings
        import torch
        from gradwire.lang import Exact, decode, encode, kernels

        warnings.simplefilter("error")
        assert kernels(Exact("max"), torch.int64).target == "c"
        warnings.resetwarnings()
        for target in ["c", "triton"] if importlib.util.find_spec("triton") else ["c"]:
            values = torch.arange(-500, 500)
            payload = encode(Exact(), values, target=target)
            found = decode(Exact(), payload, 1000, torch.int64, target=target)
            assert torch.equal(found, values), target
        print("done")
    """
    environment = {**os.environ, "GRADWIRE_CC": "no-such-compiler", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_fingerprints_differ() -> None:
    kinds = [(Exact(op), dtype) for op, dtype in PAIRS] + [(Exact(""), dtype) for dtype in ANY]
    assert len({fingerprint(codec, dtype) for codec, dtype in kinds}) == len(kinds)


def test_a_partition_has_its_bytes() -> None:
    of = [
        *(("sum", torch.int64, 5000), ("max", torch.bool, 1023), ("min", torch.float64, 2049)),
        *(("", torch.complex128, 1025), ("sum", torch.uint8, 0)),
    ]
    specs = [
        Spec(f"p{i}", numel, dtype, Exact(op), rotation=i)
        for i, (op, dtype, numel) in enumerate(of)
    ]
    sizes = [spec.dtype.itemsize for spec in specs]
    for chunks in (1, 3):
        cut = partition(specs, chunks)
        assert [int(cut.numel[cut.item == i].sum()) for i in range(5)] == [s.numel for s in specs]
        nbytes = cut.numel * np.array(sizes)[cut.item]
        assert (cut.start % 1024 == 0).all()
        whole = int((-(-nbytes // ALIGNMENT) * ALIGNMENT).sum())
        assert sum(sum(of_segment) for of_segment in cut.sizes) == whole


def test_it_is_its_own_plain_form() -> None:
    """An uncompressed chunk needs the same operation."""
    spec = Spec("p", 5000, torch.int32, Exact("max"))
    cut = partition([spec], 2, plain=True)
    assert cut.kinds == ((Exact("max"), torch.int32),)
    assert cut.sizes[0][:2] == cut.sizes[0][2:]
    assert int(cut.numel[cut.chunk >= 2].sum()) == 5000


def test_it_is_not_a_public_codec() -> None:
    assert not any(issubclass(made, Exact) for made, _ in codecs.REGISTRY.values())
    assert all("xact" not in row["codec"] for row in codecs.listing())
    assert not hasattr(codecs, "Exact")
    assert not hasattr(gradwire, "Exact")
