"""The tests that an algorithm should pass, on the skeleton. Copy this file with it."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fifo import FifoHub
from gradwire import QSGD, Codec, Options, all_reduce
from gradwire.algorithms import REGISTRY
from gradwire.codecs import Identity, TernGrad, TopK
from gradwire.engine import HEADER_BYTES, Communicator
from ranks import WORLD_SIZES, as_threads

EXAMPLE = Path(__file__).parents[2] / "examples" / "skeleton_algorithm.py"
NAME = "star"
CODECS: list[Codec] = [
    Identity(),
    QSGD(),
    QSGD(rounding="stochastic"),
    TernGrad(),
    TopK(density=0.05),
]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Registered only during a test of this file."""
    runpy.run_path(str(EXAMPLE))
    yield
    del REGISTRY[NAME]


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: type(c).__name__)
def test_replicas_agree_and_nothing_is_lost(codec: Codec) -> None:
    for n in WORLD_SIZES:
        averaged_by(codec, n)


def averaged_by(codec: Codec, n: int) -> None:
    data = [torch.randn(1003, generator=torch.Generator().manual_seed(r)) for r in range(n)]

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        mine, residual = data[comm.rank].clone(), torch.zeros(1003)
        options = Options(algorithm=NAME, segments=3)
        all_reduce(mine, codec, op="avg", group=comm, residual=residual, options=options)
        return mine, residual

    results = as_threads(n, body)
    average, kept = results[0][0], sum(residual.double() for _, residual in results)
    assert all(torch.equal(mine, average) for mine, _ in results)
    brought = torch.stack(data).double().sum(0)
    torch.testing.assert_close(n * average.double() + kept, brought, rtol=1e-5, atol=1e-5)


def test_messages_may_match_by_their_order_alone() -> None:
    """As over NCCL: `hop` gives messages the same order on both ends."""

    def body(comm: Communicator) -> torch.Tensor:
        mine = torch.randn(1003, generator=torch.Generator().manual_seed(comm.rank))
        all_reduce(mine, "qsgd", group=comm, options=Options(algorithm=NAME, segments=3))
        return mine

    for n in WORLD_SIZES:
        ordered = as_threads(n, body, fifo=FifoHub(n, lazy=True))
        assert all(map(torch.equal, ordered, as_threads(n, body)))


def test_the_formula_counts_what_the_graph_sends() -> None:
    sizes = [[160], [0], [16]]
    for n in WORLD_SIZES:
        for rank in range(n):
            graph = REGISTRY[NAME].build(rank, n, sizes)
            places = [(graph.buffer_segment[b], graph.buffer_chunk[b]) for b in graph.sent()]
            counted = sum(sizes[s][c] + HEADER_BYTES for s, c in places)
            assert REGISTRY[NAME].wire_bytes(rank, n, sizes) == counted


def test_expected_time() -> None:
    assert REGISTRY[NAME].seconds(4, 1e6, 1e-3, 8e-9) == pytest.approx(2e-3 + 6 * 8e-3)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == "averages by rank: 1.5 1.5 1.5 1.5\n"
