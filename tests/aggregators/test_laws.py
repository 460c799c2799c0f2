"""Laws that hold for any aggregator: replicas agree (1), nothing is lost (2), bucketing has no
effect (8); and an observer's values are consistent."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from averaging import Parameters, Shape, drawn, fed
from gradwire.aggregators import (
    THC,
    Aggregator,
    ARTopK,
    Averages,
    Compressed,
    Context,
    DeepGradientCompression,
    ErrorFeedback,
    GlobalTopK,
    LWTopK,
    Observation,
    PowerSGD,
    Radial,
    SparseLoCo,
    StateSpec,
    Steps,
    TopKC,
)
from gradwire.aggregators.radial import norms_of, radial_mean
from gradwire.codecs import QSGD, Cast, HardThreshold, MSTopK, OneBit, RandomK, TernGrad, TopK
from gradwire.collectives import AllGather, AllReduce, Broadcast, ReduceScatter
from gradwire.engine import Communicator
from products import EXHAUSTIVE, one_in
from ranks import as_threads
from rooms.handles import Coalescing, Split

SHAPES: list[Shape] = [(20, 30), (9,), (2, 3), (1500,), (33, 17), (20, 30), (), (0,), (8, 3, 3, 3)]


@dataclass(frozen=True)
class Drawn(Aggregator):
    """Two or three rounds, with random verbs per parameter and step, equal on all ranks; each value
    is sent uncompressed, through a codec, or not at all."""

    seed: int = 0

    def states(self, shape: Shape) -> Mapping[str, StateSpec]:
        return {"turn": StateSpec((1,), kind="replicated")}

    def variant(self, step: int, world_size: int) -> int:
        return step

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        draws = [random.Random(f"{self.seed} {c.name} {c.step}") for c in contexts]
        ways = [d.choice(("reduced", "shards", "gathered", "coded", "none")) for d in draws]
        roots = [d.randrange(c.world_size) for d, c in zip(draws, contexts, strict=True)]
        # Round 0: one rank selects values.
        signs = [c.gradient.sign() for c in contexts]
        yield [Broadcast(s, r, of=c) for s, r, c in zip(signs, roots, contexts, strict=True)]
        sent = [
            torch.zeros_like(c.gradient) if w == "none" else torch.where(s > 0, c.gradient, 0.0)
            for w, s, c in zip(ways, signs, contexts, strict=True)
        ]
        averages = [s.clone() for s in sent]
        errors = [torch.zeros_like(s) for s in sent]
        # Round 1: these values, through four kinds of collectives.
        asked, of = [], []
        for i, (way, c, values) in enumerate(zip(ways, contexts, averages, strict=True)):
            n = c.world_size
            if way == "reduced":
                asked.append(AllReduce(values, of=c))
            elif way == "coded":
                asked.append(AllReduce(values, "avg", errors[i], codec=QSGD(bits=3), of=c))
            elif way == "gathered":
                asked.append(AllGather(values, of=c))
            elif way == "shards":
                values = torch.cat([values, values.new_zeros(-len(values) % n)])
                asked.append(ReduceScatter(values, of=c))
            else:
                continue
            of.append(i)
        results = yield asked
        found = dict(zip(of, results, strict=True))
        shards = [i for i in of if ways[i] == "shards"]
        if shards:  # round 2
            whole = yield [AllGather(found[i].clone(), of=contexts[i]) for i in shards]
            found.update(zip(shards, whole, strict=True))
        for i, c in enumerate(contexts):
            numel = c.gradient.numel()
            if ways[i] == "gathered":
                averages[i] = found[i].view(c.world_size, numel).sum(0) / c.world_size
            elif i in found:
                averages[i] = found[i][:numel]
            sent[i] = sent[i] - errors[i]
            c.state["turn"] += 1
        return Averages(averages, sent)


CASES: dict[str, tuple[Aggregator, ...]] = {
    "qsgd": (Compressed(QSGD(bits=2)),),
    "terngrad": (Compressed(TernGrad()),),
    "onebit": (Compressed(OneBit()),),
    "topk": (Compressed(TopK(density=0.05)),),
    "powersgd": (PowerSGD(2),),
    "artopk": (ARTopK(0.05, scope="layer"),),
    "topkc": (TopKC(bits=4, chunk=16, scope="layer"),),
    "topkc permuted": (TopKC(8, 32, "bf16", permuted=True, scope="layer"),),
    "thc": (THC(chunk=64),),
    "thc full": (THC(bits=6, code=3, rotation="full", chunk=32),),
    "artopk by variance": (ARTopK(0.05, "variance", "layer", "fp32"),),
    "artopk auto": (ARTopK(0.05, "auto", "layer"),),
    "lwtopk": (LWTopK(0.05),),
    "lwtopk in fp32": (LWTopK(0.05, "fp32"),),
    "mstopk": (Compressed(MSTopK(0.05), "all_gather"),),
    "hardthreshold": (Compressed(HardThreshold(1.5, 0.2), "all_gather"),),
    "randomk": (Compressed(RandomK(0.1)),),
    "dgc": (DeepGradientCompression(0.05, momentum=0, warmup=2),),
    "dgc with momentum": (DeepGradientCompression(0.05),),
    "sparseloco": (SparseLoCo(keep=6, chunk=64, mean="ranks", clip=False),),
    "sparseloco of coefficients": (
        SparseLoCo(keep=6, chunk=64, bits=16, mean="ranks", clip=False, transform="dct"),
    ),
    "drawn": (Drawn(),),
    "mixed": (
        PowerSGD(1),
        ARTopK(0.1, scope="layer"),
        Drawn(3),
        TopKC(2, 32, scope="layer"),
        THC(bits=5),
        Compressed(QSGD(bits=4)),
    ),
}


WHOLE: dict[str, tuple[Aggregator, ...]] = {  # over all parameters at once
    "topkc of a model": (TopKC(bits=4, chunk=16),),
    "topkc of a model permuted": (TopKC(bits=2, chunk=32, permuted=True),),
    "artopk of a model": (ARTopK(0.05),),
    "globaltopk": (GlobalTopK(0.05),),
    "mstopk of a model": (Compressed(MSTopK(0.05), "all_gather", "model"),),
    "some of a model": (
        TopKC(bits=4, chunk=16),
        PowerSGD(2),
        Compressed(QSGD(bits=4), scope="model"),
    ),
}


def mixed(case: str) -> list[Aggregator]:
    """The aggregator of each parameter, with error feedback; equal ones are one object."""
    made = [*map(fed, {**CASES, **WHOLE}[case])]
    return [made[i % len(made)] for i in range(len(SHAPES))]


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Tensors = list[torch.Tensor]
Rows = list[tuple[Tensors, Tensors, Tensors, Tensors]]  # gradients, before, averages, after

# Cases that are others with other options, which tests of the aggregator cover.
ALIKE = ("terngrad", "onebit", "artopk auto", "lwtopk in fp32", "mstopk", "thc",
         "topkc", "topkc of a model", "powersgd")  # fmt: skip
# Every other case; ranks and dtypes in rotation.
SAMPLE = [
    (case, (2, 3, 5, 2, 3)[i % 5], DTYPES[i % 3])
    for i, case in enumerate(case for case in [*CASES, *WHOLE] if case not in ALIKE)
]
EVERY = product([*CASES, *WHOLE], [2, 3, 4, 5], DTYPES)


@pytest.mark.parametrize(
    ("case", "ranks", "dtype"),
    [*SAMPLE, *(pytest.param(*row, marks=EXHAUSTIVE) for row in EVERY if row not in SAMPLE)],
    ids=str,
)
def test_every_law(case: str, ranks: int, dtype: torch.dtype) -> None:
    def body(comm: Communicator) -> tuple[Tensors, list[Rows]]:
        r, aggregators = comm.rank, mixed(case)

        def ordinary(step: int) -> Tensors:
            """The first are small whole numbers, many of them equal."""
            made = drawn(SHAPES, r, step)
            return [((3 * g).round() if step == 0 else g).to(dtype) for g in made]

        plain = rows_of(comm, aggregators, ordinary, 3)
        sent = check_bucketing(comm, case, aggregators, plain)
        common = drawn(SHAPES, 0, 99)

        def large(step: int) -> Tensors:
            """Ranks agree on half of them, so residuals grow until averages exceed fp16."""
            pairs = zip(drawn(SHAPES, r, step), common, strict=True)
            return [(3e4 * (own + each)).clamp(-65504, 65504).half() for own, each in pairs]

        def unused(step: int) -> Tensors:
            """A rank uses a parameter in two steps of three."""
            made = drawn(SHAPES, r, step)
            return [g * ((i + r + step) % 3 > 0) for i, g in enumerate(made)]

        return sent, [
            plain,
            rows_of(comm, aggregators, large, 5, bad=case not in ("drawn", "mixed")),
            rows_of(comm, aggregators, unused, 3, may_be_unused=True),
        ]

    found = as_threads(ranks, body)
    dtypes = (dtype, torch.float16, torch.float32)
    for what, i in (("drawn", 0), ("large", 1), ("unused", 2)):
        nothing_is_lost([rows[i] for _, rows in found], dtypes[i], what)
    averages = [a.view(-1) for _, _, of_step, _ in found[0][1][0] for a in of_step]
    eps = max(1e-5, torch.finfo(dtype).eps * (dtype != torch.float16))
    for seen, *parts in zip(averages, *(sent for sent, _ in found), strict=True):
        mean = torch.stack(parts).double().mean(0)
        torch.testing.assert_close(seen.double(), mean, rtol=eps, atol=eps)


def rows_of(
    comm: Communicator,
    aggregators: Sequence[Aggregator],
    gradients_of: Callable[[int], Tensors],
    steps: int,
    may_be_unused: bool = False,
    bad: bool = False,
) -> Rows:
    mine, rows = Parameters(comm, SHAPES, aggregators), []
    for member in mine.members:
        member.may_be_unused = may_be_unused
    for step in range(steps):
        gradients = gradients_of(step)
        before = owed(mine, [not g.any() and may_be_unused for g in gradients])
        rows.append((gradients, before, mine.average(gradients), mine.states()))
    for value in (torch.inf, torch.nan) if bad else ():  # law 4
        gradients, before = gradients_of(steps), mine.kept()
        if comm.rank == comm.world_size - 1:
            for gradient in gradients:
                gradient.view(-1)[gradient.numel() // 3 :][:1] = value
        averages = mine.average(gradients)
        assert not torch.cat([a.view(-1) for a in averages]).isfinite().all()
        assert same(before, mine.kept())
    return rows


def same(before: Sequence[Mapping[str, torch.Tensor]], after: Sequence[Any]) -> bool:
    """Whether states are equal."""
    return all(
        kept.keys() == left.keys() and all(torch.equal(t, left[key]) for key, t in kept.items())
        for kept, left in zip(before, after, strict=True)
    )


def owed(mine: Parameters, unused: Sequence[bool]) -> Tensors:
    """What the next averages include besides gradients: residuals, and momentum where a gradient
    comes."""
    factors = [
        0.0 if idle else getattr(m.aggregator, "momentum", 0.0)
        for m, idle in zip(mine.members, unused, strict=True)
    ]
    parts = zip(mine.states(), factors, mine.states("velocity"), strict=True)
    return [residual + factor * velocity for residual, factor, velocity in parts]


def nothing_is_lost(found: Sequence[Rows], dtype: torch.dtype, what: str) -> None:
    """Laws 1 and 2: gradients + residuals before == world_size * average + residuals after, summed
    over ranks."""
    ranks = len(found)
    eps = max(torch.finfo(dtype).eps, 3e-6)  # averages are rounded to the gradients' dtype
    for step, at in product(range(len(found[0])), range(len(SHAPES))):
        average = found[0][step][2][at]
        where = f"{what}, step {step}, parameter {at}"
        assert all(torch.equal(mine[step][2][at], average) for mine in found), where
        assert average.isfinite().all(), where
        g, before, after = (
            sum(mine[step][i][at].double().view(-1) for mine in found) for i in (0, 1, 3)
        )
        largest = max(float(t.abs().max()) for t in (g, before, after)) if g.numel() else 0.0
        torch.testing.assert_close(
            ranks * average.double().view(-1) + after, g + before, rtol=0,
            atol=ranks * eps * max(1.0, largest), msg=lambda said, where=where: f"{where}: {said}",
        )  # fmt: skip
    assert any(kept.any() for kept in found[0][-1][3]), what


def check_bucketing(
    comm: Communicator, case: str, aggregators: Sequence[Aggregator], plain: Rows
) -> Tensors:
    """Law 8: other buckets in every step give the same bits, and so does an observer, whose values
    are consistent. Returns the parts sent, by step and parameter."""
    sent_parts, mine = [], Parameters(comm, SHAPES, aggregators)
    told: dict[str, Any] = {}

    def observe(o: Observation) -> None:
        assert o.sent is not None
        tensors = o.gradient.clone(), o.sent.clone().view(-1), o.average.clone()
        told[o.name] = (o.step, *tensors, o.seconds)

    for step, (gradients, before, averages, after) in enumerate(plain):
        scopes = cuts(step % 2, everything=step == 1)
        if case in WHOLE:
            scopes = gathered(scopes, aggregators, (0, 2000, 1 << 18)[step])
        assert all(map(torch.equal, mine.average(gradients, scopes, observe), averages)), step
        assert all(map(torch.equal, mine.states(), after)), step
        assert sorted(told) == [f"p{i}" for i in range(len(SHAPES))]
        for i, average in enumerate(averages):
            number, gradient, sent, seen, seconds = told[f"p{i}"]
            assert number == step
            assert seconds > 0
            assert torch.equal(gradient, gradients[i].view(-1))
            assert torch.equal(seen, average.view(-1))
            torch.testing.assert_close(gradient + before[i], sent + after[i], rtol=1e-5, atol=1e-5)
            sent_parts.append(sent)
    return sent_parts


NO_MEANS = {  # averages that are no means of what is sent
    "radial": Radial(),
    "radial of 2 bits": Radial(QSGD(bits=2)),
    "radial of a few": Radial(TopK(0.05)),
    "sparseloco by senders": SparseLoCo(keep=6, chunk=64),
    "demo": SparseLoCo(keep=3, chunk=64, bits=16, clip=False, transform="dct"),
}


@pytest.mark.parametrize("case", NO_MEANS)
def test_of_averages_that_are_no_means_each_rank_keeps_what_it_does_not_send(case: str) -> None:
    """Law 1, law 4, and an observer's values; and law 8, in `check_bucketing`."""

    def body(comm: Communicator) -> Rows:
        aggregators = [fed(NO_MEANS[case])] * len(SHAPES)
        rows = rows_of(comm, aggregators, lambda step: drawn(SHAPES, comm.rank, step), 3, bad=True)
        check_bucketing(comm, case, aggregators, rows)
        return rows

    found = as_threads(3, body)
    for step, (_, _, averages, _) in enumerate(found[0]):
        for mine in found[1:]:
            assert all(map(torch.equal, averages, mine[step][2]))
    assert any(kept.any() for kept in found[0][-1][3])


