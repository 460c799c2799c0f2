"""Aggregators against the algorithms of their papers in float64, step by step on random data: the
averages, what every rank keeps, and what is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_dct import matrix, tiles_of

from averaging import Shape, averaged, drawn, fed
from gradwire.aggregators import (
    THC,
    Aggregator,
    ARTopK,
    DeepGradientCompression,
    GlobalTopK,
    LWTopK,
    PowerSGD,
    Radial,
    SparseLoCo,
    TopKC,
    registry,
)
from gradwire.aggregators.local import run_local
from gradwire.aggregators.local_codecs import Turned
from gradwire.lang import rng
from gradwire.lang.trace import stream
from products import exhaustive

Tensors = list[torch.Tensor]
Every = Sequence[Tensors]  # of each rank, by parameter

SHAPES: list[Shape] = [(20, 30), (1,), (7,), (3, 4, 5), (1000,), (20, 30), (0,), (), (64, 8)]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Reference:
    """An algorithm in float64, of all ranks at once.

    Attributes:
        states: that it reads or foretells, beside residuals.
        whole: whether gradients are small whole numbers: sums are exact, and many values are equal.
        close: how far averages may be off, in units of the dtype's precision, and at least; 0: they
            are the expected ones, rounded once.
        same_places: whether averages are zero where those expected are.
    """

    shapes = SHAPES
    states: tuple[str, ...] = ()
    whole = False
    close = 1.0, 1e-6
    same_places = False

    def __init__(self, made: Any, ranks: int) -> None:
        self.made, self.ranks = made, ranks

    def fed(self, gradients: Every, before: Mapping[str, Every]) -> Every:
        """What goes into the averages. It is added in fp32, as by the aggregator: what is equal
        there may differ in float64."""
        return [
            [(g.float().view(-1) + e).double() for g, e in zip(mine, kept, strict=True)]
            for mine, kept in zip(gradients, before["residual"], strict=True)
        ]

    def sent(self, step: int, fed: Every, before: Mapping[str, Every]) -> Every:
        raise NotImplementedError

    def averages(self, sent: Every) -> Tensors:
        return [torch.stack(of).mean(0) for of in zip(*sent, strict=True)]

    def after(self, sent: Every) -> dict[str, Every]:
        """Its states after the step."""
        return {}


def largest(values: torch.Tensor, density: float) -> torch.Tensor:
    """1 at the largest values, of equal ones the first; 0 elsewhere."""
    k = min(max(1, math.floor(density * len(values))), len(values))
    at = values.abs().sort(descending=True, stable=True).indices[:k]
    return torch.zeros_like(values).index_fill_(0, at, 1.0)


def masked(fed: Every, scope: str, choose: Callable[[Tensors, list[int]], Tensors]) -> Every:
    """What ranks send: their values where `choose`, given those of a selection and its parameters,
    has 1 for the rank."""
    every, sent = list(range(len(fed[0]))), [list(mine) for mine in fed]
    for group in [[at] for at in every] if scope == "layer" else [every]:
        values = [torch.cat([mine[at] for at in group]) for mine in fed]
        for mine, of, mask in zip(sent, values, choose(values, group), strict=True):
            parts = (of * mask).split([len(mine[at]) for at in group])
            for at, part in zip(group, parts, strict=True):
                mine[at] = part
    return sent


class OfARTopK(Reference):
    """STAR-Topk (Alg. 1), with our third choice of a leader; rank 1's gradients are larger."""

    whole = True

    def __init__(self, made: ARTopK, ranks: int) -> None:
        super().__init__(made, ranks)
        self.waited = [[0] * ranks for _ in SHAPES]  # of a selection, by its first parameter

    def sent(self, step: int, fed: Every, before: Mapping[str, Every]) -> Every:
        def choose(values: Tensors, group: list[int]) -> Tensors:
            masks = [largest(one, self.made.density) for one in values]
            norms = [float((v * m).square().sum()) for v, m in zip(values, masks, strict=True)]
            return [masks[self.leader(step, norms, group[0])]] * self.ranks

        return masked(fed, self.made.scope, choose)

    def leader(self, step: int, norms: list[float], at: int) -> int:
        ranks = range(self.ranks)
        if self.made.leader == "round_robin":
            return step % self.ranks
        waited = self.waited[at] if self.made.leader == "auto" else [0] * self.ranks
        best = max(ranks, key=lambda r: (norms[r] * (1 + waited[r]), -r))
        self.waited[at] = [0 if r == best else waited[r] + 1 for r in ranks]
        return best


