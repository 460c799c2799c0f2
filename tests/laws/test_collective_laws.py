"""The laws of DESIGN.md for collectives, over codec x dtype x world size x ragged sizes."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from gradwire import QSGD, Cast, Codec, CodecError, Identity, TernGrad, TransportError
from gradwire.codecs import RandomK, Rotated, ThreeLC, TopK
from gradwire.collectives import AVERAGE, SUM, Item, Options, prepare
from gradwire.engine import Communicator
from gradwire.lang import layout, rng
from gradwire.partition import Spec
from gradwire.transport import Hub
from products import EXHAUSTIVE, every_pair, in_turn, one_in
from ranks import WORLD_SIZES, as_threads, caught

SIZES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 5000]
CODECS: list[Codec] = [
    Identity(),
    Cast("fp16"),
    Cast("bf16"),
    QSGD(),
    QSGD(bits=3, block=64, metadata="fp32"),
    QSGD(bits=8, block=16, scale="max", rounding="nearest"),
    QSGD(bits=2, scale="l2"),
    QSGD(rounding="stochastic"),
    TernGrad(),
    TernGrad(form="ternary"),
    TopK(density=0.05),
    RandomK(density=0.1),
    ThreeLC(),
    Rotated(),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

every_codec = pytest.mark.parametrize("codec", CODECS, ids=str)
every_world = pytest.mark.parametrize("world_size", WORLD_SIZES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_case = pytest.mark.parametrize(
    ("codec", "dtype", "world_size"), one_in(5, product(CODECS, DTYPES, WORLD_SIZES)), ids=str
)


def gradients(world_size: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Fresh random values: gradients[rank][tensor]."""
    return [[torch.randn(n).to(dtype) for n in SIZES] for _ in range(world_size)]


def reduce_all(
    comm: Communicator,
    tensors: list[torch.Tensor],
    codec: Codec,
    residuals: list[torch.Tensor] | None = None,
    step: int = 0,
    average: bool = True,
    options: Options | None = None,
) -> Any:
    """One fused all-reduce of all tensors, as a DDP bucket would be."""
    specs = [
        Spec(f"p{i}", t.numel(), t.dtype, codec, residuals is not None, rotation=i)
        for i, t in enumerate(tensors)
    ]
    collective = prepare(comm.calls, specs, options, AVERAGE if average else SUM)
    items = [
        Item(
            t,
            rng.parameter_keys(0, f"p{i}", comm.rank),
            step,
            residuals[i] if residuals else None,
        )
        for i, t in enumerate(tensors)
    ]
    outcome = collective.start(items).result()
    return collective, outcome


@every_case
def test_law_1_replicas_agree(codec: Codec, dtype: torch.dtype, world_size: int) -> None:
    data = gradients(world_size, dtype)

    def body(comm: Communicator) -> list[torch.Tensor]:
        mine = [t.clone() for t in data[comm.rank]]
        reduce_all(comm, mine, codec)
        return mine

    results = as_threads(world_size, body)
    for rank in range(1, world_size):
        for expected, found in zip(results[0], results[rank], strict=True):
            assert torch.equal(expected, found)


