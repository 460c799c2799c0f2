"""TopKC: against the paper's steps (UTIL 3.1.2) in float64, its bytes, and its range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, product
from typing import Any

import pytest
import torch

from averaging import Parameters, Shape, averaged, drawn, sent_bytes
from gradwire.aggregators import ErrorFeedback, TopKC
from gradwire.aggregators.chunks import gather_chunks, largest_chunks, scatter_chunks
from gradwire.engine import HEADER_BYTES, Communicator
from products import exhaustive
from ranks import as_threads

SHAPES: list[Shape] = [(20, 30), (1,), (7,), (3, 4, 5), (1000,), (20, 30), (0,), (), (64, 8)]


class Reference:
    """TopKC with fp32 values, all ranks at once, in float64; only squared norms are
    rounded to bf16."""

    def __init__(self, bits: float, chunk: int, ranks: int, scope: str) -> None:
        self.bits, self.chunk, self.scope = bits, chunk, scope
        self.residuals = [[torch.zeros(math.prod(s)).double() for s in SHAPES]] * ranks

    def step(self, gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The averages; gradients[rank][parameter]."""
        fed = [
            [g.double().view(-1) + e for g, e in zip(mine, kept, strict=True)]
            for mine, kept in zip(gradients, self.residuals, strict=True)
        ]
        lengths = [len(f) for f in fed[0]]
        chunks = [
            [(at, range(b, min(b + self.chunk, numel))) for b in range(0, numel, self.chunk)]
            for at, numel in enumerate(lengths)
        ]
        masks = [torch.zeros(numel).double() for numel in lengths]
        for group in [list(chain(*chunks))] if self.scope == "model" else chunks:
            squares = [
                [float(mine[at][list(values)].square().sum().bfloat16()) for mine in fed]
                for at, values in group
            ]
            means = [float(torch.tensor(sum(of) / len(fed)).bfloat16()) for of in squares]
            numel = sum(len(values) for _, values in group)
            sent = (self.bits * numel / 8 - 2 * len(group)) // (4 * self.chunk)
            order = sorted(range(len(group)), key=lambda c: (-means[c], c))
            for at, values in (group[c] for c in order[: max(1, int(sent))]):
                masks[at][list(values)] = 1.0
        self.residuals = [
            [f * (1 - mask) for f, mask in zip(mine, masks, strict=True)] for mine in fed
        ]
        return [
            torch.stack([mine[at] for mine in fed]).mean(0) * mask for at, mask in enumerate(masks)
        ]


@pytest.mark.parametrize(
    ("ranks", "options", "dtype", "scope"),
    [
        (2, (4, 16), torch.float32, "layer"),
        (3, (9, 8), torch.float16, "layer"),
        (3, (32, 4), torch.bfloat16, "model"),
        *exhaustive(
            (5, (2, 64), torch.bfloat16, "layer"),
            (8, (4, 16), torch.bfloat16, "model"),
            (3, (32, 4), torch.float32, "model"),
            (2, (9, 8), torch.float16, "model"),
        ),
    ],
)
def test_it_is_the_papers(
    ranks: int, options: tuple[int, int], dtype: torch.dtype, scope: str
) -> None:
    bits, chunk = options
    aggregator = TopKC(bits, chunk, values="fp32", scope=scope)
    data = [[drawn(SHAPES, r, step, dtype) for r in range(ranks)] for step in range(4)]
    found = averaged(SHAPES, ErrorFeedback(aggregator), data)
    reference = Reference(bits, chunk, ranks, scope)
    eps = max(torch.finfo(dtype).eps, 3e-6)
    for step, given in enumerate(data):
        for at, expected in enumerate(reference.step(given)):
            average = found[0][step][0][at].view(-1)
            assert torch.equal(average != 0, expected != 0), "other chunks"
            torch.testing.assert_close(average.double(), expected, rtol=eps, atol=eps)
            for mine, kept in zip(found, reference.residuals, strict=True):
                if dtype != torch.float32:  # also what rounding of the average lost
                    kept[at] += expected - average.double()
                torch.testing.assert_close(mine[step][1][at].double(), kept[at], rtol=0, atol=1e-5)


