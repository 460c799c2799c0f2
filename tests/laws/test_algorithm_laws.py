"""Laws and errors of algorithms that take many draws: what is unbiased, and how large errors are.

test_collective_laws.py and test_shard_laws.py have the laws that every single run meets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import gradwire as gw
from gradwire import QSGD, Codec, ConfigError, Options, all_reduce
from gradwire.codecs import TBQ, RandomK
from gradwire.collectives import ReduceScatter
from gradwire.engine import Communicator
from laws import shards
from laws.ways import WAYS, hierarchical
from products import EXHAUSTIVE
from ranks import as_threads, caught

Lengths = tuple[int, ...]


def average(
    comm: Communicator,
    given: torch.Tensor,
    codec: Codec,
    options: Options,
    lengths: Lengths | None = None,
    step: int = 0,
) -> torch.Tensor:
    """The average of all ranks, or with `lengths` this rank's shard of it."""
    mine = given.clone()
    if lengths is not None:
        request = ReduceScatter(mine, "avg", lengths, codec=codec)
        return shards.run(comm, request, options).clone()
    all_reduce(mine, codec, op="avg", group=comm, options=options, step=step)
    return mine


# ---- law 3: unbiased means unbiased


def check_unbiased(
    given: list[torch.Tensor],
    codec: Codec,
    options: Options,
    lengths: Lengths | None = None,
    repeats: int = 1,
    steps: int = 1,
    more: int = 0,
) -> torch.Tensor:
    """The mean of all draws is within 5 standard errors of the true average, place by place.

    Values are repeated, and followed by `more` that do not count; returns the standard errors.
    """
    pattern = len(given[0])

    def body(comm: Communicator) -> torch.Tensor:
        values = torch.cat([given[comm.rank].repeat(repeats), given[comm.rank][:more]])
        found = [average(comm, values, codec, options, lengths, step) for step in range(steps)]
        return torch.cat([one[: len(one) - more] for one in found])

    found = as_threads(len(given), body)
    draws = (found[0] if lengths is None else torch.cat(found)).double().view(-1, pattern)
    assert len(draws) == repeats * steps
    standard = draws.std(0) / len(draws) ** 0.5
    expected = torch.stack(given).double().mean(0)
    assert (standard > 0).all()
    assert ((draws.mean(0) - expected).abs() < 5 * standard).all()
    return standard


def drawn(n: int, numel: int = 10, seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=made) for _ in range(n)]


