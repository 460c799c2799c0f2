"""What an aggregator is: a coroutine that yields typed collectives and returns averages.

One method is the contract. It takes all parameters of a scope that the aggregator serves, yields
the collectives it needs, and gets their results; what all aggregators of a scope yield in the same
round travels in the same messages. So an aggregator never thinks about fusion, threads or ranks:

    @dataclass(frozen=True)
    class Plain(Aggregator):
        def aggregate(self, contexts):
            return (yield [AllReduce(c.gradient, of=c) for c in contexts])

An aggregator is a frozen dataclass, whose fields are its options, as a codec is. What lives across
steps is *state*: named tensors per parameter, which `states` declares, and the engine keeps, saves,
loads and moves to another number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradwire.collectives import Request
from gradwire.errors import ConfigError
from gradwire.lang import rng

KINDS = ("per_rank", "replicated", "sharded")


@dataclass(frozen=True)
class StateSpec:
    """One tensor of state of one parameter.

    Attributes:
        shape, dtype: of the tensor; of one that is sharded, of all ranks' shards together.
        kind: "per_rank": each rank has its own, and what counts is their mean, as of residuals;
            "replicated": alike on all ranks; "sharded": rank n has the n-th part along `dim`, as
            torch.chunk cuts it.
        dim: see "sharded".
        start: "zeros", or "normal": standard normal numbers, the same on all ranks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    kind: str = "per_rank"
    dim: int = 0
    start: str = "zeros"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a state's kind is {self.kind!r}: use one of {', '.join(KINDS)}")
        if self.start not in ("zeros", "normal"):
            raise ConfigError(f"a state's start is {self.start!r}: use 'zeros' or 'normal'")
        if self.kind == "per_rank" and not self.dtype.is_floating_point:
            raise ConfigError(
                f"a state per rank of {self.dtype} has no mean, which another number of ranks "
                "keeps: use a floating dtype, or kind='replicated'"
            )
        if self.kind == "sharded" and not 0 <= self.dim < len(self.shape):
            raise ConfigError(f"a state of shape {self.shape} has no dim {self.dim} to cut")

    def local(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The shape of what one rank keeps."""
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
        gradient: of this rank: 1-D, contiguous, of `shape`'s number of values. It may be
            overwritten. Under error feedback it has the residual in it, and is fp32.
        rank, world_size: of the process group.
        step: how many averages of the parameter were begun before; the same on all ranks.
        state: what `states` declares, by name; changed in place, or replaced by a tensor like it.
        residual: for aggregators that hand it to their collectives (`feeds_back`); else None.
        observed: whether somebody wants to know what was sent, if that costs something.
        keys: of random numbers; `generator` makes a generator of them.
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

    def generator(self, shared: bool = True) -> torch.Generator:
        """Random numbers of this parameter and step, on the CPU; `shared`: alike on all ranks."""
        key = self.keys.shared if shared else self.keys.own
        return torch.Generator().manual_seed(rng.mix64(key + (self.step + 1) * rng.GOLDEN))


@dataclass(frozen=True)
class Averages:
    """What an aggregator may return instead of averages alone.

    Attributes:
        averages: of each context's gradient.
        sent: of each, what this rank has contributed to its average: error feedback keeps the rest.
    """

    averages: Sequence[torch.Tensor]
    sent: Sequence[torch.Tensor]


Steps = Generator[Request | Sequence[Request], Any, Sequence[torch.Tensor] | Averages]


@dataclass(frozen=True)
class Aggregator:
    """How the gradients of a scope's parameters become their averages over the ranks.

    An implementer's duties:
    - `aggregate` returns the average for each context: a tensor of as many values as its gradient,
      bit-identical on all ranks. What this rank contributed is taken to be the average, too, unless
      it returns `Averages`.
    - The kind, number and sizes of collectives do not depend on values.
    - State that lives across steps is in `Context.state`, and only there. A gradient that is not
      finite leaves it as it was.

    Attributes:
        scope: what a coroutine gets together: the parameters of a "bucket", which any number of
            DDP's make, or all that it serves in a "model".
        feeds_back: whether it hands `Context.residual` to its collectives, whose kernels keep the
            error; else `ErrorFeedback` does that around it.
        needs_feedback: whether it is of no use without error feedback.
    """

    scope: ClassVar[str] = "bucket"
    feeds_back: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = False

    def states(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """The state of a parameter of `shape`, by name."""
        return {}

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        """Yield collectives, one or several at a time, until the averages are known; return them.

        A `yield` gives what the collectives leave on this rank: a tensor, or a list of them where
        several were yielded.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no aggregate")

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes that one rank makes of one gradient, headers not counted; all rounds together."""
        raise NotImplementedError(f"{type(self).__name__} defines no payload_bytes")


@dataclass(frozen=True)
class Observation:
    """One parameter's average, as whoever observes a handle sees it. Its tensors are the next
    step's afterwards: copy what is to last.

    Attributes:
        name, step: of the parameter.
        gradient: this rank's.
        average: of all ranks.
        sent: what this rank contributed; None where the aggregator does not know: a codec without
            error feedback.
        seconds: from the start of the scope to its last round's end.
    """

    name: str
    step: int
    gradient: torch.Tensor
    average: torch.Tensor
    sent: torch.Tensor | None
    seconds: float