@every_dtype
@every_world
def test_identity_is_the_average(dtype: torch.dtype, world_size: int) -> None:
    data = gradients(world_size, dtype)

    def body(comm: Communicator) -> list[torch.Tensor]:
        mine = [t.clone() for t in data[comm.rank]]
        reduce_all(comm, mine, Identity())
        return mine

    for i, found in enumerate(as_threads(world_size, body)[0]):
        expected = torch.stack([rank[i].double() for rank in data]).mean(0)
        eps = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
        torch.testing.assert_close(found.double(), expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("bits", [2, 4, 8])
@every_world
def test_error_is_bounded_by_the_grid_of_both_encodings(bits: int, world_size: int) -> None:
    data = gradients(world_size, torch.float32)

    def body(comm: Communicator) -> list[torch.Tensor]:
        mine = [t.clone() for t in data[comm.rank]]
        reduce_all(comm, mine, QSGD(bits=bits))
        return mine

    for i, found in enumerate(as_threads(world_size, body)[0]):
        if not found.numel():
            continue
        expected = torch.stack([rank[i].double() for rank in data]).mean(0)
        # A step of the grid is range / (2^bits - 1), with outward rounding of bf16 metadata on top.
        widest = 2 * max(float(rank[i].abs().max()) for rank in data)
        assert float((found - expected).abs().max()) <= 2 * 1.05 * widest / (2**bits - 1) + 1e-6


@every_case
def test_law_2_nothing_is_lost(codec: Codec, dtype: torch.dtype, world_size: int) -> None:
    data = gradients(world_size, dtype)
    before = [[torch.randn(n) * 0.1 for n in SIZES] for _ in range(world_size)]

    def body(comm: Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        mine = [t.clone() for t in data[comm.rank]]
        residuals = [t.clone() for t in before[comm.rank]]
        reduce_all(comm, mine, codec, residuals)
        return mine, residuals

    results = as_threads(world_size, body)
    if world_size == 1:
        return  # nothing is sent, so nothing can be lost; the residual is unchanged
    for i in range(len(SIZES)):
        brought = sum(data[r][i].double() + before[r][i].double() for r in range(world_size))
        kept = sum(results[r][1][i].double() for r in range(world_size))
        sent = results[0][0][i].double() * world_size
        # The result is stored in the gradient's dtype; the residual is exact about the fp32 value.
        slack = torch.finfo(dtype).eps * 4 * world_size if dtype != torch.float32 else 1e-5
        torch.testing.assert_close(sent + kept, brought, rtol=slack, atol=slack)


@pytest.mark.parametrize(
    ("codec", "dtype", "value"),
    every_pair(CODECS, DTYPES, [float("inf"), float("-inf"), float("nan")]),
    ids=str,
)
def test_law_4_non_finite_travels(codec: Codec, dtype: torch.dtype, value: float) -> None:
    world_size, size, at = 3, 2000, 700
    data = [torch.randn(size).to(dtype) for _ in range(world_size)]
    data[1][at] = value

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        mine, residual = data[comm.rank].clone(), torch.full((size,), 0.5)
        reduce_all(comm, [mine], codec, [residual])
        return mine, residual

    for found, residual in as_threads(world_size, body):
        assert not torch.isfinite(found[at])
        assert torch.isfinite(residual).all()


@pytest.mark.parametrize(
    ("codec", "world_size", "segments"),
    one_in(5, product(CODECS, WORLD_SIZES, [1, 3, None])),
    ids=str,
)
def test_law_5_bytes_are_accounted(codec: Codec, world_size: int, segments: int | None) -> None:
    """The bytes sent are those of the formula, unless lengths depend on data."""
    data = gradients(world_size, torch.float32)
    left = [0] * world_size

    def leave(source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        with lock:
            left[source] += message.numel()

    def body(comm: Communicator) -> tuple[int, int]:
        options = Options(segments=segments)
        collective, outcome = reduce_all(comm, data[comm.rank], codec, options=options)
        return collective.prepared.wire_bytes, outcome.wire_bytes

    lock = threading.Lock()
    found = as_threads(world_size, body, Hub(world_size, corrupt=leave))
    for rank, (formula, counted) in enumerate(found):
        assert counted == left[rank]
        assert formula == counted or layout(codec).data_dependent


@pytest.mark.parametrize(("codec", "world_size"), in_turn(CODECS, [2, 3, 5]), ids=str)
def test_law_8_company_changes_nothing(codec: Codec, world_size: int) -> None:
    """Fused in one collective, one by one, or in another order and pipelined: the same bits."""
    data = gradients(world_size, torch.float32)

    def variant(fused: bool, segments: int | None) -> list[torch.Tensor]:
        def body(comm: Communicator) -> list[torch.Tensor]:
            mine = [t.clone() for t in data[comm.rank]]
            order = list(range(len(mine)))
            groups = [order[::-1]] if fused else [[i] for i in order]
            for group in groups:
                specs = [
                    Spec(f"p{i}", mine[i].numel(), mine[i].dtype, codec, rotation=i) for i in group
                ]
                items = [Item(mine[i], rng.parameter_keys(0, f"p{i}", comm.rank), 5) for i in group]
                prepare(comm.calls, specs, Options(segments=segments)).start(items).result()
            return mine

        result: list[torch.Tensor] = as_threads(world_size, body)[0]
        return result

    alone = variant(fused=False, segments=1)
    for other in (variant(fused=True, segments=1), variant(fused=True, segments=4)):
        for expected, found in zip(alone, other, strict=True):
            assert torch.equal(expected, found)


@every_codec
def test_law_6_targets_agree_through_a_collective(codec: Codec) -> None:
    data = gradients(3, torch.float32)

    def variant(target: str) -> list[torch.Tensor]:
        def body(comm: Communicator) -> list[torch.Tensor]:
            mine = [t.clone() for t in data[comm.rank]]
            # Ranks of one group may use different targets: here rank 0 always is eager.
            chosen = "eager" if comm.rank == 0 else target
            reduce_all(comm, mine, codec, options=Options(target=chosen))
            return mine

        result: list[torch.Tensor] = as_threads(3, body)[1]
        return result

    for eager, compiled in zip(variant("eager"), variant("auto"), strict=True):
        assert torch.equal(eager, compiled)


@EXHAUSTIVE
def test_law_3_unbiased_through_a_collective() -> None:
    """The mean of 2 000 averages through 2 bits is the average, within 5 standard errors."""
    world_size, size, draws = 2, 200, 2000
    data = [torch.randn(size) for _ in range(world_size)]
    expected = torch.stack([d.double() for d in data]).mean(0)

    def body(comm: Communicator) -> np.ndarray:
        results = []
        for step in range(draws):
            mine = data[comm.rank].clone()
            reduce_all(comm, [mine], QSGD(bits=2), step=step)
            results.append(mine.double().numpy())
        return np.stack(results)

    found = as_threads(world_size, body)[0]
    error = found.mean(0) - expected.numpy()
    standard = found.std(0) / draws**0.5 + 1e-9
    assert (np.abs(error) < 5 * standard).all()


def test_law_10_a_dead_peer_is_named_by_every_survivor() -> None:
    hub, agreed = Hub(4, timeout=20), threading.Barrier(4)

    def body(comm: Communicator) -> BaseException | None:
        reduce_all(comm, [torch.randn(5000)], QSGD())
        agreed.wait()  # all ranks have agreed, and this rank has everything
        if comm.rank == 2:
            hub.kill(2)
            return None
        return caught(lambda: reduce_all(comm, [torch.randn(5000)], QSGD(), step=1))

    errors = as_threads(4, body, hub)
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], TransportError)
        assert errors[rank].peer == 2


def test_law_10_a_corrupted_payload_ends_in_an_error_on_every_rank() -> None:
    def corrupt(source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        if (source, destination) == (1, 2) and message.numel() > 200:
            message[150] ^= 4

    hub = Hub(3, timeout=20, corrupt=corrupt)

    def body(comm: Communicator) -> BaseException | None:
        return caught(lambda: reduce_all(comm, [torch.randn(5000)], QSGD()))

    errors = as_threads(3, body, hub)
    assert isinstance(errors[2], CodecError)
    assert "rank 1" in str(errors[2])
    for rank in (0, 1):
        assert isinstance(errors[rank], TransportError)


def test_a_broken_group_stays_broken() -> None:
    hub = Hub(2, timeout=0.5)

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            first = caught(lambda: reduce_all(comm, [torch.randn(300)], QSGD()))
            second = caught(lambda: reduce_all(comm, [torch.randn(300)], QSGD()))
            assert isinstance(first, TransportError)
            assert isinstance(second, TransportError)

    as_threads(2, body, hub)
