"""State that is saved, and loaded by the same or another number of ranks."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import gradwire as gw
from averaging import Parameters, Shape, drawn
from gradwire.aggregators import (
    THC,
    Aggregator,
    ARTopK,
    Compressed,
    Context,
    DeepGradientCompression,
    GlobalTopK,
    LWTopK,
    PowerSGD,
    StateSpec,
    Steps,
    TopKC,
)
from gradwire.codecs import QSGD, TopK
from gradwire.collectives import AllGather, ReduceScatter
from gradwire.engine import Communicator
from gradwire.planner import Plan, Rules, make_plan
from gradwire.transport import Hub
from ranks import as_threads
from rooms.handles import aggregators_section, steps_section
from rooms.state import Saved, StateSection

SHAPES: list[Shape] = [(20, 30), (9,), (7, 5), (33, 17), (2, 3), (8, 3, 3, 3)]


@dataclass(frozen=True)
class Smoothed(Aggregator):
    """Averages, smoothed over steps. The history is sharded by rows, the number of averages is
    replicated, and the distance of the own gradients is per rank."""

    def states(self, shape: Shape) -> Mapping[str, StateSpec]:
        rows, columns = shape[0], math.prod(shape[1:])
        return {
            "memory": StateSpec((rows, columns), kind="sharded"),
            "turned": StateSpec((columns, rows), kind="sharded", dim=1, start="normal"),
            "count": StateSpec((1,), torch.int64, kind="replicated"),
            "drift": StateSpec((rows,), kind="per_rank", start="normal"),
        }

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        lengths = [self._lengths(c) for c in contexts]
        for c in contexts:
            c.state["drift"] += c.gradient.view(c.shape[0], -1).sum(1)
            c.state["count"] += 1
        shards = yield [
            ReduceScatter(c.gradient, lengths=of, of=c)
            for c, of in zip(contexts, lengths, strict=True)
        ]
        for c, shard in zip(contexts, shards, strict=True):
            memory = c.state["memory"]
            memory.mul_(0.5).add_(shard.view(memory.shape))
            c.state["turned"].mul_(0.5).add_(memory.T)
        whole: Sequence[torch.Tensor] = yield [
            AllGather(c.state["turned"].T.contiguous().view(-1), lengths=of, of=c)
            for c, of in zip(contexts, lengths, strict=True)
        ]
        return whole

    def _lengths(self, c: Context) -> tuple[int, ...]:
        declared = self.states(c.shape)["memory"]
        return tuple(math.prod(declared.local(rank, c.world_size)) for rank in range(c.world_size))

    def payload_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return 2 * math.prod(shape) * dtype.itemsize


CASES: dict[str, Aggregator] = {
    "qsgd": Compressed(QSGD(bits=2)),
    "topk": Compressed(TopK(density=0.05)),
    "powersgd": PowerSGD(2),
    "artopk": ARTopK(0.05, scope="layer"),
    "topkc": TopKC(bits=4, chunk=16, scope="layer"),
    "topkc of a model": TopKC(bits=4, chunk=16),
    "thc": THC(chunk=64),
    "artopk auto": ARTopK(0.05, "auto", "layer"),
    "artopk by variance": ARTopK(0.05, "variance", "model"),
    "lwtopk": LWTopK(0.05),
    "globaltopk": GlobalTopK(0.05),
    "dgc": DeepGradientCompression(0.05, warmup=4),
    "dgc without momentum": DeepGradientCompression(0.05, momentum=0, clip=3.0),
    "smoothed": Smoothed(),
}


def plan_of(case: str, world_size: int) -> Plan:
    rules = Rules(CASES[case], include=("*",), feedback=True)
    named = [(f"p{i}", torch.zeros(shape)) for i, shape in enumerate(SHAPES)]
    return make_plan(named, rules, world_size)


class Rank(Saved):
    """One rank of a job, which can be saved and resumed as a handle."""

    plan: Plan = None  # type: ignore[assignment]

    def __init__(self, comm: Communicator, case: str) -> None:
        self.plan = plan_of(case, comm.world_size)
        self.parameters = Parameters(comm, SHAPES, [p.aggregator for p in self.plan.parameters])
        members = {m.name: m for m in self.parameters.members}
        super().__init__(members, 0, comm.rank, comm.world_size, None)  # type: ignore[arg-type]
        self.comm = comm

    def _takes_any_plan(self) -> bool:
        return False

    def _sections(self) -> list[StateSection]:
        seeded = partial(setattr, self, "_seed")
        return [
            steps_section(self._members, lambda: self.plan, self._seed, seeded),
            aggregators_section(self._members),
        ]

    def train(self, first: int, last: int) -> list[torch.Tensor]:
        averages = []
        for step in range(first, last):
            averages += self.parameters.average(drawn(SHAPES, self.comm.rank, step))
        return averages


OWED = ("residual", "owed")


def states_after(case: str, ranks: int, steps: int = 3) -> list[dict[str, Any]]:
    def body(comm: Communicator) -> dict[str, Any]:
        mine = Rank(comm, case)
        mine.train(0, steps)
        return mine.state_dict()

    return as_threads(ranks, body)


def loaded(case: str, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    """What one rank has of these states."""
    transport: Any = Hub(ranks).transport(rank)
    mine = Rank(Communicator(transport), case)
    mine.load_state_dict(states)
    return mine.state_dict()


def mean(states: Sequence[Mapping[str, Any]], name: str, keys: Sequence[str]) -> torch.Tensor:
    """Of the ranks' state under any of the keys."""
    found = [s["aggregators"].get(name, {}).get(k) for s in states for k in keys]
    return sum(t.double() for t in found if t is not None) / len(states)


