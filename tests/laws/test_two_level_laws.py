"""The laws of DESIGN.md for ranks on several machines: shape of machines x inside x codec.

test_algorithm_laws.py has the algorithm hierarchical beside the others, with fewer codecs.
"""

from __future__ import annotations

import random
import threading
from itertools import product

import pytest
import torch
from test_algorithm_laws import check_nothing_is_lost, reduce_all, run_with

from gradwire import (
    QSGD,
    Codec,
    CodecError,
    ConfigError,
    Identity,
    Options,
    TransportError,
    all_reduce,
    codecs,
)
from gradwire.collectives import Item, check_defined, check_feedback, prepare
from gradwire.engine import Communicator
from gradwire.lang import layout, rng
from gradwire.partition import Spec
from gradwire.transport import Hub
from products import every_pair, in_turn, one_in
from ranks import WORLD_SIZES, as_threads, caught

# the machine of each rank
SHAPES = {
    "2 of 2": (0, 0, 1, 1),
    "2 of 3": (0, 0, 0, 1, 1, 1),
    "3 of 1 and 1 of 2": (0, 1, 2, 3, 3),
    "5 in a grid": (0, 1, 2, 3, 4, 4),
}
INSIDE = ("codec", "full")


def way(shape: str, inside: str = "codec") -> Options:
    between = "grid" if "grid" in shape else "sra"
    return Options(algorithm="hierarchical", nodes=SHAPES[shape], inside=inside, between=between)


def defined(codec: Codec) -> bool:
    """Whether the algorithm allows the codec, with a residual."""
    try:
        check_defined("hierarchical", codec)
        check_feedback(codec)
    except ConfigError:
        return False
    return True


CODECS = [name for name in codecs.REGISTRY if defined(codecs.get(name))]
CODECS.append("qsgd:rounding=stochastic")
every_case = pytest.mark.parametrize(
    ("name", "machines"), in_turn(CODECS, list(product(SHAPES, INSIDE))), ids=str
)


def test_most_codecs_are_here() -> None:
    assert set(codecs.REGISTRY) - set(CODECS) <= {"tbq", "randomk", "lowrank"}


@every_case
def test_laws_1_2_and_5(name: str, machines: tuple[str, str]) -> None:
    """Replicas agree, nothing is lost, bytes are accounted."""
    shape, inside = machines
    codec, n = codecs.get(name), len(SHAPES[shape])
    found = run_with(way(shape, inside), codec, n, torch.float32, True)
    for rank in found.results[1:]:
        assert all(map(torch.equal, rank, found.results[0]))
    check_nothing_is_lost(found, n, torch.float32, True)
    # where lengths depend on data, the formula uses the codec's expected length
    assert found.formula == found.counted or layout(codec).data_dependent
    assert all(found.counted)


@every_case
def test_law_4_non_finite_travels(name: str, machines: tuple[str, str]) -> None:
    shape, inside = machines
    codec, n, size, at = codecs.get(name), len(SHAPES[shape]), 3000, 700
    data = [torch.randn(size) for _ in range(n)]
    data[n - 1][at] = float("inf")

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        mine, residual = data[comm.rank].clone(), torch.full((size,), 0.5)
        reduce_all(comm, [mine], codec, way(shape, inside), [residual])
        return mine, residual

    for found, residual in as_threads(n, body):
        assert not torch.isfinite(found).all()
        assert torch.isfinite(residual).all()


@every_case
def test_laws_6_and_8_targets_and_company_change_nothing(
    name: str, machines: tuple[str, str]
) -> None:
    """All tensors at once, pipelined, on compiled kernels; or one by one, on eager ones."""
    shape, inside = machines
    codec, n = codecs.get(name), len(SHAPES[shape])
    data = [[torch.randn(m) for m in (1025, 17, 3000)] for _ in range(n)]

    def variant(together: bool) -> list[torch.Tensor]:
        def body(comm: Communicator) -> list[torch.Tensor]:
            mine = [t.clone() for t in data[comm.rank]]
            how = {"segments": 3 if together else 1, "target": "auto" if together else "eager"}
            options = Options(**{**vars(way(shape, inside)), **how})
            for group in [[2, 0, 1]] if together else [[0], [1], [2]]:
                specs = [
                    Spec(f"p{i}", mine[i].numel(), torch.float32, codec, rotation=i) for i in group
                ]
                items = [Item(mine[i], rng.parameter_keys(0, f"p{i}", comm.rank), 5) for i in group]
                prepare(comm.calls, specs, options).start(items).result()
            return mine

        result: list[torch.Tensor] = as_threads(n, body)[0]
        return result

    assert all(map(torch.equal, variant(True), variant(False)))


@pytest.mark.parametrize(("shape", "inside"), one_in(3, product(SHAPES, INSIDE)), ids=str)
def test_law_3_unbiased_means_unbiased(shape: str, inside: str) -> None:
    """QSGD: over 40 000 draws the mean of each of ten values is within 5 standard errors."""
    n, pattern = len(SHAPES[shape]), 10
    made = torch.Generator().manual_seed(0)
    values = [torch.randn(pattern, generator=made) for _ in range(n)]
    draws = 40_000

    def body(comm: Communicator) -> torch.Tensor:
        mine = values[comm.rank].repeat(draws)
        codec = QSGD(bits=2, block=pattern * 8)
        reduce_all(comm, [mine], codec, way(shape, inside))
        return mine

    found = as_threads(n, body)[0].view(draws, pattern).double()
    expected = torch.stack(values).double().mean(0)
    standard = found.std(0) / draws**0.5
    assert (standard > 0).all()
    assert ((found.mean(0) - expected).abs() < 5 * standard).all()


