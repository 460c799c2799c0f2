"""The aggregator interface: a coroutine that yields typed collectives and returns averages.

The contract is one method. It takes all of the aggregator's parameters of a scope, yields the
collectives it needs, and gets their results. Requests that all aggregators of a scope yield in the
same round share messages. So an aggregator does not deal with fusion, threads or ranks:

    @dataclass(frozen=True)
    class Plain(Aggregator):
        def aggregate(self, contexts):
            return (yield [AllReduce(c.gradient, of=c) for c in contexts])

An aggregator is a frozen dataclass whose fields are its options, like a codec. Tensors that persist
across steps are *state*: named tensors per parameter, declared by `states`. The engine keeps,
saves, loads and reshards them for another number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from gradwire.collectives import Request
from gradwire.errors import ConfigError, use_one_of
from gradwire.lang import Codec, rng

KINDS = ("per_rank", "replicated", "sharded")


@dataclass(frozen=True)
class StateSpec:
    """One tensor of state of one parameter.

    Attributes:
        shape, dtype: of the tensor; of a sharded one, of all ranks' shards together.
        kind: "per_rank": each rank has its own tensor, and their mean is preserved when the number
            of ranks changes, as for residuals; "replicated": equal on all ranks; "sharded": rank n
            has the n-th part along `dim`, as torch.chunk cuts it.
        dim: see "sharded".
        start: initial values: "zeros", or "normal" for standard normal numbers, equal on all ranks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    kind: str = "per_rank"
    dim: int = 0
    start: str = "zeros"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a state's kind is {self.kind!r}: {use_one_of(self.kind, KINDS)}")
        if self.start not in ("zeros", "normal"):
            raise ConfigError(f"a state's start is {self.start!r}: use 'zeros' or 'normal'")
        if self.kind == "per_rank" and not self.dtype.is_floating_point:
            raise ConfigError(
                f"a per-rank state of {self.dtype} has no mean to preserve when the number of "
                "ranks changes: use a floating dtype, or kind='replicated'"
            )
        if self.kind == "sharded" and not 0 <= self.dim < len(self.shape):
            raise ConfigError(f"a state of shape {self.shape} has no dim {self.dim} to shard")

    def local(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The shape of one rank's tensor."""
        if self.kind != "sharded":
            return self.shape
        each = -(-self.shape[self.dim] // world_size)
        length = min(max(self.shape[self.dim] - rank * each, 0), each)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


@dataclass(eq=False, slots=True)
class Context:
    """One parameter of a scope, in one step.

    Attributes:
        name, shape: of the parameter.
        gradient: this rank's gradient: 1-D, contiguous, with the number of values of `shape`. It
            may be overwritten. Under error feedback it is fp32 and includes the residual.
        rank, world_size: of the process group.
        step: number of averages of the parameter started before; equal on all ranks.
        state: the tensors that `states` declares, by name. Change them in place, or replace them by
            tensors of the same shape and dtype.
        residual: for aggregators that update it (`feeds_back`); else None.
        observed: whether the sent part is needed, if it is expensive to compute.
        may_be_unused: whether a gradient of zeros may mean that no rank uses the parameter, whose
            average is discarded then (DDP with find_unused_parameters=True).
        keys: of random numbers, for `generator`.
        metrics: scalars that the aggregator measures, by name, each a tensor of one value: for
            example the share of values that saturated. The newest replaces the one before it.
        reduction: how the gradient is reduced if the aggregator leaves it as it is: by an
            all-reduce, or, under FSDP2, a reduce-scatter, of whose result `gradient` is this rank's
            shard; None: an all-reduce.
    """

    name: str
    shape: tuple[int, ...]
    gradient: torch.Tensor
    rank: int
    world_size: int
    step: int
    state: dict[str, torch.Tensor]
    keys: rng.Keys
    member: Any  # the engine's own
    residual: torch.Tensor | None = None
    observed: bool = False
    may_be_unused: bool = False
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    reduction: Request | None = None

    def generator(self, shared: bool = True) -> torch.Generator:
        """A CPU generator seeded for this parameter and step; `shared`: equal on all ranks."""
        key = self.keys.shared if shared else self.keys.own
        return torch.Generator().manual_seed(rng.mix64(key + (self.step + 1) * rng.GOLDEN))


@dataclass(frozen=True)
class Averages:
    """An aggregator's return value if its contributions differ from the averages.

    Attributes:
        averages: per context.
        sent: per context, this rank's contribution to the average: error feedback keeps the rest.
    """

    averages: Sequence[torch.Tensor]
    sent: Sequence[torch.Tensor]


Steps = Generator[Request | Sequence[Request], Any, Sequence[torch.Tensor] | Averages]


@dataclass(frozen=True)
class Aggregator:
    """How the gradients of a scope's parameters become their averages over the ranks.

    An implementer's duties:
    - `aggregate` returns the average for each context: a tensor with as many values as its
      gradient, bit-identical on all ranks. It may be wider than the gradient: it is rounded, and
      error feedback keeps what that loses. This rank's contribution is assumed to equal the
      average, unless it returns `Averages`.
    - The kind, number and sizes of collectives depend on parameters and on `variant` alone, never
      on values: they are compiled once, from a run on zeros, and a step that asks for others fails.
    - State that persists across steps is in `Context.state` only. A non-finite gradient does not
      change it: GradScaler skips the step. Residuals that the kernels of a codec update (`residual`
      of a collective) stay finite but go on where values are finite; with fp16 gradients, which a
      GradScaler is for, `ErrorFeedback` restores them.

    Attributes:
        scope: the parameters that one coroutine gets: "model", all parameters of the aggregator;
            else those of one or more DDP buckets. "bucket" and "layer" are the same to the engine:
            an aggregator with a choice says by "layer" that it treats each parameter by itself.
        feeds_back: whether it adds `Context.residual` and keeps the error in it, by passing it to
            its collectives or by itself; otherwise `ErrorFeedback` does so.
        needs_feedback: whether it requires error feedback.
        contracts: whether the mean squared error of what a rank sends is at most the squared norm
            of its gradient; else error feedback around it may add errors up.
        own_feedback: whether it keeps what it does not send by itself, in the state "residual";
            then `ErrorFeedback` never wraps it.
        serves_one_rank: whether it runs on a single rank, too, where there is nothing to send.
        replaces_momentum: whether averages include momentum, so that the optimiser must have none.
    """

    scope = "bucket"  # not a ClassVar, which a dataclass would place before an aggregator's fields
    feeds_back: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = False
    contracts: ClassVar[bool] = True
    own_feedback: ClassVar[bool] = False
    serves_one_rank: ClassVar[bool] = False
    replaces_momentum: ClassVar[bool] = False

    @property
    def encoders(self) -> tuple[Codec, ...]:
        """The codecs whose kernels take most of its time: where they would be interpreted, `attach`
        gives its parameters bf16 instead. None, where torch computes it."""
        return ()

    def recorded(self) -> str:
        """Its text in states and in files of measurements, which must not change."""
        return str(self)

    def at(self, step: int) -> Aggregator:
        """The aggregator as it is in a step, where options depend on the step."""
        return self

    def variant(self, step: int, world_size: int) -> int:
        """A number that tells steps apart whose collectives differ in kind, number or size."""
        return 0

    def states(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """The state of a parameter of `shape`, by name."""
        return {}

    def impossible(self, shape: tuple[int, ...]) -> str | None:
        """Why it cannot compress a parameter of `shape`, with the nearest legal option; else None.

        Attaching fails if the user has chosen it for this parameter by name.
        """
        return None

    def check_ranks(self, world_size: int) -> None:
        """Raise ConfigError, with the nearest legal option, if the options do not suit so many
        ranks."""

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        """Yield collectives, one or several at a time, until the averages are known; return them.

        A `yield` returns the results of the collectives on this rank: a tensor, or a list of
        tensors if a list was yielded.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no aggregate")

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Payload bytes per rank and gradient, without headers, of all rounds together."""
        raise NotImplementedError(f"{type(self).__name__} defines no payload_bytes")


@dataclass(frozen=True)
class Observation:
    """One parameter's average, as passed to a handle's observer. The next step reuses its tensors:
    copy them to keep them.

    Attributes:
        name, step: of the parameter.
        gradient: this rank's.
        average: over all ranks; under FSDP2 this rank's shard of it.
        sent: this rank's contribution; None if the aggregator does not compute it (a codec without
            error feedback).
        seconds: from the start of the scope to the end of its last round.
        exact: (first, end) of the gradient's values that this rank has not encoded: its own shard.
    """

    name: str
    step: int
    gradient: torch.Tensor
    average: torch.Tensor
    sent: torch.Tensor | None
    seconds: float
    exact: tuple[int, int] = (0, 0)
