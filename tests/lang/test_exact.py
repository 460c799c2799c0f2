"""Exact: all forms against torch's operations, in every dtype, at every rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import count, product

import numpy as np
import pytest
import torch

from gradwire.lang import ROW, Exact, decode, encode, kernels
from gradwire.lang.exact_forms import PIECE
from gradwire.lang.forms import FORMS
from rooms.engine import ALIGNMENT, align

SIZES = [0, 1, 15, 17, 1023, 1025]
RANKS = [1, 2, 3, 5]
OPERATIONS = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
FEEDBACK = [form for form in FORMS if form.endswith("_ef")]
REDUCING = [form for form in FORMS if form not in ("encode", "decode", *FEEDBACK)]
ANY = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
    torch.uint64, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128,
]  # fmt: skip
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ORDERED = [torch.bool, *INTEGERS, *FLOATS]
PAIRS = [
    *(("sum", dtype) for dtype in [*INTEGERS, *FLOATS, torch.complex64, torch.complex128]),
    *((op, dtype) for op in ("min", "max") for dtype in ORDERED),
]
SENTINEL = 0xA5
_fresh = count(1)


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits for integers and complex numbers; floats include NaN, infinities, both zeros."""
    made = torch.Generator().manual_seed(next(_fresh))
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=made).bool()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=made)
    values = raw.view(dtype)
    if dtype in FLOATS:
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


class Memory:
    """The rows of a call and their memory: values minimally aligned, payloads as in messages."""

    def __init__(self, dtype: torch.dtype, sizes: Sequence[int], payloads: int) -> None:
        self.dtype, self.sizes = dtype, sizes
        itemsize = dtype.itemsize
        room = [align(n * itemsize) + ALIGNMENT for n in sizes]
        # aligned to the itemsize only
        self.at = [sum(room[:i]) + itemsize for i in range(len(sizes))]
        self.payload_at = [sum(room[:i]) for i in range(len(sizes))]
        self.values = torch.full((sum(room) + itemsize,), SENTINEL, dtype=torch.uint8)
        self.payload = torch.full((sum(room) + 64,), SENTINEL, dtype=torch.uint8)
        # peers' payloads at unequal distances, the last rank's first
        order = range(payloads)
        self.places = [sum(sum(room) + 64 + 16 * j for j in order[k + 1 :]) for k in order]
        self.sources = torch.zeros(sum(sum(room) + 64 + 16 * j for j in order), dtype=torch.uint8)
        self.rows = np.zeros(len(sizes), ROW)
        self.rows["numel"] = sizes
        self.rows["values"] = self.values.data_ptr() + np.array(self.at)
        self.rows["payload"] = self.payload.data_ptr() + np.array(self.payload_at)
        if payloads:
            first = self.sources.data_ptr() + self.places[0]
            self.rows["source"] = first + np.array(self.payload_at)
        self.distances = np.array([at - self.places[0] for at in self.places], dtype="i8")

        # a part, or the number of a peer's payload -> its memory, and the place of each row
        self.parts: dict[str | int, tuple[torch.Tensor, list[int]]] = {
            "values": (self.values, self.at),
            "payload": (self.payload, self.payload_at),
            **{k: (self.sources[at:], self.payload_at) for k, at in enumerate(self.places)},
        }

    def put(self, part: str | int, i: int, values: torch.Tensor) -> None:
        memory, places = self.parts[part]
        memory[places[i] :][: values.nbytes] = bits(values)

    def got(self, part: str, i: int) -> torch.Tensor:
        memory, places = self.parts[part]
        nbytes = self.sizes[i] * self.dtype.itemsize
        return memory[places[i] :][:nbytes].clone().view(self.dtype)

    def check_bounds(self) -> None:
        """Nothing was written outside the rows."""
        for part in ("values", "payload"):
            memory, places = self.parts[part]
            beside = torch.ones(len(memory), dtype=torch.bool)
            for begin, n in zip(places, self.sizes, strict=True):
                beside[begin : begin + n * self.dtype.itemsize] = False
            assert bool((memory[beside] == SENTINEL).all()), part


