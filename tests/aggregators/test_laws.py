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

from averaging import Parameters, Shape, drawn
from gradwire.aggregators import (
    THC,
    Aggregator,
    ARTopK,
    Averages,
    Compressed,
    Context,
    DeepGradientCompression,
    ErrorFeedback,
    LWTopK,
    Observation,
    PowerSGD,
    StateSpec,
    Steps,
    TopKC,
)
from gradwire.codecs import QSGD, HardThreshold, MSTopK, OneBit, RandomK, TernGrad, TopK
from gradwire.collectives import AllGather, AllReduce, Broadcast, ReduceScatter
from gradwire.engine import Communicator
from gradwire.integrations.gather import Gather, Split
from products import every_pair, one_in
from ranks import as_threads

SHAPES: list[Shape] = [(20, 30), (9,), (2, 3), (1500,), (33, 17), (20, 30), (), (0,), (8, 3, 3, 3)]


@dataclass(frozen=True)
class Drawn(Aggregator):
    """Two or three rounds, with random verbs per parameter and step, equal on all ranks; each value
    is sent uncompressed, through a codec, or not at all."""

    seed: int = 0

    def states(self, shape: Shape) -> Mapping[str, StateSpec]:
        return {"turn": StateSpec((1,), kind="replicated")}

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
    "artopk": (ARTopK(0.05),),
    "topkc": (TopKC(bits=4, chunk=16),),
    "topkc permuted": (TopKC(bits=8, chunk=32, values="bf16", permuted=True),),
    "thc": (THC(chunk=64),),
    "thc full": (THC(bits=6, code=3, rotation="full", chunk=32),),
    "artopk by variance": (ARTopK(0.05, "variance", values="fp32"),),
    "artopk auto": (ARTopK(0.05, "auto"),),
    "lwtopk": (LWTopK(0.05),),
    "lwtopk in fp32": (LWTopK(0.05, "fp32"),),
    "mstopk": (Compressed(MSTopK(0.05), "all_gather"),),
    "hardthreshold": (Compressed(HardThreshold(1.5, 0.2), "all_gather"),),
    "randomk": (Compressed(RandomK(0.1)),),
    "dgc": (DeepGradientCompression(0.05, momentum=0, warmup=2),),
    "dgc in fp32": (DeepGradientCompression(0.05, momentum=0, values="fp32"),),
    "drawn": (Drawn(),),
    "mixed": (
        PowerSGD(1),
        ARTopK(0.1),
        Drawn(3),
        TopKC(2, 32),
        THC(bits=5),
        Compressed(QSGD(bits=4)),
    ),
}


WHOLE: dict[str, tuple[Aggregator, ...]] = {  # over all parameters at once
    "topkc of a model": (TopKC(bits=4, chunk=16, scope="model"),),
    "topkc of a model permuted": (TopKC(bits=2, chunk=32, permuted=True, scope="model"),),
    "artopk of a model": (ARTopK(0.05, scope="model"),),
    "some of a model": (
        TopKC(bits=4, chunk=16, scope="model"),
        PowerSGD(2),
        Compressed(QSGD(bits=4), scope="model"),
    ),
}


def mixed(case: str) -> list[Aggregator]:
    """The aggregator of each parameter, with error feedback; equal ones are one object."""
    fed = [one if one.own_feedback else ErrorFeedback(one) for one in {**CASES, **WHOLE}[case]]
    return [fed[i % len(fed)] for i in range(len(SHAPES))]


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("case", "ranks", "dtype"), one_in(11, product([*CASES, *WHOLE], [2, 3, 4, 5], DTYPES))
)
def test_law_2_nothing_is_lost(case: str, ranks: int, dtype: torch.dtype) -> None:
    """Gradients + residuals before == world_size * average + residuals after, summed over ranks;
    and law 1."""
    loses_nothing(case, ranks, dtype, lambda rank, step: drawn(SHAPES, rank, step, dtype))


@pytest.mark.parametrize(("case", "ranks"), every_pair([*CASES, *WHOLE], [2, 3]))
def test_law_2_of_averages_that_fp16_cannot_hold(case: str, ranks: int) -> None:
    """Ranks agree on half of the gradients, so residuals grow until averages exceed fp16."""
    common = drawn(SHAPES, 0, 99)

    def gradients(rank: int, step: int) -> list[torch.Tensor]:
        columns = zip(drawn(SHAPES, rank, step), common, strict=True)
        return [(3e4 * (own + each)).clamp(-65504, 65504).half() for own, each in columns]

    loses_nothing(case, ranks, torch.float16, gradients)


