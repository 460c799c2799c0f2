"""Aggregators that send the largest values: what is chosen, by whom, and what that leaves."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from averaging import Parameters, Shape, averaged, drawn
from gradwire.aggregators import (
    ARTopK,
    Compressed,
    ErrorFeedback,
    TopKC,
    registry,
    selection,
)
from gradwire.aggregators import DeepGradientCompression as Deep
from gradwire.aggregators.chunks import gather_chunks, largest_chunks, scatter_chunks
from gradwire.codecs import DGC, MSTopK, RandomK
from gradwire.engine import HEADER_BYTES, Communicator
from gradwire.lang import layout
from gradwire.planner import Rules, make_plan
from ranks import as_threads

SIZES = [0, 1, 7, 127, 128, 129, 511, 512, 513, 3000, 70_001]


def test_positions_are_those_of_the_largest() -> None:
    for numel, density, made in product(
        SIZES, [1, 0.5, 0.1, 0.01, 0.001], ["drawn", "ties", "zeros"]
    ):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        if made != "drawn":
            values = (values * (made == "ties")).round()
        k, where = selection.count(density, numel), (numel, density, made)
        assert k == min(max(1, int(density * numel)), numel), where
        expected = values.abs().sort(descending=True, stable=True).indices[:k].sort().values
        packed = selection.pack(values, density)
        assert packed.shape == (selection.packed_nbytes(density, numel),), where
        assert torch.equal(selection.unpack(packed, density, numel), expected), where


def test_what_is_not_finite_is_largest() -> None:
    values = torch.tensor([1.0, torch.nan, 1e38, -torch.inf, torch.inf, 2.0])
    packed = selection.pack(values, 0.5)
    assert selection.unpack(packed, 0.5, 6).tolist() == [1, 3, 4]


def test_zeros_unpack_to_places_in_the_tensor() -> None:
    """A rehearsal sends nothing."""
    for numel in SIZES:
        zeros = torch.zeros(selection.packed_nbytes(0.1, numel), dtype=torch.uint8)
        places = selection.unpack(zeros, 0.1, numel)
        assert places.shape == (selection.count(0.1, numel),)
        assert ((places >= 0) & (places < max(numel, 1))).all()


def test_random_k_is_unbiased_through_all_gather_by_name() -> None:
    """The mean over many steps is the gradient's, within five standard errors; no index is sent."""
    made = registry.get("randomk:density=0.1:unbiased=true:algorithm=all_gather")
    assert made == Compressed(RandomK(0.1, unbiased=True), "all_gather")
    steps, (gradient,) = 200, drawn([(20, 30)], 0, 0)
    found = averaged([(20, 30)], made, [[[gradient]] * 2] * steps)[0]
    mean = sum(averages[0] for averages, _ in found) / steps
    deviation = gradient.abs() * math.sqrt(9 / steps)  # one of ten, times ten
    assert ((mean - gradient).abs() <= 5 * deviation + 1e-3 * gradient.abs()).all()
    assert made.payload_bytes((20, 30), torch.float32) == 2 * 60


def test_names_take_algorithm_and_scope_beside_the_options_of_a_codec() -> None:
    made = registry.get("mstopk:density=0.02:algorithm=all_gather:scope=model")
    assert made == Compressed(MSTopK(0.02), "all_gather", "model")
    assert registry.changed(made, {"density": 0.1}) == Compressed(
        MSTopK(0.1), "all_gather", "model"
    )
    assert registry.changed(made, {"scope": "layer"}) == Compressed(MSTopK(0.02), "all_gather")


def test_unless_asked_one_selection_is_over_all_parameters() -> None:
    """The paper's fused gradients: of parameters of unlike size it errs far less than one for each,
    with the same bytes."""
    shapes: list[Shape] = [(40, 50), (40, 50)]
    given = [drawn(shapes, rank, 0) for rank in range(2)]
    for gradients in given:
        gradients[0] *= 10
    errors = []
    for made in (ARTopK(0.1), ARTopK(0.1, scope="layer")):
        averages = averaged(shapes, made, [given])[0][0][0]
        pairs = zip(averages, *given, strict=True)
        errors.append(sum(float((a - (g + h) / 2).square().sum()) for a, g, h in pairs))
    assert errors[0] < 0.85 * errors[1]


def test_a_rank_of_larger_gradients_leads_and_auto_leaves_none_out() -> None:
    """Rank 2's gradients are three times as large: its share of the squared norms is 9 of 11."""

    def body(comm: Communicator) -> dict[str, list[int]]:
        found = {}
        for leader in ("variance", "auto"):
            mine = Parameters(comm, [(40, 50)], ARTopK(0.05, leader))
            led = []
            for step in range(60):
                (gradient,) = drawn([(40, 50)], comm.rank, step)
                mine.average([gradient * (3 if comm.rank == 2 else 1)])
                led.append(int(mine.members[0].metrics["leader"]))
            assert mine.members[0].metrics["skew"] > 2
            found[leader] = [led.count(rank) for rank in range(3)]
        return found

    found = as_threads(3, body)
    assert all(mine == found[0] for mine in found)
    assert found[0]["variance"] == [0, 0, 60]
    few, fewer, most = found[0]["auto"]
    assert min(few, fewer) >= 4
    assert 42 <= most <= 52  # 49 of 60 are its share


