"""Runs aggregators on ranks that are threads: parameters with their state, and scopes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from gradwire import Options
from gradwire.aggregators import Aggregator, Attached, ErrorFeedback, Observation, Rounds
from gradwire.collectives import AllReduce
from gradwire.engine import Communicator, Outcome, Owner
from gradwire.lang import rng
from gradwire.partition import rotation
from ranks import as_threads

Shape = tuple[int, ...]


def started(
    owner: Owner,
    members: Sequence[Attached],
    gradients: Sequence[torch.Tensor],
    options: Options = Options(),  # noqa: B008
    observe: Callable[[Observation], None] | None = None,
) -> Future[list[Outcome]]:
    """Start one scope, which replaces the gradients by their averages."""
    ended: Future[list[Outcome]] = Future()

    def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
        ended.set_result(outcomes) if error is None else ended.set_exception(error)

    before = [gradient.clone() for gradient in gradients]
    for member, gradient in zip(members, gradients, strict=True):
        member.add_owed(gradient)
    Rounds(owner, members, [*map(AllReduce, gradients)], options, done, observe, before).start()
    return ended


def fed(made: Aggregator) -> Aggregator:
    """With error feedback, its own or another."""
    return made if made.own_feedback else ErrorFeedback(made)


class Parameters:
    """The parameters of one rank, without a module.

    Args:
        shapes: of parameters p0, p1, ...
        aggregators: one per parameter, or one for all.

    Attributes:
        outcomes: per scope so far, the outcomes of its collectives.
    """

    def __init__(
        self,
        comm: Communicator,
        shapes: Sequence[Shape],
        aggregators: Aggregator | Sequence[Aggregator],
        seed: int = 0,
        algorithm: str = "sra",
    ) -> None:
        if isinstance(aggregators, Aggregator):
            aggregators = [aggregators] * len(shapes)
        self.members = [
            Attached(
                f"p{i}", shape, aggregator, rng.parameter_keys(seed, f"p{i}", comm.rank),
                rotation(i, comm.world_size),
            )
            for i, (shape, aggregator) in enumerate(zip(shapes, aggregators, strict=True))
        ]  # fmt: skip
        self.owner: Owner = comm.owner("a module")
        self.options = Options(algorithm=algorithm)
        self.outcomes: list[list[Outcome]] = []

    def average(
        self,
        gradients: Sequence[torch.Tensor],
        scopes: Iterable[Sequence[int]] | None = None,
        observe: Callable[[Observation], None] | None = None,
    ) -> list[torch.Tensor]:
        """One step: the averages of these gradients, which are not changed.

        Args:
            scopes: the parameters of each, in order; None: one scope with all.
        """
        averages = list(gradients)
        for places in [range(len(averages))] if scopes is None else scopes:
            # In one buffer, as in DDP.
            bucket = torch.cat([gradients[i].detach().reshape(-1) for i in places])
            flat = list(bucket.split([gradients[i].numel() for i in places]))
            members = [self.members[i] for i in places]
            running = started(self.owner, members, flat, self.options, observe)
            self.outcomes.append(running.result(30))
            for i, average in zip(places, flat, strict=True):
                averages[i] = average.view(gradients[i].shape)
        return averages

    def kept(self) -> list[dict[str, torch.Tensor]]:
        """All states of each parameter."""
        return [{key: t.clone() for key, t in m.state.items()} for m in self.members]

    def states(self, name: str = "residual") -> list[torch.Tensor]:
        """A state of each parameter, or what is told of it; zeros before the first step."""
        zeros = [torch.zeros(math.prod(m.shape)) for m in self.members]
        found = [
            {name: z, **m.metrics, **m.state} for m, z in zip(self.members, zeros, strict=True)
        ]
        return [each[name].clone().reshape(-1) for each in found]


def drawn(
    shapes: Sequence[Shape], rank: int, step: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Gradients of a rank in a step."""
    made = torch.Generator().manual_seed(1 + 1000 * step + rank)
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


def averaged(
    shapes: Sequence[Shape],
    aggregators: Aggregator | Sequence[Aggregator],
    data: Sequence[Sequence[Sequence[torch.Tensor]]],
    *names: str,
) -> list[list[list[Any]]]:
    """Steps with the gradients data[step][rank][parameter].

    Returns:
        found[rank][step]: the averages, which all ranks have alike; residuals; further states.
    """

    def body(comm: Communicator) -> list[list[Any]]:
        mine, found = Parameters(comm, shapes, aggregators), []
        for given in data:
            averages = mine.average(given[comm.rank])
            found.append([averages, *(mine.states(name) for name in ("residual", *names))])
        return found

    found = as_threads(len(data[0]), body)
    for mine in found:
        for step, (averages, *_) in enumerate(mine):
            assert all(map(torch.equal, averages, found[0][step][0])), f"step {step}"
    return found


def sent_bytes(
    ranks: int,
    shapes: Sequence[Shape],
    aggregators: Aggregator | Sequence[Aggregator],
    steps: int = 1,
) -> list[list[int]]:
    """The bytes that all ranks send, by step and round."""

    def body(comm: Communicator) -> list[list[int]]:
        mine = Parameters(comm, shapes, aggregators)
        for step in range(steps):
            mine.average(drawn(shapes, comm.rank, step))
        return [[outcome.wire_bytes for outcome in outcomes] for outcomes in mine.outcomes]

    found = as_threads(ranks, body)
    return [[sum(sent) for sent in zip(*of, strict=True)] for of in zip(*found, strict=True)]
