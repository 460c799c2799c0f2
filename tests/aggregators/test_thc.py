"""THC: against the paper's steps (UTIL 3.2) in float64, its bytes, its bias, and what saturates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from averaging import Parameters, Shape, averaged, drawn, sent_bytes
from gradwire.aggregators import THC, Aggregator, ErrorFeedback
from gradwire.aggregators.local import run_local
from gradwire.aggregators.local_codecs import Ends, Restored, Rounded, Turned
from gradwire.aggregators.thc import Numbers, rotate_across
from gradwire.engine import HEADER_BYTES, Communicator
from gradwire.lang import layout, rng
from gradwire.lang.trace import stream
from products import exhaustive
from ranks import as_threads

SHAPES: list[Shape] = [(20, 30), (1,), (7,), (3, 4, 5), (1000,), (20, 30), (0,), (), (64, 8)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def hadamard(n: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix of order n, by Sylvester's construction, in float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(n)


def powers(n: int) -> list[int]:
    """n as a sum of powers of two, the largest first."""
    return [1 << b for b in reversed(range(n.bit_length())) if n >> b & 1]


def rotation(numel: int, how: str, chunk: int, signs: torch.Tensor) -> torch.Tensor:
    """The matrix of the rotation, in float64."""
    whole = numel // chunk
    lengths = [chunk] * whole
    if how == "full":
        lengths = [group * chunk for group in powers(whole)]
    if how == "none":
        return torch.eye(numel, dtype=torch.float64)
    blocks = [hadamard(n) for n in lengths + powers(numel % chunk)]
    return torch.block_diag(*blocks) * signs.double()


def signs_of(c: int, numel: int, step: int) -> torch.Tensor:
    """The signs of a rotation of parameter c, which all ranks draw: its rotation of ones, in chunks
    of one value."""
    found = torch.empty(numel)
    key = step_key(rng.parameter_keys(0, f"p{c}", 0).shared, step)
    run_local(Turned(1), "encode", [torch.ones(numel)], [found], key)
    return found


def step_key(key: int, step: int) -> np.ndarray:
    return rng.step_keys(np.array([key], np.uint64), step, 1 << 32)


def reference(
    c: int, step: int, aggregator: THC, fed: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], float]:
    """(the average of parameter c by the paper's steps in float64, what each rank sent if nothing
    saturates, the share of sums at an end); fed: of each rank."""
    numel, chunk, most = len(fed[0]), aggregator.chunk, aggregator.most
    turn = rotation(numel, aggregator.rotation, chunk, signs_of(c, numel, step))
    rotated = [turn @ f.double() for f in fed]
    ranges = torch.cat([
        torch.stack([part.abs().max() for part in r.split(chunk)]).view(-1, 1) for r in rotated
    ], 1).amax(1)  # fmt: skip
    up = ranges.float().bfloat16()
    up = torch.where(up.double() < ranges, up.view(torch.int16) + 1, up.view(torch.int16))
    size = up.view(torch.bfloat16).double().repeat_interleave(chunk)[:numel]
    numbers = []
    for rank, r in enumerate(rotated):
        key = step_key(rng.parameter_keys(0, f"p{c}", rank).own, step)
        offset = rng.uniform(int(key[0]), stream("rounding").number, torch.arange(numel))
        numbers.append((r * most / size + offset.double()).floor().clamp(-most, most))
    end = 2 ** (aggregator.bits - 1) - 1
    total = sum(numbers).clamp(-end, end)  # type: ignore[union-attr]
    sent = [turn.T @ (n * size / most) for n in numbers]
    average = turn.T @ (total * size / most) / len(fed)
    ends = float((total.abs() == end).double().mean())
    return average, sent, ends


@pytest.mark.parametrize(
    ("ranks", "options", "how", "dtype"),
    [
        (2, (4, 4, 16), "partial", torch.float32),
        (3, (8, 4, 64), "full", torch.float16),
        (5, (6, 3, 32), "none", torch.bfloat16),
        *exhaustive(
            (8, (4, 4, 16), "full", torch.float32),
            (3, (6, 3, 32), "partial", torch.float16),
            (2, (8, 4, 64), "none", torch.float32),
            (5, (4, 4, 16), "full", torch.bfloat16),
        ),
    ],
)
def test_it_is_the_papers(
    ranks: int, options: tuple[int, int, int], how: str, dtype: torch.dtype
) -> None:
    bits, code, chunk = options
    aggregator = THC(bits, code, how, chunk)
    data = [[drawn(SHAPES, r, step, dtype) for r in range(ranks)] for step in range(2)]

    def body(comm: Communicator) -> list[Any]:
        mine = Parameters(comm, SHAPES, aggregator)
        shares = []
        averages = []
        for given in data:
            averages.append(mine.average(given[comm.rank]))
            shares.append([m.metrics.get("saturated_share") for m in mine.members])
        return [averages, shares]

    found = as_threads(ranks, body)
    eps = max(2 * torch.finfo(dtype).eps, 1e-5)
    saturates = aggregator.saturates(ranks)
    for step, given in enumerate(data):
        for c in range(len(SHAPES)):
            average = found[0][0][step][c].view(-1)
            assert all(torch.equal(mine[0][step][c].view(-1), average) for mine in found)
            if average.numel():
                fed = [mine[c].view(-1) for mine in given]
                expected, _, ends = reference(c, step, aggregator, fed)
                torch.testing.assert_close(average.double(), expected, rtol=eps, atol=eps)
                share = found[0][1][step][c]
                assert share.shape == (1,)
                assert share.item() == pytest.approx(ends if saturates else 0.0, abs=1e-6)


@pytest.mark.parametrize(("ranks", "how"), [(2, "partial"), *exhaustive((5, "full"))])
def test_error_feedback_keeps_what_was_not_sent(ranks: int, how: str) -> None:
    """Without saturation each rank's residual is its own rounding error; in the next step it is
    part of what is rounded. (The laws test what is kept of sums that saturate.)"""
    aggregator = THC(8, 4, how, 32)
    data = [[drawn(SHAPES, r, step) for r in range(ranks)] for step in range(2)]
    found = averaged(SHAPES, ErrorFeedback(aggregator), data)
    for c, shape in enumerate(SHAPES):
        kept = [torch.zeros(math.prod(shape)).double()] * ranks
        for step, given in enumerate(data):
            if math.prod(shape):
                fed = [mine[c].view(-1) + e for mine, e in zip(given, kept, strict=True)]
                expected, sent, _ = reference(c, step, aggregator, fed)
                kept = [f - s for f, s in zip(fed, sent, strict=True)]
                average = found[0][step][0][c].view(-1).double()
                torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-5)
                for mine, error in zip(found, kept, strict=True):
                    torch.testing.assert_close(
                        mine[step][1][c].double(), error, rtol=0, atol=1e-5
                    )  # fmt: skip


def test_a_full_rotation_is_that_of_each_power_of_two() -> None:
    for chunks, chunk in product([1, 2, 5, 13], [2, 16, 64]):
        numel = chunks * chunk + 7
        values, key = (
            torch.randn(numel, generator=torch.Generator().manual_seed(chunk)),
            step_key(5, 0),
        )
        turned, ones, signs, back = (torch.empty(numel) for _ in range(4))
        run_local(Turned(1), "encode", [ones.fill_(1)], [signs], key)
        run_local(Turned(chunk), "encode", [values], [turned], key)
        rotate_across(turned, chunk)
        expected = rotation(numel, "full", chunk, signs) @ values.double()
        torch.testing.assert_close(turned.double(), expected, rtol=0, atol=1e-5)
        rotate_across(turned, chunk)
        run_local(Turned(chunk), "decode", [back], [turned], key)
        torch.testing.assert_close(back, values, rtol=0, atol=1e-5)


def test_sums_saturate_in_the_order_of_the_algorithm() -> None:
    """7 + 7 - 7: 7 where one rank adds all of it, 0 where 7 + 7 is sent on."""
    expected = {"sra": {7.0}, "ring": {0.0, 7.0}, "tree": {7.0}}

    def body(comm: Communicator) -> dict[str, set[float]]:
        found = {}
        for algorithm in expected:
            mine = Parameters(comm, [(4096,)], THC(rotation="none", chunk=64), algorithm=algorithm)
            given = torch.full((4096,), -7.0 if comm.rank == 2 else 7.0)
            average = mine.average([given])[0]
            assert mine.members[0].metrics["saturated_share"] == (average > 2).float().mean()
            found[algorithm] = set((3 * average).round().tolist())
        return found

    assert as_threads(3, body) == [expected] * 3


@pytest.mark.parametrize("how", ["partial", "none", *exhaustive("full")])
def test_it_is_unbiased_where_nothing_saturates(how: str) -> None:
    """z-tests: over 150 steps of 180 values; and, unrotated, over 10^5 equal values in one."""
    steps, shape = 150, (12, 15)

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = Parameters(comm, [shape], THC(5, 4, how, 16, saturate=False))
        given = drawn([shape], comm.rank, 0)
        mean = sum(drawn([shape], rank, 0)[0].double() for rank in range(2)) / 2
        errors = torch.stack([mine.average(given)[0].double() - mean for _ in range(steps)])
        many = Parameters(comm, [(102400,)], THC(5, 4, how, 128))
        alike = torch.full((102400,), 0.3)
        alike[::128] = -1.0
        same = many.average([alike])[0].view(-1, 128)[:, 1:].double()
        return errors.mean(0), errors.std(0), same

    mean, deviation, alike = as_threads(2, body)[0]
    z = mean / (deviation / math.sqrt(steps)).clamp(min=1e-7)
    assert z.abs().max() < 5
    assert z.square().mean() < 1.4
    if how == "none":
        assert abs(alike.mean() - 0.3) < 5 * alike.std() / math.sqrt(alike.numel())


def heavy(shape: Shape, rank: int, step: int = 0) -> torch.Tensor:
    """Heavy tails, rows of different size, and a part that all ranks share."""
    own, shared = drawn([shape], rank, step)[0], drawn([shape], 100, step)[0]
    rows = drawn([(shape[0], 1)], 200, 0)[0].exp()
    return rows * (own * own.abs() + 0.5 * shared * shared.abs())


def error_of(aggregator: Aggregator, ranks: int = 4) -> float:
    """NMSE of one average of heavy gradients."""
    given = [[heavy((300, 400), rank)] for rank in range(ranks)]
    mean = sum(mine[0].double() for mine in given) / ranks
    average = averaged([(300, 400)], aggregator, [given])[0][0][0][0].double()
    return float((average - mean).square().sum() / mean.square().sum())


def test_saturation_and_partial_rotation_cost_little() -> None:
    """Against the sum in 8 bits, and the full rotation, on synthetic gradients."""
    wide, five, four = (error_of(THC(bits, 4)) for bits in (8, 5, 4))
    full, none = (error_of(THC(8, 4, how)) for how in ("full", "none"))
    assert five < 1.1 * wide
    assert wide < four < 3 * wide
    assert wide < 1.35 * full
    assert none > 3 * wide


@pytest.mark.parametrize(("ranks", "options"), [(3, (5, 4)), *exhaustive((2, (4, 4)), (5, (8, 3)))])
def test_bytes_are_those_of_the_formula(ranks: int, options: tuple[int, int]) -> None:
    """Ranges and numbers, each all-reduced in chunks of whole blocks of 1024."""
    shape, numel = (160, 1024), 163840
    aggregator = THC(*options, chunk=256)
    nbytes = 2 * numel // 256, options[0] * numel // 8
    assert aggregator.payload_bytes(shape, torch.float32) == sum(nbytes)
    lengths = numel // 256, numel
    expected = [
        2 * (ranks - 1) * (n + min(ranks, -(-length // 1024)) * HEADER_BYTES)
        for n, length in zip(nbytes, lengths, strict=True)
    ]
    assert sent_bytes(ranks, [shape], aggregator) == [expected]


def test_a_width_that_suffices_is_accepted() -> None:
    """What test_refused_aggregators.py has refused for its ranks is fine where sums may saturate,
    or for one rank; and so is what its messages name."""
    for bits, code in ((5, 4), (4, 4), (8, 4), (8, 3), (8, 2)):
        THC(bits, code).check_ranks(128)
        THC(bits, code, saturate=False).check_ranks(1)
    for ranks, bits, code in ((3, 6, 4), (4, 6, 4), (19, 8, 3), (127, 8, 2)):
        THC(bits, code, saturate=False).check_ranks(ranks)


def test_the_memory_of_numbers_is_a_payload() -> None:
    for numel in (1, 15, 16, 17, 100):
        made = Numbers(torch.zeros(numel), 16)
        for codec in (Rounded(16, 7, True), Restored(16, 7, True)):
            assert layout(codec).nbytes(numel) == made.memory.numel()
        made.numbers.copy_(torch.arange(numel) % 7)
        made.ranges.fill_(14)
        found, ends = torch.empty(numel), torch.empty(1)
        run_local(Restored(16, 7, False), "decode", [found], [made.memory], None, 0.5)
        torch.testing.assert_close(found, made.numbers)
        run_local(Ends(5), "encode", [made.numbers], [ends])
        assert ends.item() == (made.numbers >= 5).sum()