def test_auto_takes_turns_where_norms_are_equal() -> None:
    def body(comm: Communicator) -> list[int]:
        mine = Parameters(comm, [(40, 50)], ARTopK(0.05, "auto"))
        led = []
        for step in range(12):
            mine.average(drawn([(40, 50)], 0, step))
            led.append(int(mine.members[0].metrics["leader"]))
        return led

    assert as_threads(4, body) == [[0, 1, 2, 3] * 3] * 4


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
    assert TopKC(scope="layer").recorded() == "topkc(bits=2, chunk=64, by layer)"


Tensors = list[torch.Tensor]


def test_clipping_is_that_of_the_average_of_unlike_gradients() -> None:
    """Orthogonal, of equal norms. The average of equal ones has up to sqrt(N) * clip."""
    shapes: list[Shape] = [(8, 5), (24,)]

    def gradients(rank: int, ranks: int, norm: float, alike: bool) -> Tensors:
        """Whose average has this norm."""
        given = [torch.zeros(shape) for shape in shapes]
        for g in given:
            g.view(-1)[slice(None) if alike else slice(rank, None, ranks)] = 1.0
        own = torch.cat([g.view(-1) for g in given]).norm()
        return [g * (norm if alike else norm * math.sqrt(ranks)) / own for g in given]

    def averages(given: list[Tensors], clip: float) -> Tensors:
        aggregator = Deep(1.0, momentum=0, clip=clip, values="fp32")
        found = averaged(shapes, aggregator, [given])
        assert not any(kept.any() for ((_, residuals),) in found for kept in residuals)
        first: Tensors = found[0][0][0]
        return first

    for ranks, norm, clip in ((4, 2.0, 2.0), (4, 2.01, 2.0), (2, 3.0, 1.0), (1, 3.0, 1.0)):
        given = [gradients(rank, ranks, norm, alike=False) for rank in range(ranks)]
        found = averages(given, clip)
        expected = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for p, each in zip(expected, zip(*given, strict=True), strict=True):
            p.grad = torch.stack(each).mean(0)
        assert torch.nn.utils.clip_grad_norm_(expected, clip) == pytest.approx(norm)
        for p, average in zip(expected, found, strict=True):
            torch.testing.assert_close(average, p.grad)
    for norm, left in ((3.0, 3.0), (5.0, 4.0)):
        found = averages([gradients(rank, 4, norm, alike=True) for rank in range(4)], clip=2.0)
        assert torch.cat([a.view(-1) for a in found]).norm() == pytest.approx(left)


def test_densities_of_the_warm_up_and_their_bytes() -> None:
    made = Deep(0.001, warmup=10)
    assert made.stages() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    densities = [made.at(step).density for step in range(12)]
    assert densities == [
        *([1 / 4] * 3), *([1 / 16] * 2), *([1 / 64] * 3), *([1 / 256] * 2), 0.001, 0.001
    ]  # fmt: skip
    assert [made.at((3 << 32) + step).density for step in range(12)] == densities
    assert Deep(0.25, warmup=10).stages() == Deep(0.01).stages() == []
    variants = [made.variant(step, 4) for step in range(12)]
    assert list(map(densities.index, densities)) == list(map(variants.index, variants))
    shape, ranks = (100, 300), 3

    def body(comm: Communicator) -> list[int]:
        mine = Parameters(comm, [shape], made)
        for step in range(12):
            mine.average(drawn([shape], comm.rank, step))
        return [outcome.wire_bytes for (outcome,) in mine.outcomes]

    for sent in as_threads(ranks, body):
        for nbytes, density in zip(sent, densities, strict=True):
            told = made.at(densities.index(density)).payload_bytes(shape, torch.float32)
            assert told == layout(DGC(density)).nbytes(math.prod(shape))
            # The threshold is sampled, so fewer values may be sent; a table has 16 bytes.
            most = (ranks - 1) * (told + HEADER_BYTES + 32)
            assert 0.8 * (ranks - 1) * told <= nbytes <= most


def test_one_rank_alone_has_momentum() -> None:
    def body(comm: Communicator) -> None:
        for momentum in (0.9, 0.0):
            mine, u = Parameters(comm, [(5, 6)], Deep(0.01, momentum)), torch.zeros(5, 6)
            for step in range(4):
                (g,) = drawn([(5, 6)], 0, step)
                u = momentum * u + g
                torch.testing.assert_close(mine.average([g])[0], u)
            assert not mine.outcomes[-1]

    as_threads(1, body)


def test_one_rank_alone_keeps_what_fp16_cannot_hold() -> None:
    def body(comm: Communicator) -> None:
        mine, u, sent = Parameters(comm, [(5,)], Deep(0.01, 0.9)), 0.0, torch.zeros(5)
        total = 0.0
        for _ in range(6):
            u = 0.9 * u + 30000.0
            total += u
            (average,) = mine.average([torch.full((5,), 30000.0).half()])
            assert average.isfinite().all()
            sent += average.float()
            torch.testing.assert_close(sent + mine.states()[0], torch.full((5,), total))
        assert (mine.states()[0] > 65504).all()

    as_threads(1, body)


def test_a_plan_wraps_no_error_feedback_around_it() -> None:
    rules = Rules().changed({"density": 0.01}, codec="dgc", error_feedback=True)
    for ranks in (1, 2):
        (planned,) = make_plan([("w", torch.zeros(3, 4))], rules, ranks).parameters
        assert planned.aggregator == Deep(0.01)
        assert planned.feedback