def times(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values if factor == 1 else values * factor


@pytest.mark.parametrize("target", ["c", "eager", "auto"])
def test_copies_change_no_bit(target: str) -> None:
    for dtype in ANY:
        made = kernels(Exact(""), dtype, target, ["encode", "decode"])
        assert made.device.type == "cpu"
        memory = Memory(dtype, SIZES, 0)
        data = [numbers(n, dtype) for n in SIZES]
        for i, values in enumerate(data):
            memory.put("values", i, values)
        made.run("encode", memory.rows)
        memory.check_bounds()
        for i, values in enumerate(data):
            assert torch.equal(bits(memory.got("payload", i)), bits(values)), dtype
            assert torch.equal(bits(memory.got("values", i)), bits(values)), dtype
        memory.values.fill_(SENTINEL)
        made.run("decode", memory.rows)
        memory.check_bounds()
        for i, values in enumerate(data):
            assert torch.equal(bits(memory.got("values", i)), bits(values)), dtype


def reduced(op: str, dtype: torch.dtype, form: str, ranks: int, rank: int, factor: float) -> bool:
    """Whether a reduction of random rows equals torch's, and writes nowhere else."""
    alone = form == "decode_add"
    made = kernels(Exact(op), dtype, "c", [form])
    data = [[numbers(n, dtype) for n in SIZES] for _ in range(2 if alone else ranks)]
    peers = data[1:] if alone else [d for r, d in enumerate(data) if r != rank]
    memory = Memory(dtype, SIZES, len(peers))
    for i in range(len(SIZES)):
        if rank >= 0:
            memory.put("values", i, data[rank][i])
        for k, peer in enumerate(peers):
            memory.put(k, i, peer[i])
        if alone:
            memory.put("payload", i, peers[0][i])
    distances = memory.distances if peers and not alone else None
    sent = memory.sources.clone()
    made.run(form, memory.rows, ranks, rank, distances=distances, factor=factor)
    memory.check_bounds()
    right = torch.equal(memory.sources, sent)  # peers may read them, too
    for i in range(len(SIZES)):
        expected = times(functools.reduce(OPERATIONS[op], [d[i] for d in data]), factor)
        right &= same(memory.got("values", i), expected, zeros=op == "sum")
        if form == "reduce_encode":
            right &= torch.equal(bits(memory.got("payload", i)), bits(memory.got("values", i)))
    return right


@pytest.mark.parametrize("form", REDUCING)
def test_reductions_equal_torchs(form: str) -> None:
    """In rank order, with the caller at every rank, and without own values."""
    faults = []
    for number, (op, dtype) in enumerate(PAIRS):
        scales = dtype.is_floating_point or dtype.is_complex
        if form == "decode_add":
            calls = [(1, 0, 1.0)]
        else:
            ranks = RANKS[number % len(RANKS)], 3
            factors = [1.0, 1 / 3] if scales else [1.0]
            calls = [(n, rank, f) for n in ranks for rank in range(-1, n) for f in factors]
        faults += [(op, dtype, *c) for c in calls if not reduced(op, dtype, form, *c)]
    assert not faults


def test_decode_multiplies() -> None:
    for dtype in (torch.float16, torch.float64, torch.complex64):
        memory, values = Memory(dtype, [1025], 0), numbers(1025, dtype)
        memory.put("payload", 0, values)
        kernels(Exact(), dtype).run("decode", memory.rows, factor=0.3)
        memory.check_bounds()
        assert same(memory.got("values", 0), values * 0.3), dtype


def test_integers_take_no_factor() -> None:
    memory = Memory(torch.int32, [5], 0)
    with pytest.raises(AssertionError, match="int32"):
        kernels(Exact(), torch.int32).run("decode", memory.rows, factor=0.5)


def test_a_result_does_not_depend_on_its_position() -> None:
    """Law 1 needs one zero and one NaN; torch's vector and scalar code give different ones."""
    for op, dtype in product(OPERATIONS, FLOATS):
        nans = torch.tensor([torch.nan, -torch.nan], dtype=dtype)
        pairs = [(0.0, -0.0), (-0.0, 0.0), (nans[0], 1.0), (1.0, nans[1]), (nans[1], nans[0])]
        for own, peer in pairs:
            memory = Memory(dtype, [77], 1)
            memory.put("values", 0, torch.full((77,), float(own), dtype=dtype))
            memory.put(0, 0, torch.full((77,), float(peer), dtype=dtype))
            made = kernels(Exact(op), dtype)
            made.run("decode_sum", memory.rows, 2, 0, distances=memory.distances)
            found = bits(memory.got("values", 0)).view(77, -1)
            assert len(found.unique(dim=0)) == 1, (op, dtype, own, peer)
            assert not memory.got("values", 0).signbit().any(), (op, dtype, own, peer)


def test_the_result_may_overwrite_a_payload() -> None:
    """A collective stores results in the memory of contributions."""
    memory = Memory(torch.int64, [1025], 2)
    data = [numbers(1025, torch.int64) for _ in range(3)]
    memory.put("values", 0, data[0])
    for k in range(2):
        memory.put(k, 0, data[k + 1])
    second = memory.places[1] + memory.payload_at[0]
    memory.rows["payload"] = memory.sources.data_ptr() + second
    made = kernels(Exact(), torch.int64)
    made.run("reduce_encode", memory.rows, 3, 0, distances=memory.distances)
    expected = data[0] + data[1] + data[2]
    assert torch.equal(memory.got("values", 0), expected)
    assert torch.equal(memory.sources[second:][: expected.nbytes], bits(expected))


@pytest.mark.parametrize("numel", [PIECE, 2 * PIECE + 5])
def test_large_rows_are_reduced_piece_by_piece(numel: int) -> None:
    memory = Memory(torch.float64, [numel], 2)
    data = [numbers(numel, torch.float64) for _ in range(3)]
    memory.put(0, 0, data[0])
    memory.put("values", 0, data[1])
    memory.put(1, 0, data[2])
    made = kernels(Exact(), torch.float64)
    made.run("reduce_encode", memory.rows, 3, 1, distances=memory.distances, factor=1 / 3)
    memory.check_bounds()
    expected = (data[0] + data[1] + data[2]) * (1 / 3)
    assert same(memory.got("values", 0), expected)
    assert same(memory.got("payload", 0), expected)


def test_whole_tensors() -> None:
    values = numbers(30, torch.complex128).view(5, 6)
    payload = encode(Exact(""), values)
    assert torch.equal(bits(decode(Exact(""), payload, 30, torch.complex128)), payload)
    assert torch.equal(payload, bits(values.reshape(-1)))
