"""Rounds: drives the aggregators of a bucket and fuses what they yield.

All coroutines advance in step. What they yield in one round becomes one collective, whose
messages carry every parameter; when it ends, each coroutine gets its own result, and the next
round begins. No thread waits for a round: its end starts the next. All rounds have one ticket,
which is taken before the first: so the order of buckets is the order in which they were started,
however their rounds overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from gradwire.aggregators.protocol import Aggregator, CompressedAllReduce, Steps
from gradwire.collectives import Item, Options, prepare
from gradwire.engine import Outcome, Owner
from gradwire.lang import rng
from gradwire.partition import Spec


@dataclass
class Attached:
    """One parameter of an attached module, as rounds see it.

    Attributes:
        name: in the module.
        aggregator: makes its average.
        keys: from `rng.parameter_keys`.
        rotation: see gradwire.partition.
        step: how many averages were begun; enters the random numbers.
    """

    name: str
    aggregator: Aggregator
    keys: rng.Keys
    rotation: int
    step: int = 0
    _specs: dict[tuple[object, ...], Spec] = field(default_factory=dict)

    def spec(self, request: CompressedAllReduce) -> Spec:
        """What all ranks know of a request; the same object every step, which is quick to find."""
        values, feedback = request.values, request.residual is not None
        key = (values.numel(), values.dtype, request.codec, feedback)
        if key not in self._specs:
            self._specs[key] = Spec(self.name, *key, self.rotation)
        return self._specs[key]


class Rounds:
    """One bucket's way from gradients to averages.

    Args:
        owner: whose bucket it is.
        members: the parameters of the bucket.
        gradients: theirs, 1-D and contiguous, replaced by the averages.
        options: of every collective.
        done: called once, with the error or None, and with what the rounds took; from the engine's
            thread, or from `start`.

    Raises:
        TransportError, ConfigError: the group is broken (see `Owner.ticket`); `done` is not called.
    """

    def __init__(
        self,
        owner: Owner,
        members: Sequence[Attached],
        gradients: Sequence[torch.Tensor],
        options: Options,
        done: Callable[[BaseException | None, list[Outcome]], None],
    ) -> None:
        self.owner = owner
        self.ticket = owner.ticket()
        self.members = members
        self.gradients = gradients
        self.options = options
        self.done = done
        self.outcomes: list[Outcome] = []
        self.steps: list[int] = []
        self.active: list[tuple[int, Steps, CompressedAllReduce]] = []

    def start(self) -> None:
        """Run every coroutine to its first collective, and begin the first round."""
        self.steps = [member.step for member in self.members]
        for member in self.members:
            member.step += 1
        try:
            for index, (m, gradient) in enumerate(zip(self.members, self.gradients, strict=True)):
                self._advance(index, m.aggregator.aggregate(gradient), None)
            self._next_round(0)
        except BaseException as error:
            self._end(error)

    def _advance(self, index: int, steps: Steps, result: torch.Tensor | None) -> None:
        """Resume one coroutine; it asks for another collective, or ends with its average."""
        try:
            request = next(steps) if result is None else steps.send(result)
        except StopIteration as end:
            average: torch.Tensor = end.value
            gradient = self.gradients[index]
            if average.data_ptr() != gradient.data_ptr():
                gradient.copy_(average)
        except BaseException as error:
            # Peers are in the round that this rank will not begin.
            self.owner.comm.fail_owner(self.owner, error)
            raise
        else:
            self.active.append((index, steps, request))

    def _next_round(self, number: int) -> None:
        if not self.active:
            self._end(None)
            return
        specs, items = [], []
        for index, _, request in self.active:
            member = self.members[index]
            specs.append(member.spec(request))
            # A round of its own draws random numbers of its own.
            step = self.steps[index] | number << 48
            items.append(Item(request.values, member.keys, step, request.residual))
        device = items[0].values.device
        collective = prepare(self.owner, specs, self.options, device=device)
        running = collective.start(items, average=True, ticket=self.ticket)
        running.add_done_callback(lambda outcome: self._finish_round(number, outcome))

    def _finish_round(self, number: int, outcome: Future[Outcome]) -> None:
        try:
            self.outcomes.append(outcome.result())
            ended, self.active = self.active, []
            for index, steps, request in ended:
                self._advance(index, steps, request.values)
            self._next_round(number + 1)
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.ticket.close()
        self.done(error, self.outcomes)
