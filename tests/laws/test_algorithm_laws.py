"""Laws and errors of algorithms that take many draws: what is unbiased, and how large errors are.

test_collective_laws.py has the laws that every single run meets.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gradwire import QSGD, Codec, ConfigError, Options, all_reduce
from gradwire.codecs import RandomK
from gradwire.engine import Communicator
from laws.ways import WAYS
from products import EXHAUSTIVE
from ranks import as_threads, caught

PATTERN = 10  # values that repeat: every block of RandomK(0.1) is a draw of the same values


def test_law_3_a_codec_that_scales_is_unbiased_through_all_gather() -> None:
    """RandomK(unbiased=True): over 10^5 draws, at five steps, the mean is within 5 standard errors
    of the true one, place by place."""
    n, made = 3, torch.Generator().manual_seed(3)
    patterns = [torch.randn(PATTERN, generator=made) for _ in range(n)]
    codec = RandomK(density=1 / PATTERN, values="fp32", unbiased=True)

    def body(comm: Communicator) -> torch.Tensor:
        found = []
        for step in range(5):
            # A short last block, too.
            values = patterns[comm.rank].repeat(20_001)[:-7]
            options = Options(algorithm="all_gather")
            all_reduce(values, codec, op="avg", group=comm, step=step, options=options)
            found.append(values[:200_000].view(-1, PATTERN))
        return torch.cat(found)

    draws = as_threads(n, body)[0].double()
    assert len(draws) == 100_000
    expected = torch.stack(patterns).double().mean(0)
    standard = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - expected).abs() < 5 * standard).all()
    assert (standard < 0.05 * expected.abs().max()).all()


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


@EXHAUSTIVE
def test_law_3_unbiased_through_a_collective() -> None:
    """The mean of 2 000 averages through 2 bits is the average, within 5 standard errors."""
    made, draws = torch.Generator().manual_seed(0), 2000
    data = [torch.randn(200, generator=made) for _ in range(2)]
    expected = torch.stack([d.double() for d in data]).mean(0)

    def body(comm: Communicator) -> torch.Tensor:
        found = []
        for step in range(draws):
            mine = data[comm.rank].clone()
            all_reduce(mine, QSGD(bits=2), op="avg", group=comm, step=step)
            found.append(mine.double())
        return torch.stack(found)

    found = as_threads(2, body)[0]
    standard = found.std(0) / draws**0.5 + 1e-9
    assert ((found.mean(0) - expected).abs() < 5 * standard).all()


def errors_of(
    data: list[torch.Tensor],
    codec: Codec,
    ways: Sequence[str] = ("all_gather", "sra", "tree", "ring"),
) -> dict[str, float]:
    """NMSE of the average through each of these algorithms."""
    mean = torch.stack(data).double().mean(0)

    def body(comm: Communicator) -> list[torch.Tensor]:
        found = [data[comm.rank].clone() for _ in ways]
        for mine, way in zip(found, ways, strict=True):
            all_reduce(mine, codec, op="avg", group=comm, options=WAYS[way](len(data)), step=0)
        return found

    errors = [found.double() - mean for found in as_threads(len(data), body)[0]]
    squares = [float(e.square().sum() / mean.square().sum()) for e in errors]
    return dict(zip(ways, squares, strict=True))


def test_error_grows_with_the_ranks_in_an_encoded_sum() -> None:
    """QSGD 4/128 at 8 ranks, Gaussian values: all_gather <= SRA <= tree <= ring.

    An encoding errs by a share of the variance of what it encodes. With independent values, a sum
    of k ranks has variance k, so in units of one rank's error the average's are: all_gather 8 x 1;
    SRA 7 x 1 + 8; tree 4 x 1 + 2 x 2 + 4 + 8; ring 1 + 2 + ... + 8.
    """
    for common in (0.0, 1.0):
        made = torch.Generator().manual_seed(0)
        shared = torch.randn(100_000, generator=made) * common
        data = [shared + torch.randn(100_000, generator=made) for _ in range(8)]
        found = errors_of(data, QSGD(bits=4, block=128))
        assert found["all_gather"] < found["sra"] < found["tree"] < found["ring"], common
        if not common:
            for way, units in {"all_gather": 8, "tree": 20, "ring": 36}.items():
                assert found[way] / found["sra"] == pytest.approx(units / 15, rel=0.06)


def test_dithered_rounding_halves_the_squared_error() -> None:
    """Gaussian values: 1/12 of a squared step per encoding, against 1/6."""
    ways = ["all_gather", "sra", "pairs", "in_turn", "ring"]
    for n, bits in ((4, 3), (8, 4), (4, 5)):
        made = torch.Generator().manual_seed(0)
        data = [torch.randn(50_000, generator=made) for _ in range(n)]
        stochastic, dithered = (
            errors_of(data, QSGD(bits, rounding=rounding), ways)
            for rounding in ("stochastic", "dithered")
        )
        for way in ways:
            assert 0.45 < dithered[way] / stochastic[way] < 0.55, (n, bits, way)


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