def test_a_radial_merge_without_directions() -> None:
    """Of zeros, and of what cancels out; the others' direction counts alone."""
    shapes: list[Shape] = [(40, 30), (40, 30), (40, 30)]

    def body(comm: Communicator) -> Tensors:
        given = [torch.zeros(shapes[0]), drawn(shapes, 0, 0)[0], drawn(shapes, 0, 0)[0]]
        given[1] *= (1, -1, 0)[comm.rank]
        given[2] *= (1, 0, 3)[comm.rank]
        return Parameters(comm, shapes, Radial(Cast("bf16"))).average(given)

    nothing, opposed, alike = as_threads(3, body)[1]
    assert not nothing.any()
    assert not opposed.any()
    one = drawn(shapes, 0, 0)[0].bfloat16().float()
    assert not radial_mean(torch.stack([one.flatten(), -3 * one.flatten()])).any()
    torch.testing.assert_close(alike, one * 4 / 3, rtol=1e-2, atol=1e-4)


def test_norms_have_the_same_bits_with_any_number_of_threads() -> None:
    values, before = torch.randn(3, 1_000_003), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(norms_of(values))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), values.double().norm(dim=1), rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", one_in(2, [torch.bfloat16, torch.float16]))
def test_of_equal_steps_no_residual_loses_what_16_bits_round_off(dtype: torch.dtype) -> None:
    """Law 2 over many steps, of averages that are computed in fp32: their sum plus the mean
    residual is the gradients' sum, so their mean converges as long as residuals are bounded. They
    are where nothing but rounding is kept."""
    steps, shapes, ranks = 50, [(12, 12)], 2
    fine = {"powersgd, dense": PowerSGD(8), "thc": THC(8, 4, chunk=64)}
    cases = {
        **fine,
        "thc, full": THC(8, 4, "full", chunk=16),
        "powersgd": PowerSGD(2),
        "topkc": TopKC(8, 16, scope="layer"),
        "topkc of a model": TopKC(8, 16),
        "artopk": ARTopK(0.3),
        "globaltopk": GlobalTopK(0.3),
    }
    given = [drawn(shapes, rank, 0, dtype) for rank in range(ranks)]
    exact = torch.stack([mine[0].double().view(-1) for mine in given]).mean(0)

    def body(comm: Communicator) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        found = {}
        for case, aggregator in cases.items():
            mine = Parameters(comm, shapes, ErrorFeedback(aggregator))
            averages = [mine.average(given[comm.rank])[0].double().view(-1) for _ in range(steps)]
            found[case] = torch.stack(averages).mean(0), mine.states()[0].double()
        return found

    found = as_threads(ranks, body)
    for case in cases:
        mean, residual = found[0][case][0], sum(mine[case][1] for mine in found) / ranks
        off = (mean + residual / steps - exact).abs().max()
        assert off < 2e-6, case
        if case in fine:
            torch.testing.assert_close(mean, exact, rtol=0, atol=0.03)


