"""Runs aggregators on ranks that are threads: parameters with their state, and scopes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from gradwire import Options
from gradwire.aggregators import Aggregator, Attached, Observation, Rounds
from gradwire.engine import Communicator, Outcome, Owner
from gradwire.lang import rng
from gradwire.partition import rotation

Shape = tuple[int, ...]


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
            self._run([self.members[i] for i in places], flat, observe)
            for i, average in zip(places, flat, strict=True):
                averages[i] = average.view(gradients[i].shape)
        return averages

    def _run(
        self,
        members: Sequence[Attached],
        gradients: Sequence[torch.Tensor],
        observe: Callable[[Observation], None] | None,
    ) -> None:
        ended = threading.Event()
        errors: list[BaseException] = []

        def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
            self.outcomes.append(outcomes)
            if error is not None:
                errors.append(error)
            ended.set()

        Rounds(self.owner, members, gradients, self.options, done, observe).start()
        assert ended.wait(30), "hangs"
        if errors:
            raise errors[0]

    def bases(self) -> list[torch.Tensor | None]:
        """PowerSGD's bases; None for parameters that it does not compress."""
        kept = [m.state.get("basis") for m in self.members]
        return [None if basis is None else basis.clone() for basis in kept]

    def states(self, name: str = "residual") -> list[torch.Tensor]:
        """A state of each parameter; zeros before the first step."""
        return [
            m.state.get(name, torch.zeros(math.prod(m.shape))).clone().reshape(-1)
            for m in self.members
        ]


def drawn(
    shapes: Sequence[Shape], rank: int, step: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Gradients of a rank in a step."""
    made = torch.Generator().manual_seed(1 + 1000 * step + rank)
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]
