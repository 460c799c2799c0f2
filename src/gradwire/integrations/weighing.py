"""What a byte of each of DDP's buckets costs a policy (THESIS 4.5, "Optimizing for Time"; B.1).

    bytes      all alike
    priority   the bucket's number, in the order in which buckets are sent: the last ones, which
               nothing hides, are compressed more (B.1)
    time       by regression on *spans*, from the first bucket's readiness to the last average

For time, a trial precedes the first decision. The uniform plan, and for each bucket one in which
its parameters have the choice with the most bytes, are in force for `PASSES` passes each: no trial
loses more of a gradient than the uniform plan. Of many buckets neighbours are taken together, so
that there are `MOST` at most. The slowest rank's median span of a plan counts.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gradwire.aggregators import Aggregator
from gradwire.controllers import time_weights
from gradwire.controllers.tables import nbytes
from gradwire.engine import Owner
from gradwire.errors import ConfigError
from gradwire.integrations.choices import GRADIENTS, Target, with_methods
from gradwire.integrations.serial import Serial
from gradwire.integrations.switch import Switch
from gradwire.integrations.turns import PlanTurns
from gradwire.planner import Plan, Rules
from gradwire.planner.links import exchanged

log = logging.getLogger("gradwire")

AFTER = 4  # passes before the trial: DDP rebuilds its buckets after the first
PASSES = 4
MOST = 12

Names = Sequence[Sequence[str]]  # of the parameters of each bucket, in the order of sending


def priorities(buckets: Names) -> dict[str, float]:
    """The weight of each parameter by its bucket's number, from 1."""
    return {name: float(i) for i, names in enumerate(buckets, 1) for name in names}


def together(buckets: Names, wanted: Mapping[str, object]) -> list[list[str]]:
    """The wanted parameters of neighbouring buckets, in at most `MOST` groups; none is empty."""
    kept = [[name for name in names if name in wanted] for names in buckets]
    kept = [names for names in kept if names]
    parts = np.array_split(np.arange(len(kept)), min(MOST, len(kept))) if kept else []
    return [[name for i in part for name in kept[i]] for part in parts]


class BucketTrial:
    """Learns the weights of buckets by time.

    Args:
        target: gradients, and the choices of each parameter.
        owner, key: of the exchange of spans.
        switch, remade: the handle's plans; a plan with other rules.
        buckets: as they are in force.
        serial: where its work runs.
        done: is given the weights by name, and a line that tells them, there.
    """

    def __init__(
        self,
        target: Target,
        owner: Owner,
        key: str,
        switch: Switch,
        remade: Callable[[Plan, Rules], Plan],
        buckets: Callable[[], Names],
        serial: Serial,
        done: Callable[[dict[str, float], str], None],
    ) -> None:
        self._target, self._owner, self._key = target, owner, key
        self._switch, self._remade, self._buckets = switch, remade, buckets
        self._serial, self._done = serial, done
        self._uniform = dict.fromkeys(target.shapes, target.reference)
        self._groups: list[list[str]] = []
        self._turns: PlanTurns | None = None
        self._last: int | None = None  # the version that ends the trial
        serial.submit(self._guarded(self._begin))

    def passed(self, version: int, span: float | None) -> bool:
        """Count a pass that has ended; whether the trial has. The same on all ranks."""
        if self._last is not None and version >= self._last:
            return True
        turns = self._turns  # which are set in the background
        if turns is not None and span is not None:
            turns.passed(version, span)
        return False

    # ---- in the background

    def _guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                try:
                    work()
                except ConfigError as error:  # alike on all ranks
                    self._end({}, str(error))
            except Exception as error:  # the group is broken, which the next pass tells
                comm = self._owner.comm
                log.warning("rank %d: weigh=time: %s", comm.ranks[comm.rank], error)

        return guarded

    def _begin(self) -> None:
        self._groups = together(self._buckets(), self._target.shapes)
        if len(self._groups) < 2:
            raise ConfigError("there is one bucket")

        def submit(work: Callable[[], None]) -> None:
            self._serial.submit(self._guarded(work))

        turns = PlanTurns(len(self._groups) + 1, 1, PASSES, self._ask, submit, self._measured)
        self._turns = turns
        turns.next()

    def _methods(self, number: int) -> dict[str, Aggregator]:
        """Plan 0 is the uniform one, plan n has a larger bucket n - 1."""
        larger = self._groups[number - 1] if number else []
        return {**self._uniform, **{name: self._largest(name) for name in larger}}

    def _largest(self, name: str) -> Aggregator:
        shape = self._target.shapes[name]
        methods = self._target.family.methods(shape)
        return methods[int(nbytes(methods, shape).argmax())]

    def _ask(self, number: int) -> int:
        methods = self._methods(number)

        def made(before: Plan) -> Plan:
            new = replace(before, version=before.version + 1)
            return self._remade(*with_methods(new, {GRADIENTS: methods}))

        return self._switch.ask(made).version

    def _measured(self, values: list[list[float]]) -> None:
        medians = [statistics.median(of) for of in values]
        mine, key = json.dumps(medians), f"{self._key}/spans"
        told = exchanged(self._owner.comm, key, mine, self._serial.check)
        spans = [max(of) for of in zip(*map(json.loads, told), strict=True)]
        sent = [self._sent(number) for number in range(len(spans))]
        weights = time_weights(np.array(sent), spans)
        named = {
            name: float(weight)
            for names, weight in zip(self._groups, weights, strict=True)
            for name in names
        }
        self._end(named, "")

    def _sent(self, number: int) -> list[float]:
        """Bytes of each bucket in a plan."""
        methods, shapes = self._methods(number), self._target.shapes
        return [
            float(sum(nbytes([methods[name]], shapes[name])[0] for name in names))
            for names in self._groups
        ]

    def _end(self, weights: dict[str, float], reason: str) -> None:
        line = f"weigh=time: bytes count alike, since {reason}"
        if weights:
            told = ", ".join(f"{weights[names[0]]:.2f}" for names in self._groups)
            line = f"weigh=time: bytes of the buckets count {told}"
        self._done(weights, line)
        self._turns = None
        self._last = self._ask(0)