def test_one_rank_alone_keeps_its_gradients() -> None:
    def body(comm: Communicator) -> None:
        for case in [*CASES, *WHOLE]:
            if case == "dgc with momentum":  # which one rank has, too
                continue
            mine, gradients = Parameters(comm, SHAPES, mixed(case)), drawn(SHAPES, 0, 0)
            assert all(map(torch.equal, mine.average(gradients), gradients)), case
            assert not any(kept.any() for kept in mine.states()), case
            assert mine.outcomes == [[]], case

    as_threads(1, body)


def cuts(seed: int, everything: bool = False) -> list[list[int]]:
    """The parameters in scopes, both in random order; or all in one."""
    draw = random.Random(seed)
    order = list(range(len(SHAPES)))
    draw.shuffle(order)
    scopes = []
    while order:
        size = len(order) if everything else draw.randint(1, 4)
        scopes.append(order[:size])
        del order[:size]
    return scopes


def gathered(
    buckets: list[list[int]], aggregators: Sequence[Aggregator], coalesce_bytes: int
) -> list[list[int]]:
    """The scopes of a pass with these buckets."""
    gather, scopes = Coalescing(coalesce_bytes), []
    for number, bucket in enumerate(buckets):
        split = Split.of([aggregators[i] for i in bucket])
        nbytes = 4 * sum(math.prod(SHAPES[i]) for i in bucket)
        for due in gather.add(split, nbytes, number == len(buckets) - 1):
            scopes.append([buckets[s.bucket][at] for s in due for at in s.places])
    assert sorted(i for scope in scopes for i in scope) == list(range(len(SHAPES)))
    of_model = {i for i, one in enumerate(aggregators) if one.scope == "model"}
    assert set(scopes[-1]) == of_model
    return scopes
