"""Random programs: what the ranks of two process groups do, the same on all of them from one seed.

A *program* has two groups; in each, one or two *owners* of scopes. An owner's *layout* is what its
buckets hold; it is drawn anew every `EPOCH` steps. In a *step*, every owner starts its first few
buckets in order, each as one scope; between them stand calls of the user's. Everything is a pure
function of (seed, number of ranks, step).

Each rank issues the actions of a step in an order of its own (`Program.order`), in which
- the actions of a stream stay in order, where a stream is a group, or (`Step.free`) an owner or the
  calls of a group;
- calls that wait keep their order, whatever their group: else two ranks could wait for each other.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

TIMES = int(os.environ.get("GRADWIRE_STRESS", "1"))  # so many seeds and steps as usual
EPOCH = 25
MOST_BUCKETS = 8
CODECS = ("qsgd", "qsgd2", "terngrad", "topk", "onebit", "identity", "fp16")
# How an aggregator averages: all-reduce; all-gather of all values; reduce-scatter, then all-gather;
# the minimum of all ranks, which is not an average; a broadcast from one rank in turn.
WAYS = ("all_reduce", "all_reduce", "all_gather", "shards", "min", "broadcast")
CALLS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Parameter:
    """A gradient of `numel` values; round i averages so many of its first values through a codec,
    in one of the `WAYS`.

    With `feedback` there is one round, with a residual.
    """

    name: str
    numel: int
    rounds: tuple[tuple[int, str, str], ...]
    feedback: bool


Bucket = tuple[Parameter, ...]


@dataclass(frozen=True)
class Owner:
    """An owner of scopes; `window` of them may be in flight."""

    name: str
    group: int
    window: int


@dataclass(frozen=True)
class Scope:
    """Start a bucket of an owner."""

    group: int
    owner: int
    bucket: int


@dataclass(frozen=True)
class Call:
    """A call of the user's; `numel` values on every rank, of a half in every shard."""

    group: int
    kind: str
    numel: int
    codec: str
    average: bool
    waits: bool


Action = Scope | Call


@dataclass(frozen=True)
class Step:
    """What happens in one step, in the order of the serial execution.

    Attributes:
        free: ranks may issue the owners of one group in different orders.
        lingers: scopes without residuals may end in the next step, beside the same buckets again.
    """

    actions: tuple[Action, ...]
    free: bool
    lingers: bool = False


@dataclass(frozen=True)
class Program:
    """See the module's docstring.

    Attributes:
        ranks: number of ranks.
        groups: the ranks of each group.
    """

    seed: int
    ranks: int
    groups: tuple[tuple[int, ...], ...]
    owners: tuple[Owner, ...]

    @staticmethod
    def of(seed: int, ranks: int) -> Program:
        draw = random.Random(f"program {seed} {ranks}")
        everyone = tuple(range(ranks))
        most = tuple(sorted(draw.sample(everyone, max(ranks - 1, 2))))
        groups = (everyone, draw.choice((everyone, most)))
        owners = [
            Owner(f"owner {group}.{number}", group, draw.choice((1, 2)))
            for group in range(2)
            for number in range(draw.choice((1, 2)))
        ]
        return Program(seed, ranks, groups, tuple(owners))

    def layout(self, owner: int, step: int) -> tuple[Bucket, ...]:
        """The buckets of an owner, from the epoch of `step`."""
        return _layout(self.seed, owner, step // EPOCH)

    def step(self, number: int) -> Step:
        draw = random.Random(f"step {self.seed} {self.ranks} {number}")
        queues: list[list[Action]] = []
        for at, owner in enumerate(self.owners):
            count = min(1 + int(draw.expovariate(0.4)), MOST_BUCKETS)
            queues.append([Scope(owner.group, at, bucket) for bucket in range(count)])
        for group in range(2):
            count = min(int(draw.expovariate(0.7)), 5)
            queues.append([_call(draw, group, self.seed, number) for _ in range(count)])
        return Step(tuple(_merged(draw, queues)), draw.random() < 0.5, draw.random() < 0.3)

    def order(self, rank: int, number: int) -> list[int]:
        """A rank's order of the actions of a step, as indices."""
        step, draw = self.step(number), random.Random(f"order {self.seed} {rank} {number}")

        def stream(action: Action) -> tuple[int, int]:
            owner = action.owner if isinstance(action, Scope) else -1
            return action.group, owner if step.free else 0

        queues: dict[tuple[int, int], list[int]] = {}
        waiting: list[int] = []
        for index, action in enumerate(step.actions):
            queues.setdefault(stream(action), []).append(index)
            if isinstance(action, Call) and action.waits:
                waiting.append(index)
        ordered: list[int] = []
        while queues:
            ready = [q for q in queues.values() if q[0] not in waiting or q[0] == waiting[0]]
            index = draw.choice(ready).pop(0)
            if waiting and index == waiting[0]:
                waiting.pop(0)
            ordered.append(index)
            queues = {key: queue for key, queue in queues.items() if queue}
        return ordered

    def takes_part(self, rank: int, action: Action) -> bool:
        return rank in self.groups[action.group]


@lru_cache(maxsize=64)
def _layout(seed: int, owner: int, epoch: int) -> tuple[Bucket, ...]:
    draw = random.Random(f"layout {seed} {owner} {epoch}")

    def parameter(name: str) -> Parameter:
        numel = _numel(draw)
        feedback = draw.random() < 0.25
        rounds = [
            (
                numel if feedback else draw.randint(1, numel),
                draw.choice(CODECS),
                "all_reduce" if feedback else draw.choice(WAYS),
            )
            for _ in range(1 if feedback else draw.choice((1, 2, 2, 3)))
        ]
        return Parameter(name, numel, tuple(rounds), feedback)

    return tuple(
        tuple(parameter(f"{owner}.{epoch}.{bucket}.{i}") for i in range(draw.choice((1, 1, 2, 3))))
        for bucket in range(MOST_BUCKETS)
    )


def _numel(draw: random.Random) -> int:
    return int(2 ** draw.uniform(0, 13))


def _call(draw: random.Random, group: int, seed: int, step: int) -> Call:
    """A user call; few distinct ones per epoch, as in a user's program."""
    sort = random.Random(f"call {seed} {group} {step // EPOCH} {draw.randrange(3)}")
    kind, codec = sort.choice(CALLS), sort.choice(CODECS)
    return Call(group, kind, _numel(sort), codec, sort.random() < 0.5, waits=draw.random() < 0.3)


def _merged(draw: random.Random, queues: list[list[Action]]) -> Iterator[Action]:
    queues = [list(queue) for queue in queues if queue]
    while queues:
        queue = draw.choice(queues)
        yield queue.pop(0)
        queues = [queue for queue in queues if queue]