class OfDeep(Reference):
    """Lin et al.'s Alg. 1 to 4. It has no sampled threshold: at these densities the sample of a
    small tensor gives a low one."""

    shapes: list[Shape] = [(60, 50), (7,), (11, 20, 3), (0,), ()]  # noqa: RUF012
    states = ("velocity",)
    close = 1.0, 1e-5

    def fed(self, gradients: Every, before: Mapping[str, Every]) -> Every:
        fed, self.u = [], []
        every = zip(gradients, before["residual"], before["velocity"], strict=True)
        for mine, residuals, velocities in every:
            given = [g.double().view(-1) for g in mine]
            if self.made.clip is not None:
                most = self.made.clip * math.sqrt(self.ranks) / torch.cat(given).norm()
                given = [g * min(1.0, most) for g in given]
            pairs = zip(velocities, given, strict=True)
            self.u.append([self.made.momentum * v.double() + g for v, g in pairs])
            fed.append([r.double() + u for r, u in zip(residuals, self.u[-1], strict=True)])
        return fed

    def sent(self, step: int, fed: Every, before: Mapping[str, Every]) -> Every:
        density = self.made.at(step).density
        return masked(fed, "layer", lambda values, _: [largest(one, density) for one in values])

    def after(self, sent: Every) -> dict[str, Every]:
        pairs = [zip(u, s, strict=True) for u, s in zip(self.u, sent, strict=True)]
        found = [[u * (s == 0) for u, s in mine] for mine in pairs]
        return {"velocity": found} if self.made.momentum else {}


class OfLWTopK(Reference):
    """Exact top-k of each rank."""

    whole = True

    def sent(self, step: int, fed: Every, before: Mapping[str, Every]) -> Every:
        of = self.made.scope, lambda values, _: [largest(v, self.made.density) for v in values]
        return masked(fed, *of)


class OfGlobalTopK(Reference):
    """The k largest of the sum, in fp32, which no rank's largest need be among."""

    whole = True
    close = 0.0, 0.0
    own = 0  # of the largest values of a rank, those that are not among them

    def sent(self, step: int, fed: Every, before: Mapping[str, Every]) -> Every:
        def choose(values: Tensors, _: list[int]) -> Tensors:
            mean = torch.stack([one.float() for one in values]).sum(0) * (1 / self.ranks)
            places = largest(mean, self.made.density)
            self.expected = (mean * places).split([len(one) for one in fed[0]])
            self.own += int((largest(values[0], self.made.density) > places).sum())
            return [places] * self.ranks

        return masked(fed, "model", choose)

    def averages(self, sent: Every) -> Tensors:
        assert self.own or self.made.density == 1
        return [one.double() for one in self.expected]


