"""The laws of DESIGN.md for every algorithm: over algorithm x codec x world size x ragged sizes.

test_collective_laws.py has more codecs and dtypes, with the default algorithm.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire import QSGD, Codec, ConfigError, Identity, TernGrad, TransportError
from gradwire.codecs import RandomK, TopK
from gradwire.collectives import AVERAGE, SUM, Item, Options, prepare
from gradwire.engine import Communicator
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.transport import Hub
from gradwire.transport.shm import Shm
from products import every_pair, in_turn, one_in
from ranks import WORLD_SIZES, as_threads, caught
from transport.shm_ends import ends

SIZES = [1, 17, 0, 128, 129, 1000, 1025]
CODECS: list[Codec] = [
    Identity(),
    QSGD(),
    QSGD(rounding="stochastic"),
    TernGrad(),
    TopK(density=0.05),
    RandomK(density=0.1),
]
NAMES = ["identity", "qsgd", "stochastic", "terngrad", "topk", "randomk"]
FEW: list[Codec] = [Identity(), QSGD(), TopK(density=0.05)]

# The options of each algorithm, as a function of world size n.
WAYS = {
    "sra": lambda n: Options(),
    "ring": lambda n: Options(algorithm="ring"),
    "tree": lambda n: Options(algorithm="tree"),
    "parameter_server": lambda n: Options(algorithm="parameter_server"),
    "three_servers": lambda n: Options(algorithm="parameter_server", partitions=3),
    "coordinated": lambda n: Options(coordinated=True, segments=3),
    "coordinated_servers": lambda n: Options(
        algorithm="parameter_server", partitions=5, coordinated=True
    ),
    "all_gather": lambda n: Options(algorithm="all_gather"),
    "machines_of_2": lambda n: Options(
        algorithm="hierarchical", nodes=tuple(r // 2 for r in range(n)), inside="full"
    ),
    "3_machines_in_turn": lambda n: Options(
        algorithm="hierarchical", nodes=tuple(r % 3 for r in range(n)), inside="codec"
    ),
    "one_machine": lambda n: Options(algorithm="hierarchical", nodes=(7,) * n, inside="full"),
    "grid": lambda n: Options(algorithm="hierarchical", nodes=tuple(range(n)), between="grid"),
}

every_way = pytest.mark.parametrize("way", WAYS)
some_ways = pytest.mark.parametrize(
    ("codec", "way"), in_turn(CODECS, list(WAYS), always=1), ids=str
)
every_case = pytest.mark.parametrize(
    ("way", "codec", "n"), every_pair(WAYS, CODECS, WORLD_SIZES), ids=str
)


@dataclass
class Run:
    """Inputs and results of one all-reduce of random values; by rank, then by tensor."""

    data: list[list[torch.Tensor]]
    before: list[list[torch.Tensor]]
    results: list[list[torch.Tensor]]
    residuals: list[list[torch.Tensor]]
    formula: list[int]
    counted: list[int]


def reduce_all(
    comm: Communicator,
    tensors: list[torch.Tensor],
    codec: Codec,
    options: Options,
    residuals: list[torch.Tensor] | None = None,
    average: bool = True,
) -> tuple[int, int]:
    """One fused all-reduce of all tensors: its bytes by the formula, and as sent."""
    specs = [
        Spec(f"p{i}", t.numel(), t.dtype, codec, residuals is not None, rotation=i)
        for i, t in enumerate(tensors)
    ]
    items = [
        Item(t, rng.parameter_keys(0, f"p{i}", comm.rank), 3, residuals[i] if residuals else None)
        for i, t in enumerate(tensors)
    ]
    collective = prepare(comm.calls, specs, options, AVERAGE if average else SUM)
    return collective.prepared.wire_bytes, collective.start(items).result().wire_bytes


@cache
def run(way: str, codec: Codec, n: int, dtype: torch.dtype, average: bool = True) -> Run:
    """With error feedback, and residuals from the steps before."""
    return run_with(WAYS[way](n), codec, n, dtype, average)


def run_with(options: Options, codec: Codec, n: int, dtype: torch.dtype, average: bool) -> Run:
    """The same with any options."""
    made = torch.Generator().manual_seed(n)
    data = [[torch.randn(m, generator=made).to(dtype) for m in SIZES] for _ in range(n)]
    before = [[torch.randn(m, generator=made) * 0.1 for m in SIZES] for _ in range(n)]
    results = [[t.clone() for t in rank] for rank in data]
    residuals = [[t.clone() for t in rank] for rank in before]

    def body(comm: Communicator) -> tuple[int, int]:
        r = comm.rank
        return reduce_all(comm, results[r], codec, options, residuals[r], average)

    sent = as_threads(n, body)
    formula, counted = ([both[i] for both in sent] for i in (0, 1))
    return Run(data, before, results, residuals, formula, counted)


@every_case
def test_law_1_replicas_agree(way: str, codec: Codec, n: int) -> None:
    for dtype in (torch.float32, torch.bfloat16) if n == 5 else (torch.float32,):
        found = run(way, codec, n, dtype).results
        for rank in found[1:]:
            for expected, mine in zip(found[0], rank, strict=True):
                assert torch.equal(expected, mine)


@every_case
def test_law_2_nothing_is_lost(way: str, codec: Codec, n: int) -> None:
    for dtype in (torch.float32, torch.bfloat16) if n == 5 else (torch.float32,):
        for average in (True, False) if n == 3 else (True,):
            check_nothing_is_lost(run(way, codec, n, dtype, average), n, dtype, average)


def check_nothing_is_lost(found: Run, n: int, dtype: torch.dtype, average: bool) -> None:
    if n == 1:
        assert all(
            torch.equal(a, b) for a, b in zip(found.before[0], found.residuals[0], strict=True)
        )
        return  # nothing is sent, so nothing can be lost; the residual is unchanged
    for i in range(len(SIZES)):
        brought = sum(found.data[r][i].double() + found.before[r][i].double() for r in range(n))
        kept = sum(found.residuals[r][i].double() for r in range(n))
        sent = found.results[0][i].double() * (n if average else 1)
        # Results, and sums inside a machine, are rounded to the gradient's dtype.
        slack = torch.finfo(dtype).eps * 4 * n if dtype != torch.float32 else 1e-5
        torch.testing.assert_close(sent + kept, brought, rtol=slack, atol=slack)


@pytest.mark.parametrize(
    ("way", "codec", "value"), every_pair(WAYS, CODECS, [float("inf"), float("nan")]), ids=str
)
def test_law_4_non_finite_travels(way: str, codec: Codec, value: float) -> None:
    n, size, at = 5, 2000, 700
    data = [torch.randn(size) for _ in range(n)]
    data[3][at] = value

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        mine, residual = data[comm.rank].clone(), torch.full((size,), 0.5)
        reduce_all(comm, [mine], codec, WAYS[way](n), [residual])
        return mine, residual

    for found, residual in as_threads(n, body):
        assert not torch.isfinite(found[at])
        assert torch.isfinite(residual).all()


@every_case
def test_law_5_bytes_are_accounted(way: str, codec: Codec, n: int) -> None:
    found = run(way, codec, n, torch.float32)
    assert found.formula == found.counted
    assert n == 1 or sum(found.counted) > 0


@some_ways
def test_law_6_targets_agree(way: str, codec: Codec) -> None:
    data = [[torch.randn(m) for m in SIZES] for _ in range(3)]

    def variant(target: str) -> list[torch.Tensor]:
        def body(comm: Communicator) -> list[torch.Tensor]:
            mine = [t.clone() for t in data[comm.rank]]
            chosen = "eager" if comm.rank == 0 else target  # targets may differ within a group
            options = WAYS[way](3)
            reduce_all(comm, mine, codec, Options(**{**vars(options), "target": chosen}))
            return mine

        result: list[torch.Tensor] = as_threads(3, body)[1]
        return result

    for eager, compiled in zip(variant("eager"), variant("auto"), strict=True):
        assert torch.equal(eager, compiled)


@some_ways
def test_law_8_company_changes_nothing(way: str, codec: Codec) -> None:
    """All tensors in one collective, pipelined; or one by one: the same bits."""
    data = [[torch.randn(m) for m in SIZES] for _ in range(3)]

    def variant(together: bool) -> list[torch.Tensor]:
        def body(comm: Communicator) -> list[torch.Tensor]:
            mine = [t.clone() for t in data[comm.rank]]
            order = list(range(len(mine)))
            options = Options(**{**vars(WAYS[way](3)), "segments": 4 if together else 1})
            for group in [order[::-1]] if together else [[i] for i in order]:
                specs = [Spec(f"p{i}", SIZES[i], torch.float32, codec, rotation=i) for i in group]
                items = [Item(mine[i], rng.parameter_keys(0, f"p{i}", comm.rank), 5) for i in group]
                prepare(comm.calls, specs, options).start(items).result()
            return mine

        result: list[torch.Tensor] = as_threads(3, body)[0]
        return result

    for alone, fused in zip(variant(False), variant(True), strict=True):
        assert torch.equal(alone, fused)


PATTERN = 10  # values that repeat: every block of RandomK(0.1) is a draw of the same values


@pytest.mark.parametrize(
    ("way", "n", "average"), every_pair(WAYS, [2, 3, 5], [True, False]), ids=str
)
def test_law_3_a_codec_that_scales_is_unbiased_or_refused(way: str, n: int, average: bool) -> None:
    """RandomK(unbiased=True): over 10^5 draws, at five steps, the mean is within 5 standard errors
    of the true one, place by place; where an algorithm would be biased, an error says where not."""
    made = torch.Generator().manual_seed(n)
    patterns = [torch.randn(PATTERN, generator=made) for _ in range(n)]
    sizes = [100_000, 100_000 + 3]  # the second has a short last block
    codec = RandomK(density=1 / PATTERN, values="fp32", unbiased=True)

    def body(comm: Communicator) -> list[torch.Tensor] | BaseException | None:
        own = patterns[comm.rank].repeat(sizes[1] // PATTERN + 1)
        found: list[torch.Tensor] = []

        def steps() -> None:
            specs = [
                Spec(f"p{i}", m, torch.float32, codec, rotation=i) for i, m in enumerate(sizes)
            ]
            collective = prepare(comm.calls, specs, WAYS[way](n), AVERAGE if average else SUM)
            for step in range(5):
                items = [
                    Item(own[:m].clone(), rng.parameter_keys(0, f"p{i}", comm.rank), step)
                    for i, m in enumerate(sizes)
                ]
                collective.start(items).result()
                found.extend(item.values[: sizes[0]].view(-1, PATTERN) for item in items)

        return caught(steps) or found

    results = as_threads(n, body)
    if way != "all_gather":
        for error in results:
            assert isinstance(error, ConfigError)
            assert "Use algorithm 'all_gather'" in str(error)
        return
    draws = torch.cat(results[0]).double()
    assert len(draws) == 100_000
    expected = torch.stack(patterns).double().sum(0) / (n if average else 1)
    standard = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - expected).abs() < 5 * standard).all()
    assert (standard < 0.05 * expected.abs().max()).all()


@every_way
@pytest.mark.parametrize("n", [1, 3])
def test_error_feedback_of_a_codec_that_scales_is_refused(way: str, n: int) -> None:
    def body(comm: Communicator) -> list[BaseException | None]:
        def with_feedback(codec: Codec) -> BaseException | None:
            tensors, residuals = [torch.ones(50)], [torch.zeros(50)]
            return caught(lambda: reduce_all(comm, tensors, codec, WAYS[way](n), residuals))

        scaled, kept, whole = (
            with_feedback(RandomK(density, "fp32", unbiased))
            for density, unbiased in ((0.1, True), (0.1, False), (1.0, True))
        )
        assert kept is whole is None
        return [scaled]

    for (error,) in as_threads(n, body):
        assert isinstance(error, ConfigError)
        wanted = "unbiased=False with error feedback"
        assert (wanted if way == "all_gather" else "Use algorithm 'all_gather'") in str(error)


@every_way
def test_law_10_a_dead_peer_is_named_by_every_survivor(way: str) -> None:
    hub, agreed = Hub(4, timeout=20), threading.Barrier(4)

    def body(comm: Communicator) -> BaseException | None:
        reduce_all(comm, [torch.randn(5000)], QSGD(), WAYS[way](4))
        agreed.wait()  # all ranks have agreed, and this rank has everything
        if comm.rank == 2:
            hub.kill(2)
            return None
        return caught(lambda: reduce_all(comm, [torch.randn(5000)], QSGD(), WAYS[way](4)))

    errors = as_threads(4, body, hub)
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], TransportError)
        assert errors[rank].peer == 2


def errors_of(
    data: list[torch.Tensor],
    codec: Codec,
    ways: Sequence[str] = ("all_gather", "sra", "tree", "ring"),
) -> dict[str, float]:
    """NMSE of the average through each of these algorithms."""
    mean = torch.stack(data).double().mean(0)
    found = {}
    for way in ways:

        def body(comm: Communicator, way: str = way) -> torch.Tensor:
            mine = data[comm.rank].clone()
            reduce_all(comm, [mine], codec, WAYS[way](len(data)))
            return mine

        error = as_threads(len(data), body)[0].double() - mean
        found[way] = float(error.square().sum() / mean.square().sum())
    return found


@pytest.mark.parametrize("common", [0.0, 1.0], ids=["independent", "alike"])
def test_error_grows_with_the_ranks_in_an_encoded_sum(common: float) -> None:
    """QSGD 4/128 at 8 ranks, Gaussian values: all_gather <= SRA <= tree <= ring.

    An encoding errs by a share of the variance of what it encodes. With independent values, a sum
    of k ranks has variance k, so in units of one rank's error the average's are: all_gather 8 x 1;
    SRA 7 x 1 + 8; tree 4 x 1 + 2 x 2 + 4 + 8; ring 1 + 2 + ... + 8.
    """
    made = torch.Generator().manual_seed(0)
    shared = torch.randn(200_000, generator=made) * common
    data = [shared + torch.randn(200_000, generator=made) for _ in range(8)]
    found = errors_of(data, QSGD(bits=4, block=128))
    assert found["all_gather"] < found["sra"] < found["tree"] < found["ring"]
    if not common:
        for way, units in {"all_gather": 8, "tree": 20, "ring": 36}.items():
            assert found[way] / found["sra"] == pytest.approx(units / 15, rel=0.06)


@pytest.mark.parametrize("bits", [3, 4, 5])
@pytest.mark.parametrize("n", [4, 8])
def test_dithered_rounding_halves_the_squared_error(n: int, bits: int) -> None:
    """Gaussian values: 1/12 of a squared step per encoding, against 1/6."""
    made = torch.Generator().manual_seed(0)
    data = [torch.randn(100_000, generator=made) for _ in range(n)]
    ways = ["all_gather", "sra", "machines_of_2", "3_machines_in_turn", "ring"]
    stochastic, dithered = (
        errors_of(data, QSGD(bits, rounding=rounding), ways)
        for rounding in ("stochastic", "dithered")
    )
    for way in ways:
        assert 0.45 < dithered[way] / stochastic[way] < 0.55, way


@pytest.mark.parametrize("options", [Options(coordinated=True), Options(batched=False)], ids=str)
@pytest.mark.parametrize("n", [2, 5])
def test_what_is_switched_off_for_an_ablation_changes_no_bit(options: Options, n: int) -> None:
    made = torch.Generator().manual_seed(3)
    data = [[torch.randn(m, generator=made) for m in SIZES] for _ in range(n)]

    def body(comm: Communicator, options: Options) -> list[torch.Tensor]:
        tensors = [t.clone() for t in data[comm.rank]]
        reduce_all(comm, tensors, QSGD(), options)
        return tensors

    plain = as_threads(n, lambda comm: body(comm, Options()))[0]
    other = as_threads(n, lambda comm: body(comm, options))[0]
    assert all(map(torch.equal, plain, other))


@pytest.mark.parametrize(("way", "codec", "n"), every_pair(WAYS, FEW, [2, 5]), ids=str)
def test_staged_messages_change_no_bit(
    way: str, codec: Codec, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With separate memory for the kernels, as on a GPU: a missing copy gives wrong results."""
    made = torch.Generator().manual_seed(4)
    data = [[torch.randn(m, generator=made) for m in SIZES] for _ in range(n)]

    def body(comm: Communicator) -> list[torch.Tensor]:
        tensors = [t.clone() for t in data[comm.rank]]
        for _ in range(2):  # the second time in memory that the first has left
            reduce_all(comm, tensors, codec, WAYS[way](n))
        return tensors

    plain = as_threads(n, body)
    monkeypatch.setattr("gradwire.collectives.job.is_staged", lambda device: True)
    for staged, expected in zip(as_threads(n, body), plain, strict=True):
        assert all(map(torch.equal, staged, expected))