def test_beyond_the_range_of_squares_nothing_is_lost() -> None:
    """Small values wait if they lose digits. Values that fp16 cannot hold at the range's last scale
    are Inf on all ranks, and residuals stay clean."""

    aggregator, ranks, shapes = ErrorFeedback(TopKC(8, 16, scope="layer")), 2, [(40, 50)]
    for scale, fits in ((2.0**-95, True), (2.0**-80, True), (2.0**70, False), (2.0**110, False)):

        def body(comm: Communicator, scale: float = scale) -> tuple[torch.Tensor, torch.Tensor]:
            mine = Parameters(comm, shapes, aggregator)
            average = mine.average([drawn(shapes, comm.rank, 0)[0] * scale])[0]
            return average.view(-1).double() / scale, mine.states()[0].double() / scale

        given = sum(drawn(shapes, rank, 0)[0].view(-1).double() for rank in range(ranks))
        found = as_threads(ranks, body)
        kept = sum(left for _, left in found)
        assert kept.isfinite().all()
        for average, _ in found:
            assert average.any()
            assert bool(average.isfinite().all()) is fits
            if fits:
                torch.testing.assert_close(ranks * average + kept, given, rtol=0, atol=1e-5)


def test_chunks_are_in_the_order_of_summed_squares() -> None:
    """UTIL's. The order of summed norms would prefer the second chunk, 2 + 2 to 3 + 0; and among
    random ones, none is left whose sum is 1.6 % larger than that of one that is picked."""
    chunk, count, ranks = 16, 400, 3

    data = []
    for rank in range(ranks):
        pair = torch.zeros(2, chunk)
        pair[0, 0], pair[1, 1] = (3.0, 2.0) if rank == 0 else (0.0, 2.0 * (rank == 1))
        size = drawn([(count, 1)], rank, 0)[0].exp()
        data.append([pair.view(-1), (size * drawn([(count, chunk)], rank, 1)[0]).view(-1)])
    aggregator = ErrorFeedback(TopKC(9, chunk, scope="layer"))
    pair, average = averaged([(2 * chunk,), (chunk * count,)], aggregator, [data])[0][0][0]
    assert pair.nonzero().tolist() == [[0]]
    total = sum(mine[1].double().view(count, chunk).square().sum(1) for mine in data)
    picked = average.view(count, chunk).any(1)
    assert 0 < int(picked.sum()) < count
    assert total[~picked].max() <= 1.016 * total[picked].min()