@pytest.mark.parametrize(
    ("case", "moves"),
    [(c, [(2, 3, 1), (3, 2), (1, 3, 5), (5, 3, 1), (2, 1)][i % 5]) for i, c in enumerate(CASES)],
)
def test_a_state_moves(case: str, moves: tuple[int, ...]) -> None:
    """To the same ranks, where training goes on to the same bits, with a state that is a snapshot,
    in a file or not; and to other numbers of ranks, with all that is owed."""

    def resumes(comm: Communicator) -> dict[str, Any]:
        first = Rank(comm, case)
        first.train(0, 3)
        state = first.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        expected, end = first.train(3, 6), first.state_dict()
        for given in (state, state, torch.load(file)):
            again = Rank(comm, case)
            again.train(0, 1)  # its state is replaced
            again.load_state_dict(given)
            assert all(map(torch.equal, again.train(3, 6), expected))
            assert again.state_dict()["steps"] == end["steps"] != given["steps"]
            for name, kept in again.state_dict()["aggregators"].items():
                last = end["aggregators"][name]
                assert all(torch.equal(kept[key], last[key]) for key in last)
        return state

    before = as_threads(moves[0], resumes)
    for ranks in moves[1:]:

        def body(comm: Communicator) -> tuple[Any, ...]:
            mine = Rank(comm, case)
            mine.load_state_dict(before[::-1])  # noqa: B023
            return mine.state_dict(), mine.train(3, 4), mine.state_dict()["aggregators"]

        after, averages, left = zip(*as_threads(ranks, body), strict=True)
        moved(case, before, after)
        if ranks == 1:  # its average includes the owed residual, and momentum
            assert not any("residual" in kept or "owed" in kept for kept in left[0].values())
            gradients, clip = drawn(SHAPES, 0, 3), 1.0
            if case == "dgc without momentum":
                clip = 3.0 / float(torch.cat([g.view(-1) for g in gradients]).norm())
            for i, (g, average) in enumerate(zip(gradients, averages[0], strict=True)):
                paid = g.double().view(-1) * clip + mean(before, f"p{i}", OWED)
                paid += 0.9 * mean(before, f"p{i}", ["velocity"])
                torch.testing.assert_close(average.double().view(-1), paid, rtol=1e-5, atol=1e-5)
        before = list(after)


def moved(case: str, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> None:
    """Assert that all ranks after a move have together what those before it had."""
    for p in plan_of(case, 2).parameters:
        zeros = torch.zeros(p.numel).double()
        owed = [mean(states, p.name, OWED) + zeros for states in (after, before)]
        torch.testing.assert_close(*owed, rtol=1e-5, atol=1e-5)
        for key, spec in p.inner.states(p.shape).items():
            old, new = (
                [s["aggregators"].get(p.name, {}).get(key) for s in of] for of in (before, after)
            )
            if old[0] is None:  # a single rank has no residual
                assert new[0] is None
            elif spec.kind == "replicated":
                assert all(torch.equal(old[0], t) for t in new)
            elif spec.kind == "sharded":
                assert torch.equal(torch.cat(old, spec.dim), torch.cat(new, spec.dim))
                shapes = [spec.local(rank, len(after)) for rank in range(len(after))]
                assert [tuple(t.shape) for t in new] == shapes
            else:
                kept = mean(after, p.name, (key,)), mean(before, p.name, (key,))
                torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-5)


def test_a_shard_of_another_size_is_refused() -> None:
    states = states_after("smoothed", 3)
    states[1]["aggregators"]["p0"]["memory"] = torch.zeros(3, 30)
    with pytest.raises(gw.ConfigError, match=r"memory of p0 has shape \(3, 30\), not \(7, 30\)"):
        loaded("smoothed", states, 0, 2)


@pytest.mark.parametrize(
    ("saved", "fits"),
    [
        ("QSGD(bits=2, block=128, scale='minmax', rounding='stochastic', metadata='bf16')", True),
        ("QSGD(bits=2, block=128, scale='minmax', rounding='nearest', metadata='fp32')", True),
        ("QSGD(bits=2, block=128, scale='minmax')", True),
        ("QSGD(bits=4, block=128, scale='minmax', rounding='stochastic', metadata='bf16')", False),
        ("QSGD(bits=2, block=64, scale='minmax', rounding='stochastic', metadata='bf16')", False),
        ("Rotated(bits=2, block=128, scale='minmax', rounding='dithered')", False),
    ],
)
def test_how_values_were_rounded_does_not_matter(saved: str, fits: bool) -> None:
    """A state from before the default became dithered loads: a residual is what was not sent."""
    states = states_after("qsgd", 2)
    for state in states:
        state["parameters"] = {n: {**f, "codec": saved} for n, f in state["parameters"].items()}
    if fits:
        for name, kept in loaded("qsgd", states, 1, 2)["aggregators"].items():
            assert torch.equal(kept["residual"], states[1]["aggregators"][name]["residual"])
        assert loaded("qsgd", states, 0, 3)["aggregators"]["p0"]
    else:
        with pytest.raises(gw.ConfigError, match="p0 has codec"):
            loaded("qsgd", states, 1, 2)