class OfTopKC(Reference):
    """UTIL 3.1.2 with fp32 values; only squared norms are rounded, to bf16."""

    close = 1.0, 3e-6
    same_places = True

    def sent(self, step: int, fed: Every, before: Mapping[str, Every]) -> Every:
        size, bits = self.made.chunk, self.made.bits

        def norm(part: torch.Tensor) -> float:
            return float(part.square().sum().bfloat16())

        def choose(values: Tensors, group: list[int]) -> Tensors:
            lengths = [len(fed[0][at]) for at in group]
            cuts = [min(size, n - at) for n in lengths for at in range(0, n, size)]
            chunks = zip(*(one.split(cuts) for one in values), strict=True)
            sums = [sum(map(norm, chunk)) / self.ranks for chunk in chunks]
            order = torch.tensor(sums).bfloat16().sort(descending=True, stable=True).indices
            count = max(1, int((bits * sum(lengths) / 8 - 2 * len(cuts)) // (4 * size)))
            chosen = torch.zeros(len(cuts)).index_fill_(0, order[:count], 1.0)
            return [chosen.repeat_interleave(torch.tensor(cuts, dtype=torch.int64))] * self.ranks

        return masked(fed, self.made.scope, choose)


class OfPowerSGD(Reference):
    """One step from the Q of the step before: rounding errors grow over many."""

    shapes: list[Shape] = [  # noqa: RUF012
        *((12, 20), (33, 17), (12, 20), (8, 3, 3, 3), (64, 7)), *((50,), (2, 3), (), (0,), (5, 0))
    ]  # fmt: skip
    states = ("basis",)
    close = 2.0, 1e-5

    def sent(self, step: int, fed: Every, before: Mapping[str, Every]) -> Every:
        sent, rank = [list(mine) for mine in fed], self.made.rank
        for at, shape in enumerate(self.shapes):
            rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
            if len(shape) > 1 and rank * (rows + columns) < rows * columns:
                basis = before["basis"][0][at].view(-1, rank).double()
                matrices = [mine[at].view(rows, -1) for mine in fed]
                p = torch.linalg.qr(sum(m @ basis for m in matrices)).Q
                for mine, m in zip(sent, matrices, strict=True):
                    mine[at] = (p @ (p.T @ m)).view(-1)
        return sent


class OfTHC(Reference):
    """UTIL 3.2: what each rank sends if nothing saturates; sums may, and their share is told."""

    states = ("saturated_share",)
    close = 2.0, 1e-5

    def sent(self, step: int, fed: Every, before: Mapping[str, Every]) -> Every:
        self.found: Tensors = []
        self.shares: Tensors = []
        every = [self.one(c, step, list(of)) for c, of in enumerate(zip(*fed, strict=True))]
        return [list(mine) for mine in zip(*every, strict=True)]

    def one(self, c: int, step: int, fed: Tensors) -> Tensors:
        """Of parameter c."""
        if not len(fed[0]):
            self.found.append(fed[0])
            self.shares.append(torch.zeros(0))
            return fed
        made, numel, chunk, most = self.made, len(fed[0]), self.made.chunk, self.made.most
        ones, signs = torch.ones(numel), torch.empty(numel)  # all ranks draw the same ones
        key = step_key(rng.parameter_keys(0, f"p{c}", 0).shared, step)
        run_local(Turned(1), "encode", [ones], [signs], key)
        turn = rotation(numel, made.rotation, chunk, signs)
        rotated = [turn @ f for f in fed]
        maxima = [[part.abs().max() for part in r.split(chunk)] for r in rotated]
        ranges = torch.tensor(maxima, dtype=torch.float64).amax(0)
        up = ranges.float().bfloat16()
        up = torch.where(up.double() < ranges, up.view(torch.int16) + 1, up.view(torch.int16))
        size = up.view(torch.bfloat16).double().repeat_interleave(chunk)[:numel]
        numbers = []
        for rank, r in enumerate(rotated):
            key = step_key(rng.parameter_keys(0, f"p{c}", rank).own, step)
            offset = rng.uniform(int(key[0]), stream("rounding").number, torch.arange(numel))
            numbers.append((r * most / size + offset.double()).floor().clamp(-most, most))
        end = 2 ** (made.bits - 1) - 1
        total = sum(numbers).clamp(-end, end)  # type: ignore[union-attr]
        self.found.append(turn.T @ (total * size / most) / len(fed))
        share = (total.abs() == end).double().mean() * made.saturates(self.ranks)
        self.shares.append(share.view(1))
        return [turn.T @ (n * size / most) for n in numbers]

    def averages(self, sent: Every) -> Tensors:
        return self.found

    def after(self, sent: Every) -> dict[str, Every]:
        return {"saturated_share": [self.shares] * self.ranks}


def step_key(key: int, step: int) -> np.ndarray:
    return rng.step_keys(np.array([key], np.uint64), step, 1 << 32)


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
    if how == "none":
        return torch.eye(numel, dtype=torch.float64)
    whole = numel // chunk
    lengths = [n * chunk for n in powers(whole)] if how == "full" else [chunk] * whole
    blocks = [hadamard(n) for n in lengths + powers(numel % chunk)]
    return torch.block_diag(*blocks) * signs.double()


class OfSparseLoCo(Reference):
    """2508.15706: the largest of each chunk, in bins around the mean of all that are kept, or in
    bf16; of coefficients (DeMo, 2411.19870), too. What is sent, and where, are chunks."""

    # Not of one value: its coefficients are equal in pairs, of which either may be sent.
    shapes: list[Shape] = [  # noqa: RUF012
        *((20, 30), (2,), (7,), (3, 4, 5), (1000,), (20, 30), (0,), (64, 8)),
    ]
    close = 2.0, 3e-6

    def sent(self, step: int, fed: Every, before: Mapping[str, Every]) -> Every:
        self.places: list[Tensors] = []
        found = []
        for mine in fed:
            pairs = [self._of(*one) for one in zip(mine, self.shapes, strict=True)]
            found.append([rows for rows, _ in pairs])
            self.places.append([at for _, at in pairs])
        self.rows = found
        return [
            [self._values(*one) for one in zip(mine, self.shapes, strict=True)] for mine in found
        ]

    def _of(self, values: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        made, numel = self.made, len(values)
        if not numel:
            return values, values
        if made.transform == "dct":
            m = matrix(math.isqrt(made.chunk))
            rows = (m @ tiles_of(values, shape, len(m)) @ m.T).flatten(1)
        else:
            rows = torch.nn.functional.pad(values, (0, -numel % made.chunk)).view(-1, made.chunk)
        at = rows.abs().topk(made.keep, 1).indices
        kept, many = rows.gather(1, at), 2**made.bits
        coded = torch.zeros_like(kept)
        if made.bits == 16:
            coded = kept.bfloat16().double()
        else:
            low = kept.mean() - 3 * kept.std(correction=0)
            width = 6 * kept.std(correction=0) / many
            bins = ((kept - low) / width).floor().clamp(0, many - 1)
            for one in bins.unique():
                coded[bins == one] = kept[bins == one].mean()
        zeros = torch.zeros_like(rows)
        return zeros.scatter(1, at, coded), zeros.scatter(1, at, 1.0)

    def _values(self, rows: torch.Tensor, shape: Shape) -> torch.Tensor:
        numel, side = math.prod(shape), math.isqrt(self.made.chunk)
        if self.made.transform == "none" or not numel:
            return rows.view(-1)[:numel]
        m = matrix(side)
        tiles = m.T @ rows.view(-1, side, side) @ m
        if len(shape) == 2 and shape[0] % side == shape[1] % side == 0:
            tiles = torch.cat([torch.cat([*row], 1) for row in tiles.split(shape[1] // side)])
        return tiles.reshape(-1)[:numel]

    def averages(self, sent: Every) -> Tensors:
        found = []
        of_all = zip(zip(*self.rows, strict=True), zip(*self.places, strict=True), strict=True)
        for shape, (of, at) in zip(self.shapes, of_all, strict=True):
            norms = torch.stack([self._norm(one) for one in of])
            most = norms.median() if self.made.clip else norms.max()
            total = sum(v * min(1.0, float(most / n)) for v, n in zip(of, norms, strict=True))
            many = sum(at).clamp(min=1) if self.made.mean == "senders" else self.ranks
            found.append(self._values(total / many, shape))
        return found

    def _norm(self, values: torch.Tensor) -> torch.Tensor:
        return values.norm().clamp(min=1e-30)


class OfRadial(Reference):
    """2604.21428 with equal weights: the mean length, in the direction of the mean direction."""

    close = 1.0, 2e-6

    def sent(self, step: int, fed: Every, before: Mapping[str, Every]) -> Every:
        return [[values.bfloat16().double() for values in mine] for mine in fed]

    def averages(self, sent: Every) -> Tensors:
        found = []
        for of in zip(*sent, strict=True):
            norms = [float(one.norm()) for one in of]
            total = sum((one / n for one, n in zip(of, norms, strict=True) if n), of[0] * 0)
            found.append(total / total.norm().clamp(min=1e-30) * sum(norms) / len(norms))
        return found


REFERENCES: dict[type[Aggregator], type[Reference]] = {
    ARTopK: OfARTopK, DeepGradientCompression: OfDeep, LWTopK: OfLWTopK, GlobalTopK: OfGlobalTopK,
    TopKC: OfTopKC, PowerSGD: OfPowerSGD, SparseLoCo: OfSparseLoCo, THC: OfTHC,
    Radial: OfRadial,
}  # fmt: skip
CASES = [
    ("artopk:density=0.1:leader=round_robin:scope=layer:values=fp32", 2, FP32),
    ("artopk:density=0.01:leader=variance:scope=layer:values=fp32", 3, FP16),
    ("artopk:density=0.1:leader=auto:scope=layer:values=fp32", 5, BF16),
    ("artopk:density=0.1:leader=auto:scope=model:values=fp32", 3, FP32),
    ("artopk:density=0.1:leader=round_robin:scope=bucket:values=fp32", 3, FP16),
    ("dgc:density=0.1:momentum=0.9:values=fp32", 2, FP32),
    ("dgc:density=0.02:momentum=0:clip=4.0:warmup=4:values=fp32", 3, FP32),
    ("dgc:density=0.05:momentum=0.5:clip=4.0:values=fp32", 5, FP16),
    ("lwtopk:density=0.1", 2, FP32),
    ("lwtopk:density=0.1:scope=model", 2, FP32),
    ("lwtopk:density=0.01:values=fp32", 3, FP16),
    ("lwtopk:density=1", 5, BF16),
    ("globaltopk:density=0.001", 2, BF16),
    ("globaltopk:density=1", 3, FP32),
    ("globaltopk:density=0.1", 5, FP16),
    ("topkc:bits=4:chunk=16:values=fp32:scope=layer", 2, FP32),
    ("topkc:bits=9:chunk=8:values=fp32:scope=layer", 3, FP16),
    ("topkc:bits=32:chunk=4:values=fp32:scope=model", 3, BF16),
    ("sparseloco:keep=5:chunk=64", 3, FP32),
    ("sparseloco:keep=3:chunk=128:bits=3:mean=ranks", 2, BF16),
    ("sparseloco:keep=16:chunk=32:bits=4:clip=false", 5, FP16),
    ("sparseloco:keep=3:chunk=16:transform=dct", 3, FP32),
    ("sparseloco:keep=5:chunk=64:bits=16:clip=false:transform=dct", 2, FP16),
    ("radial", 3, FP32),
    ("radial", 2, BF16),
    ("powersgd:rank=1", 2, FP32),
    ("powersgd:rank=2:orthogonal=qr", 3, FP16),
    ("powersgd:rank=4", 5, BF16),
    ("powersgd:rank=2", 8, FP32),
    ("powersgd:rank=4:orthogonal=qr", 3, FP32),
    ("powersgd:rank=1:orthogonal=qr", 2, BF16),
    ("powersgd:rank=1", 5, FP16),
    ("thc:bits=4:code=4:rotation=partial:chunk=16", 2, FP32),
    ("thc:bits=8:code=4:rotation=full:chunk=64", 3, FP16),
    ("thc:bits=6:code=3:rotation=none:chunk=32", 5, BF16),
    ("thc:bits=8:code=4:rotation=partial:chunk=32", 2, FP32),
    *exhaustive(
        ("artopk:density=0.01:leader=round_robin:scope=model:values=fp32", 8, BF16),
        ("artopk:density=1:leader=auto:scope=bucket:values=fp32", 2, FP16),
        ("artopk:density=0.01:leader=variance:scope=bucket:values=fp32", 5, FP32),
        ("artopk:density=1:leader=variance:scope=model:values=fp32", 2, BF16),
        ("dgc:density=0.02:momentum=0.9:warmup=4:values=fp32", 8, FP16),
        ("dgc:density=0.05:momentum=0:warmup=4:values=fp32", 2, FP16),
        ("dgc:density=0.1:momentum=0.9:clip=4.0:warmup=4:values=fp32", 3, FP32),
        ("globaltopk:density=0.01", 8, FP32),
        ("topkc:bits=2:chunk=64:values=fp32:scope=layer", 5, BF16),
        ("topkc:bits=4:chunk=16:values=fp32:scope=model", 8, BF16),
        ("topkc:bits=32:chunk=4:values=fp32:scope=model", 3, FP32),
        ("topkc:bits=9:chunk=8:values=fp32:scope=model", 2, FP16),
        ("thc:bits=4:code=4:rotation=full:chunk=16", 8, FP32),
        ("thc:bits=6:code=3:rotation=partial:chunk=32", 3, FP16),
        ("thc:bits=8:code=4:rotation=none:chunk=64", 2, FP32),
        ("thc:bits=4:code=4:rotation=full:chunk=16", 5, BF16),
        ("thc:bits=8:code=4:rotation=full:chunk=32", 5, FP32),
    ),
]


@pytest.mark.parametrize(("name", "ranks", "dtype"), CASES)
def test_it_is_the_algorithm(name: str, ranks: int, dtype: torch.dtype) -> None:
    inner = registry.get(name)
    kind = REFERENCES[type(inner)]
    reference, made = kind(inner, ranks), fed(inner)
    if isinstance(inner, THC) and (inner.bits < 8 or dtype != FP32):
        made = inner  # sums may saturate: the laws test what is kept of them

    def gradients(rank: int, step: int) -> Tensors:
        given = drawn(kind.shapes, rank, step)
        size = 2 * (1 + (rank == 1)) if kind is OfARTopK else 3
        return [((size * g).round() if kind.whole else g).to(dtype) for g in given]

    data = [[gradients(rank, step) for rank in range(ranks)] for step in range(6)]
    found = averaged(kind.shapes, made, data, *kind.states)
    # What rounding of an average loses is kept, but by kernels that average bf16.
    narrow = dtype == FP16 or (dtype == BF16 and kind is not OfLWTopK)
    exact = kind.whole and not narrow
    times, least = kind.close
    eps = max(times * torch.finfo(dtype).eps, least)
    before = {
        name: [[torch.zeros(math.prod(shape)) for shape in kind.shapes]] * ranks
        for name in ("residual", *kind.states)
    }
    for step in range(6):
        now = {name: [mine[step][1 + i] for mine in found] for i, name in enumerate(before)}
        if step == 0 and kind is OfPowerSGD:  # whose first basis is drawn
            before = now
            continue
        given = reference.fed(data[step], before)
        sent = reference.sent(step, given, before)
        means = reference.averages(sent)
        for at, (average, mean) in enumerate(zip(found[0][step][0], means, strict=True)):
            where = f"step {step}, parameter {at}"
            assert average.dtype == dtype, where
            average = average.view(-1).double()
            if kind.same_places or (exact and kind is OfARTopK):
                assert torch.equal(average != 0, mean != 0), f"{where}: other places"
            near(average, mean if eps else mean.to(dtype).double(), eps, where)
            for rank in range(ranks) if "residual" in made.states((1,)) else ():
                after, left = now["residual"][rank][at].double(), given[rank][at] - sent[rank][at]
                lost = (mean - average) * (narrow or kind is OfPowerSGD)
                near(after, left + lost, 0 if exact else 1e-5, where)
                assert narrow or left.any() or not after.any(), f"{where}: it is sent whole"
        for name, every in reference.after(sent).items():
            for mine, right in zip(now[name], every, strict=True):
                for one, other in zip(mine, right, strict=True):
                    near(one.double(), other.double(), 1e-5, f"step {step}: {name}")
        before = now


def near(found: torch.Tensor, expected: torch.Tensor, eps: float, where: str) -> None:
    """Equal up to a share of the largest value."""
    assert found.shape == expected.shape, where
    if found.numel():
        off = float((found - expected).abs().max())
        assert off <= eps * max(1.0, float(expected.abs().max())), f"{where}: {off} off"