@pytest.mark.parametrize(("shape", "inside"), every_pair(SHAPES, INSIDE), ids=str)
def test_beside_a_float64_reference(shape: str, inside: str) -> None:
    """Without a codec, fp32 rounds once per added rank; float64 has almost no error."""
    n = len(SHAPES[shape])
    made = torch.Generator().manual_seed(1)
    data = [torch.randn(5000, generator=made, dtype=torch.float64) for _ in range(n)]
    expected = torch.stack(data).mean(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):

        def body(comm: Communicator, dtype: torch.dtype = dtype) -> torch.Tensor:
            mine = data[comm.rank].to(dtype)
            options = way(shape, inside)
            all_reduce(mine, codec=None, op="avg", group=comm, options=options)
            return mine

        scale = torch.stack(data).abs().sum(0).max()
        for found in as_threads(n, body):
            error = (found.double() - expected).abs().max()
            assert error <= torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("n", WORLD_SIZES)
@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_law_5_on_machines_at_random(n: int, seed: int) -> None:
    drawn = random.Random(100 * n + seed)
    options = Options(
        algorithm="hierarchical",
        nodes=tuple(drawn.randrange(4) for _ in range(n)),
        inside=drawn.choice(INSIDE),
        between=drawn.choice(["sra", "grid"]),
        segments=drawn.choice([1, 3]),
    )
    codec = drawn.choice([Identity(), QSGD(), codecs.get("topk", density=0.05)])
    found = run_with(options, codec, n, torch.float32, True)
    assert found.formula == found.counted
    assert n == 1 or all(found.counted)
    for rank in found.results[1:]:
        assert all(map(torch.equal, rank, found.results[0]))
    check_nothing_is_lost(found, n, torch.float32, True)


@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("inside", INSIDE)
def test_law_10_a_dead_peer_is_named_by_every_survivor(inside: str, dead: int) -> None:
    n, hub, agreed = 5, Hub(5, timeout=20), threading.Barrier(5)
    options = Options(algorithm="hierarchical", nodes=(0, 0, 1, 1, 1), inside=inside)

    def body(comm: Communicator) -> BaseException | None:
        reduce_all(comm, [torch.randn(5000)], QSGD(), options)
        agreed.wait()  # all ranks have agreed, and this rank has everything
        if comm.rank == dead:
            hub.kill(dead)
            return None
        return caught(lambda: reduce_all(comm, [torch.randn(5000)], QSGD(), options))

    errors = as_threads(n, body, hub)
    for rank in set(range(n)) - {dead}:
        assert isinstance(errors[rank], TransportError)
        assert errors[rank].peer == dead


def test_error_is_that_of_the_encodings() -> None:
    """docs/reference/algorithms.md: 4 machines of 2, QSGD, in encodings of one rank's values."""
    made = torch.Generator().manual_seed(0)
    data = [torch.randn(200_000, generator=made) for _ in range(8)]
    mean = torch.stack(data).double().mean(0)
    nodes = (0, 0, 1, 1, 2, 2, 3, 3)
    ways = {
        15: Options(),
        # 3 encodings of two ranks' sums, one of the sum of all
        14: Options(algorithm="hierarchical", nodes=nodes, inside="full", between="sra"),
        # in addition the locals of 4 ranks
        18: Options(algorithm="hierarchical", nodes=nodes, inside="codec", between="sra"),
        # 2 of two ranks' sums, 1 of four, 1 of eight, and 4 locals
        20: Options(algorithm="hierarchical", nodes=nodes, inside="codec", between="grid"),
    }
    found = {}
    for units, options in ways.items():

        def body(comm: Communicator, options: Options = options) -> torch.Tensor:
            mine = data[comm.rank].clone()
            reduce_all(comm, [mine], QSGD(bits=4, block=128), options)
            return mine

        error = as_threads(8, body)[0].double() - mean
        found[units] = float(error.square().sum() / mean.square().sum())
    for units, error in found.items():
        assert error / found[15] == pytest.approx(units / 15, rel=0.06)


@pytest.mark.parametrize("at", [150, -100])
def test_law_10_a_corrupted_part_of_a_message_is_named(at: int) -> None:
    """Two machines of two ranks: the share that rank 0 sends to rank 1."""

    def corrupt(source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        if (source, destination) == (0, 1) and message.numel() > 200:
            message[at] ^= 4

    hub = Hub(4, timeout=20, corrupt=corrupt)

    def body(comm: Communicator) -> BaseException | None:
        return caught(lambda: reduce_all(comm, [torch.randn(5000)], QSGD(), way("2 of 2")))

    errors = as_threads(4, body, hub)
    assert isinstance(errors[1], CodecError)
    # its chunks are both machines' parts of share 1
    assert f"message from rank 0 (segment 0, chunk {1 if at > 0 else 3})" in str(errors[1])
    assert "checksum differs" in str(errors[1])
    for rank in (0, 2, 3):
        assert isinstance(errors[rank], TransportError)