def test_fp16_gradients_near_the_largest() -> None:
    """They neither overflow on the wire nor in the average, which saturates."""
    shapes: list[Shape] = [(40, 40)]
    data = [
        [[(g.clamp(-1, 1) * 60000).half() for g in drawn(shapes, rank, step)] for rank in range(3)]
        for step in range(20)
    ]
    for mine in averaged(shapes, ErrorFeedback(TopKC(2, 16, scope="layer")), data):
        assert all(t[0].isfinite().all() for step in mine for t in step)
        assert mine[-1][0][0].abs().max() == 65504  # of a chunk that has waited


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, (0.5, None, "fp16")),
        (3, (2, None, "bf16")),
        (5, (4, 32, "fp32")),
        *exhaustive((3, (8, None, "fp16"))),
    ],
)
def test_bytes_are_those_of_the_formula(ranks: int, options: tuple[Any, ...]) -> None:
    """Norms and chosen values, each all-reduced in chunks of whole blocks of 1024."""
    shape, numel = (640, 128), 81920
    aggregator = TopKC(*options, scope="layer")
    chunks, sent = aggregator.cut(numel)
    nbytes = 2 * chunks, aggregator.width * sent * aggregator.size
    assert aggregator.payload_bytes(shape, torch.float32) == sum(nbytes)
    short = options[0] * numel / 8 - sum(nbytes)
    assert 0 <= short < aggregator.width * aggregator.size
    lengths = chunks, sent * aggregator.size
    expected = [
        2 * (ranks - 1) * (n + min(ranks, -(-length // 1024)) * HEADER_BYTES)
        for n, length in zip(nbytes, lengths, strict=True)
    ]
    assert sent_bytes(ranks, [shape], ErrorFeedback(aggregator)) == [expected]


def test_bytes_of_a_whole_model() -> None:
    """Norms of all parameters and the chosen chunks, padding included; no more than `bits`."""
    ranks = 3
    shapes: list[Shape] = [(640, 128), (100,), (26, 31), ()]
    aggregator = TopKC(2, 64)
    numels = [math.prod(shape) for shape in shapes]
    chunks, sent = 1280 + 2 + 13 + 1, (sum(numels) * 2 // 8 - 2 * 1296) // (2 * 64)
    assert aggregator.cut(*numels) == (chunks, sent)
    expected = [
        2 * (ranks - 1) * (2 * n + min(ranks, -(-n // 1024)) * HEADER_BYTES)
        for n in (chunks, 64 * sent)
    ]
    assert sent_bytes(ranks, shapes, ErrorFeedback(aggregator)) == [expected]
    shares = sum(aggregator.payload_bytes(shape, torch.float32) for shape in shapes)
    assert 0 <= shares - 2 * chunks - 128 * sent < 128 + len(shapes)


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (3, torch.float16)])
def test_of_a_whole_model_the_largest_parameter_sends_most(ranks: int, dtype: torch.dtype) -> None:
    """Permuted or not; without error feedback too; and no average has values of another one."""
    shapes: list[Shape] = [(50, 20), (3,), (50, 20), (0,), (50, 21)]
    given = [drawn(shapes, rank, 0, dtype) for rank in range(ranks)]
    for gradients in given:
        gradients[2] *= 100
    for permuted, feedback in product([False, True], [False, True]):
        inner = TopKC(2, 16, permuted=permuted, scope="model")
        averages = averaged(shapes, ErrorFeedback(inner) if feedback else inner, [given])[0][0][0]
        counts = [int(a.count_nonzero()) for a in averages]
        # Values are permuted over all parameters, a third of which are large.
        assert permuted or counts[2] == sum(counts) > 0
        assert permuted == (counts[0] > 0)
        for at, average in enumerate(averages):
            mean = torch.stack([mine[at] for mine in given]).double().mean(0)
            off = (average.double() - mean)[average != 0].abs().max() if counts[at] else 0.0
            assert off <= 0.01 * (100 if at == 2 else 1)


def test_permuting_loses_what_neighbours_share() -> None:
    """Large values in runs, as rows of a matrix have: the error of all but J chunks grows when
    values are permuted, in each step otherwise, and the same on every rank."""
    shapes: list[Shape] = [(100, 128)]
    size = torch.randn(100, 1, generator=torch.Generator().manual_seed(7)).exp().square()
    data = [[[drawn(shapes, r, step)[0] * size] for r in range(3)] for step in range(2)]
    mean, errors = sum(mine[0] for mine in data[0]) / 3, []
    for permuted in (False, True):
        aggregator = ErrorFeedback(TopKC(2, 64, permuted=permuted, scope="layer"))
        found = averaged(shapes, aggregator, data)
        (average,), (second,) = (found[0][step][0] for step in range(2))
        errors.append(float((average - mean).square().sum() / mean.square().sum()))
        assert all(mine[0][1][0].any() for mine in found)
        assert not torch.equal(average != 0, second != 0)
    assert errors[0] < 0.2
    assert errors[1] > 0.6


def test_of_equal_sizes_the_lowest_come_first() -> None:
    sizes = torch.tensor([1.0, 3.0, 3.0, 0.0, 1.0, 3.0, torch.inf, 0.0]).bfloat16()
    nan = torch.tensor([5.0, torch.nan, -torch.nan, torch.inf, 6.0, 7.0, 0.0, 0.0]).bfloat16()
    for count, expected in enumerate([[], [6], [1, 6], [1, 2, 6], [1, 2, 5, 6], [0, 1, 2, 5, 6]]):
        if count:
            first, second, third = largest_chunks([sizes, nan, sizes[:3]], [count, 3, 2])
            assert first.tolist() == expected
            assert second.tolist() == [1, 2, 3]
            assert third.tolist() == [1, 2]


def test_chunks_are_taken_out_and_put_back() -> None:
    for numel, size in product([1, 3, 4, 5, 15, 16, 17, 31, 33, 39], (4, 16)):
        values, chunks = torch.arange(1.0, numel + 1), -(-numel // size)
        for picks in range(1, 1 << min(chunks, 6)):
            at = torch.tensor([c for c in range(chunks) if picks >> c & 1])
            rows = torch.full((len(at), size), torch.nan)
            gather_chunks(values, at, rows)
            padded = torch.nn.functional.pad(values, (0, chunks * size - numel)).view(chunks, size)
            assert torch.equal(rows, padded[at])
            back = -values
            scatter_chunks(rows, at, back)
            taken = torch.zeros(chunks, size).index_fill_(0, at, 1).view(-1)[:numel].bool()
            assert torch.equal(back, torch.where(taken, values, -values))


def test_defaults_are_the_papers() -> None:
    assert [TopKC(bits).size for bits in (0.5, 2, 4, 8)] == [128, 64, 64, 64]
    assert str(TopKC()) == "topkc(bits=2, chunk=64)"
    assert str(TopKC(scope="layer")) == "topkc(bits=2, chunk=64, by layer)"