@pytest.mark.parametrize("case", [*CASES, *WHOLE])
def test_law_2_of_parameters_that_some_ranks_do_not_use(case: str) -> None:
    """A rank uses a parameter in two steps of three."""

    def gradients(rank: int, step: int) -> list[torch.Tensor]:
        made = drawn(SHAPES, rank, step)
        return [g * ((i + rank + step) % 3 > 0) for i, g in enumerate(made)]

    loses_nothing(case, 2, torch.float32, gradients, may_be_unused=True)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize(
    "case", [case for case in [*CASES, *WHOLE] if case not in ("drawn", "mixed")]
)
def test_law_4_of_fp16_a_step_that_is_not_finite_leaves_residuals(case: str, bad: float) -> None:
    """Of every parameter, also if the kernels of a codec update them."""

    def body(comm: Communicator) -> None:
        mine = Parameters(comm, SHAPES, mixed(case))
        for step in range(3):
            gradients = drawn(SHAPES, comm.rank, step, torch.float16)
            before = mine.states()
            if step == 2 and comm.rank == 1:
                for gradient in gradients:
                    gradient.view(-1)[gradient.numel() // 3 :][:1] = bad
            averages = mine.average(gradients)
        assert not torch.cat([a.view(-1) for a in averages]).isfinite().all()
        assert all(map(torch.equal, before, mine.states()))
        assert any(kept.any() for kept in before)

    as_threads(2, body)


def loses_nothing(
    case: str,
    ranks: int,
    dtype: torch.dtype,
    gradients_of: Callable[[int, int], list[torch.Tensor]],
    may_be_unused: bool = False,
) -> None:
    """Check laws 1 and 2 on finite gradients, by rank and step."""
    steps = 5

    def body(comm: Communicator) -> list[tuple[list[torch.Tensor], ...]]:
        mine = Parameters(comm, SHAPES, mixed(case))
        found = []
        for member in mine.members:
            member.may_be_unused = may_be_unused
        for step in range(steps):
            gradients, before = gradients_of(comm.rank, step), mine.states()
            found.append((gradients, before, mine.average(gradients), mine.states()))
        return found

    found = as_threads(ranks, body)
    eps = max(torch.finfo(dtype).eps, 3e-6)  # averages are rounded to the gradients' dtype
    for step in range(steps):
        for at in range(len(SHAPES)):
            average = found[0][step][2][at]
            assert all(torch.equal(mine[step][2][at], average) for mine in found)
            assert average.isfinite().all()
            g, before, after = (
                sum(mine[step][i][at].double().view(-1) for mine in found) for i in (0, 1, 3)
            )
            largest = max(float(t.abs().max()) for t in (g, before, after)) if g.numel() else 0.0
            torch.testing.assert_close(
                ranks * average.double().view(-1) + after, g + before, rtol=0,
                atol=ranks * eps * max(1.0, largest),
            )  # fmt: skip
    assert any(kept.any() for kept in found[0][-1][3])


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


@pytest.mark.parametrize(("case", "ranks", "dtype"), one_in(13, product(CASES, [2, 3, 4], DTYPES)))
def test_law_8_any_bucketing_gives_the_same_bits(case: str, ranks: int, dtype: torch.dtype) -> None:
    def body(comm: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for way in range(5):
            mine, averages = Parameters(comm, SHAPES, mixed(case)), []
            for step in range(3):
                # The last one has another bucketing in every step.
                seed = way if way < 4 else 100 + step
                scopes = cuts(seed, everything=way == 1) if way else None
                averages += mine.average(drawn(SHAPES, comm.rank, step, dtype), scopes)
            found.append([*averages, *mine.states()])
        return found

    for mine in as_threads(ranks, body):
        for way, other in enumerate(mine[1:], 1):
            assert all(map(torch.equal, mine[0], other)), f"way {way}"


@pytest.mark.parametrize(
    ("case", "ranks", "dtype"),
    every_pair([*CASES, *WHOLE], [2, 3], [torch.float32, torch.float16]),
)
def test_what_is_observed_fits_together(case: str, ranks: int, dtype: torch.dtype) -> None:
    def body(comm: Communicator) -> list[dict[str, Any]]:
        mine = Parameters(comm, SHAPES, mixed(case))
        told: list[dict[str, Any]] = []

        def observe(o: Observation) -> None:
            assert o.sent is not None
            tensors = o.gradient.clone(), o.sent.clone().view(-1), o.average.clone()
            told[-1][o.name] = (o.step, *tensors, o.seconds)

        for step in range(3):
            told.append({})
            gradients, before = drawn(SHAPES, comm.rank, step, dtype), mine.states()
            averages = mine.average(gradients, cuts(step), observe)
            assert sorted(told[-1]) == [f"p{i}" for i in range(len(SHAPES))]
            for i, (average, e, kept) in enumerate(
                zip(averages, before, mine.states(), strict=True)
            ):
                number, gradient, sent, seen, seconds = told[-1][f"p{i}"]
                assert number == step
                assert 0 < seconds < 30
                assert torch.equal(gradient, gradients[i].view(-1))
                assert torch.equal(seen, average.view(-1))
                torch.testing.assert_close(gradient + e, sent + kept, rtol=1e-5, atol=1e-5)
        return told

    found = as_threads(ranks, body)
    for step in range(3):
        for i in range(len(SHAPES)):
            rows = [mine[step][f"p{i}"] for mine in found]
            mean = torch.stack([row[2] for row in rows]).double().mean(0)
            torch.testing.assert_close(rows[0][3].double(), mean, rtol=1e-5, atol=1e-5)


def test_an_observer_changes_nothing() -> None:
    def body(comm: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for observe in (None, lambda _: None):
            mine = Parameters(comm, SHAPES, mixed("mixed"))
            for step in range(3):
                averages = mine.average(drawn(SHAPES, comm.rank, step), None, observe)
            found.append([*averages, *mine.states()])
        return found

    for without, beside in as_threads(3, body):
        assert all(map(torch.equal, without, beside))


@dataclass(frozen=True)
class Whole(PowerSGD):
    """PowerSGD over the whole model."""

    scope = "model"


@pytest.mark.parametrize("coalesce_bytes", [0, 2000, 1 << 18])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_at_once_gives_the_same_bits(ranks: int, coalesce_bytes: int) -> None:
    """Buckets in any order; every second parameter waits for the whole model."""
    inner: list[Aggregator] = [Whole(2), PowerSGD(2), ARTopK(0.1)]
    aggregators = [ErrorFeedback(inner[i % 3]) for i in range(len(SHAPES))]
    of_bucket = [ErrorFeedback(inner[i % 3 or 1]) for i in range(len(SHAPES))]

    def body(comm: Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        found, apart = [], 0
        for chosen in (aggregators, of_bucket):
            mine, averages = Parameters(comm, SHAPES, chosen), []
            for step in range(4):
                scopes = gathered(cuts(step), chosen, coalesce_bytes)
                averages += mine.average(drawn(SHAPES, comm.rank, step), scopes)
                apart += sorted(scopes[-1]) == [0, 3, 6]
            found.append([*averages, *mine.states()])
        return found[0], found[1], apart

    for model, bucket, apart in as_threads(ranks, body):
        assert apart == 4
        assert all(map(torch.equal, model, bucket))


def gathered(
    buckets: list[list[int]], aggregators: Sequence[Aggregator], coalesce_bytes: int
) -> list[list[int]]:
    """The scopes of a pass with these buckets."""
    gather, scopes = Gather(coalesce_bytes), []
    for number, bucket in enumerate(buckets):
        split = Split.of([aggregators[i] for i in bucket])
        nbytes = 4 * sum(math.prod(SHAPES[i]) for i in bucket)
        for due in gather.add(split, nbytes, number == len(buckets) - 1):
            scopes.append([buckets[s.bucket][at] for s in due for at in s.places])
    assert sorted(i for scope in scopes for i in scope) == list(range(len(SHAPES)))
    return scopes


@pytest.mark.parametrize(("case", "ranks", "dtype"), every_pair(WHOLE, [2, 3], DTYPES))
def test_law_8_of_a_whole_model(case: str, ranks: int, dtype: torch.dtype) -> None:
    chosen = mixed(case)

    def body(comm: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for way, coalesce_bytes in enumerate([0, 0, 2000, 1 << 18]):
            mine, averages = Parameters(comm, SHAPES, chosen), []
            for step in range(3):
                scopes = gathered(cuts(10 * way + step), chosen, coalesce_bytes)
                averages += mine.average(drawn(SHAPES, comm.rank, step, dtype), scopes)
            found.append([*averages, *mine.states()])
        return found

    for mine in as_threads(ranks, body):
        assert all(all(map(torch.equal, mine[0], other)) for other in mine[1:])
