"""An attached parameter: its aggregator, and its state from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.aggregators.protocol import Aggregator, Context, StateSpec
from gradwire.collectives import Request
from gradwire.lang import rng

OWED = "owed"  # a former residual, to be added to the next gradient
_START = 1 << 63  # modulus of the seeds of initial states; steps use other seeds


@dataclass(eq=False)
class Attached:
    """One parameter of an attached module.

    Attributes:
        name, shape: of the parameter.
        aggregator: computes its average.
        keys: from `rng.parameter_keys`.
        rotation: see gradwire.partition.
        step: number of averages started so far; enters the random numbers.
        state: its aggregator's state, by name; made in the first step.
        metrics: what its aggregator measured last, by name; see `Context.metrics`.
        may_be_unused: see `Context.may_be_unused`.
    """

    name: str
    shape: tuple[int, ...]
    aggregator: Aggregator
    keys: rng.Keys
    rotation: int = 0
    step: int = 0
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    may_be_unused: bool = False
    _device: torch.device | None = None  # of its state

    def context(
        self, reduction: Request, device: torch.device, rank: int, world_size: int
    ) -> Context:
        """The context of the step that begins, for a gradient on `device`; a residual of
        `reduction` is a part of the parameter's."""
        state = self.state_on(device, rank, world_size)
        if reduction.residual is not None:
            state = state | {RESIDUAL: reduction.residual}
        of = self.name, self.shape, reduction.target, rank, world_size
        return Context(
            *of, self.step, state, self.keys, self, may_be_unused=self.may_be_unused,
            metrics=self.metrics, reduction=reduction,
        )  # fmt: skip

    def state_on(self, device: torch.device, rank: int, world_size: int) -> dict[str, torch.Tensor]:
        """All state that the aggregator declares, made or moved where it is not on `device`."""
        if self._device == device:
            return self.state
        for name, declared in self.aggregator.states(self.shape).items():
            if name in self.state:
                self.state[name] = self.state[name].to(device)
            else:
                self.state[name] = self._fresh(name, declared, rank, world_size).to(device)
        self._device = device
        return self.state

    def _fresh(self, name: str, declared: StateSpec, rank: int, world_size: int) -> torch.Tensor:
        if declared.start == "zeros":
            return torch.zeros(declared.local(rank, world_size), dtype=declared.dtype)
        seed = rng.parameter_key(self.keys.shared, name, -1) % _START
        generator = torch.Generator().manual_seed(seed)
        made = torch.randn(declared.shape, generator=generator, dtype=torch.float32)
        if declared.kind == "sharded":
            length = declared.local(0, world_size)[declared.dim]
            parts = made.split(max(length, 1), declared.dim)
            made = parts[rank] if rank < len(parts) else made.narrow(declared.dim, 0, 0)
        return made.to(declared.dtype).contiguous()

    def adopt(self, aggregator: Aggregator) -> None:
        """Replace the aggregator. State that both declare equally is kept. If the new one has no
        residual, the old residual is added to the next gradient."""
        if aggregator == self.aggregator:
            self.aggregator = aggregator  # equal aggregators of a plan are one object
            return
        before, after = self.aggregator.states(self.shape), aggregator.states(self.shape)
        kept = {
            name: tensor
            for name, tensor in self.state.items()
            if name == OWED or before.get(name) == after.get(name)
        }
        residual = self.state.get(RESIDUAL)
        if residual is not None and RESIDUAL not in kept:
            kept[OWED] = residual + kept[OWED] if OWED in kept else residual
        self.aggregator = aggregator
        self.metrics = {}  # the old one's
        self.keep(kept)

    def at_first(self, aggregator: Aggregator, step: int) -> Attached:
        """The same parameter with an aggregator whose state is initial, at a step."""
        return Attached(self.name, self.shape, aggregator, self.keys, self.rotation, step)

    def add_owed(self, *parts: torch.Tensor, weights: Sequence[float] = ()) -> None:
        """Add the owed residual, if any, to a finite gradient, which consists of `parts`; not to
        one that may be of an unused parameter.

        Args:
            weights: of the owed values of each part; 1 unless given.
        """
        if OWED not in self.state:
            return
        if self.may_be_unused and not any(part.any() for part in parts):
            return
        if all(part.isfinite().all() for part in parts):
            owed = self.state.pop(OWED).split([part.numel() for part in parts])
            for part, share, weight in zip(parts, owed, weights or [1.0] * len(parts), strict=True):
                part += weight * share.to(part.device)

    def keep(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set the state, loaded or carried over."""
        self.state = dict(states)
        self._device = None