def test_memory_of_another_device_is_refused() -> None:
    def body(comm: Communicator) -> BaseException | None:
        collective = prepare(comm.calls, [Spec("w", 10, torch.float32, QSGD())])
        item = Item(torch.zeros(10, device="meta"), rng.parameter_keys(0, "w", 0), 0)
        return caught(lambda: collective.start([item]))

    (error,) = as_threads(1, body)
    assert "w: `values` holds 10 x torch.float32 on meta" in str(error)


class Machine:
    """Ranks that share memory, with the interface of a hub."""

    def __init__(self, made: list[Shm]) -> None:
        self.made = made
        self.board = dist.HashStore()

    def transport(self, rank: int) -> Any:
        end: Any = self.made[rank]
        end.board, end.tick = self.board, lambda: None  # of the group's own transport elsewhere
        return end


@pytest.mark.parametrize(("way", "codec", "n"), one_in(5, product(WAYS, FEW, WORLD_SIZES)), ids=str)
def test_borrowed_messages_change_no_bit(
    way: str, codec: Codec, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are read in place, over a hub that overwrites what is given back, and in shared
    memory; messages of any size."""
    made = torch.Generator().manual_seed(4)
    data = [[torch.randn(m, generator=made) for m in SIZES] for _ in range(n)]

    def body(comm: Communicator) -> tuple[list[torch.Tensor], bool]:
        tensors = [t.clone() for t in data[comm.rank]]
        residuals = [torch.zeros(m) for m in SIZES]
        for _ in range(2):  # the second time in memory that the first has left
            sent, counted = reduce_all(comm, tensors, codec, WAYS[way](n), residuals)
            assert sent == counted
        return tensors + residuals, any(c.prepared.borrowed for c in comm.calls.kept.values())

    plain = as_threads(n, body)
    assert not any(borrows for _, borrows in plain)
    monkeypatch.setattr("gradwire.collectives.placement.BORROWED_BYTES", 0)
    over_hub = as_threads(n, body, Hub(n, lends=True))
    with ends(n) as machine:
        in_memory = as_threads(n, body, Machine(machine))  # type: ignore[arg-type]
    for borrowing in (over_hub, in_memory):
        for (found, _), (expected, _) in zip(borrowing, plain, strict=True):
            assert all(map(torch.equal, found, expected))
        # Where tasks wait for sends, these must end early, so nothing is borrowed.
        assert any(borrows for _, borrows in borrowing) == (n > 1 and "coordinated" not in way)