SHAPES = {
    "2 of 2": hierarchical((0, 0, 1, 1)),
    "3 of 1 and 1 of 2": hierarchical((0, 1, 2, 3, 3), inside="full"),
    "5 in a grid": hierarchical((0, 1, 2, 3, 4, 4), between="grid"),
    "shards of pairs": shards.way("pairs", 5),
    "shards of one and the rest": shards.way("one_and_the_rest", 5, "full"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_law_3_qsgd_on_several_machines(shape: str) -> None:
    options, codec, lengths = SHAPES[shape], QSGD(bits=2, block=80), None
    if shape.startswith("shards"):
        codec, lengths = replace(codec, rounding="stochastic"), (200_000, 0, 0, 0, 0)
    assert options.nodes is not None
    check_unbiased(drawn(len(options.nodes)), codec, options, lengths, repeats=20_000)


def test_law_3_a_codec_that_scales_is_unbiased_through_all_gather() -> None:
    """RandomK(unbiased=True): every block of 10 values is a draw of the same values."""
    given = drawn(3, seed=3)
    codec, options = RandomK(density=0.1, values="fp32", unbiased=True), WAYS["all_gather"](3)
    standard = check_unbiased(given, codec, options, repeats=20_000, steps=5, more=3)
    assert (standard < 0.05 * torch.stack(given).double().mean(0).abs().max()).all()


@EXHAUSTIVE
def test_law_3_unbiased_through_a_collective() -> None:
    check_unbiased(drawn(2, 200), QSGD(bits=2), Options(), steps=2000)


def test_law_3_where_a_codec_that_scales_would_be_biased_it_is_refused() -> None:
    """Everywhere but through all_gather; and with error feedback there too."""
    scaled = RandomK(0.1, "fp32", True)

    def body(comm: Communicator) -> list[str]:
        faults = []

        def error(codec: Codec, way: str, residual: bool) -> BaseException | None:
            values, kept = torch.ones(50), torch.zeros(50) if residual else None
            options = WAYS[way](comm.world_size)
            return caught(
                lambda: all_reduce(values, codec, group=comm, residual=kept, options=options)
            )

        for way in WAYS:
            gathers = way == "all_gather"
            wanted = {
                "plain": (error(scaled, way, False), "" if gathers else "algorithm 'all_gather'"),
                "fed": (
                    error(scaled, way, True),
                    "unbiased=False with error feedback" if gathers else "algorithm 'all_gather'",
                ),
                "biased": (error(RandomK(0.1, "fp32"), way, True), ""),
                "whole": (error(RandomK(1.0, "fp32", True), way, True), ""),
            }
            for what, (found, text) in wanted.items():
                refused = isinstance(found, ConfigError) and text in str(found)
                if refused if not text else not refused:
                    faults.append(f"{way}, {what}: {found!r}")
        return faults

    for n in (1, 3):
        assert as_threads(n, body) == [[]] * n


def test_codecs_that_allow_no_sum_of_shards_say_what_to_use() -> None:
    def body(comm: Communicator) -> None:
        whole = torch.randn(200)
        for codec in (TBQ(), RandomK(density=0.1, unbiased=True)):

            def call(algorithm: str, codec: Codec = codec) -> None:
                gw.reduce_scatter(torch.empty(100), whole, codec, group=comm, algorithm=algorithm)

            gw.all_gather(torch.empty(400), whole, codec, group=comm, algorithm="hierarchical")
            call("sra")
            refused = caught(lambda call=call: call("hierarchical"))
            assert isinstance(refused, ConfigError)
            assert "not defined in the algorithm 'hierarchical'" in str(refused)
            assert "Use algorithm 'sra'" in str(refused)

    as_threads(2, body)


# ---- errors


def errors_of(
    data: list[torch.Tensor],
    codec: Codec,
    ways: Mapping[object, Options],
    lengths: Lengths | None = None,
) -> dict[object, float]:
    """NMSE of the average through each of these algorithms."""
    mean = torch.stack(data).double().mean(0)

    def body(comm: Communicator) -> list[torch.Tensor]:
        given = data[comm.rank]
        return [average(comm, given, codec, options, lengths) for options in ways.values()]

    found = as_threads(len(data), body)
    averages = found[0] if lengths is None else map(torch.cat, zip(*found, strict=True))
    errors = [one.double() - mean for one in averages]
    squares = [float(e.square().sum() / mean.square().sum()) for e in errors]
    return dict(zip(ways, squares, strict=True))


def test_error_is_that_of_the_encodings() -> None:
    """docs/reference/algorithms.md: 4 machines of 2, QSGD, in encodings of one rank's values."""
    nodes = (0, 0, 1, 1, 2, 2, 3, 3)
    whole = {
        15: Options(),
        # 3 encodings of two ranks' sums, one of the sum of all
        14: hierarchical(nodes, inside="full", between="sra"),
        # in addition the locals of 4 ranks
        18: hierarchical(nodes, inside="codec", between="sra"),
        # 2 of two ranks' sums, 1 of four, 1 of eight, and 4 locals
        20: hierarchical(nodes, inside="codec", between="grid"),
    }
    of_shards = {
        7: Options(),
        6: shards.way("pairs", 8, "full"),  # 3 encodings of two ranks' sums
        10: shards.way("pairs", 8, "codec"),  # in addition the locals of 4 ranks
    }
    for ways, numel, lengths in ((whole, 100_000, None), (of_shards, 160_000, (20_000,) * 8)):
        found = errors_of(drawn(8, numel), QSGD(bits=4, block=128), ways, lengths)
        first = next(iter(ways))
        for units, error in found.items():
            assert error / found[first] == pytest.approx(units / first, rel=0.06)


def test_error_grows_with_the_ranks_in_an_encoded_sum() -> None:
    """QSGD 4/128 at 8 ranks, Gaussian values: all_gather <= SRA <= tree <= ring.

    An encoding errs by a share of the variance of what it encodes. With independent values, a sum
    of k ranks has variance k, so in units of one rank's error the average's are: all_gather 8 x 1;
    SRA 7 x 1 + 8; tree 4 x 1 + 2 x 2 + 4 + 8; ring 1 + 2 + ... + 8.
    """
    ways = {way: WAYS[way](8) for way in ("all_gather", "sra", "tree", "ring")}
    for common in (0.0, 1.0):
        shared, *own = drawn(9, 100_000)
        data = [shared * common + values for values in own]
        found = errors_of(data, QSGD(bits=4, block=128), ways)
        assert found["all_gather"] < found["sra"] < found["tree"] < found["ring"], common
        if not common:
            for way, units in {"all_gather": 8, "tree": 20, "ring": 36}.items():
                assert found[way] / found["sra"] == pytest.approx(units / 15, rel=0.06)


def test_dithered_rounding_halves_the_squared_error() -> None:
    """Gaussian values: 1/12 of a squared step per encoding, against 1/6."""
    for n, bits in ((4, 3), (8, 4), (4, 5)):
        ways = {way: WAYS[way](n) for way in ("all_gather", "sra", "pairs", "in_turn", "ring")}
        stochastic, dithered = (
            errors_of(drawn(n, 50_000), QSGD(bits, rounding=rounding), ways)
            for rounding in ("stochastic", "dithered")
        )
        for way in ways:
            assert 0.45 < dithered[way] / stochastic[way] < 0.55, (n, bits, way)


@pytest.mark.parametrize("n", [2, 5])
def test_error_is_bounded_by_the_grid_of_both_encodings(n: int) -> None:
    data = drawn(n, 5000)
    expected = torch.stack(data).double().mean(0)
    for bits in (2, 4, 8):
        codec = QSGD(bits=bits)
        found = as_threads(n, lambda comm: average(comm, data[comm.rank], codec, Options()))  # noqa: B023
        # A step of the grid is range / (2^bits - 1), with outward rounding of bf16 metadata.
        widest = 2 * max(float(d.abs().max()) for d in data)
        error = float((found[0] - expected).abs().max())
        assert error <= 2 * 1.05 * widest / (2**bits - 1) + 1e-6, bits


def test_what_is_switched_off_for_an_ablation_changes_no_bit() -> None:
    def body(comm: Communicator) -> None:
        made = torch.Generator().manual_seed(comm.rank)
        given = [torch.randn(m, generator=made) for m in (1, 17, 128, 1025, 5000)]
        for values in given:
            found = [values.clone() for _ in range(3)]
            ways = (Options(), Options(coordinated=True), Options(batched=False))
            for tensor, options in zip(found, ways, strict=True):
                all_reduce(tensor, QSGD(), group=comm, step=1, options=options)
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2])

    for n in (2, 5):
        as_threads(n, body)
