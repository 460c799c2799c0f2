"""Plans take turns: each is in force for some passes, while something is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

UNTIMED = 2  # passes of a turn: caches and connections adapt


@dataclass
class _Turn:
    """Passes of one plan.

    Attributes:
        number: of the plan.
        version: with which it is in force.
    """

    number: int
    version: int
    values: list[float] = field(default_factory=list)


class PlanTurns:
    """Plans that are tried one after the other, by each rank at the same passes.

    Args:
        plans: how many.
        turns: of each.
        passes: of a turn that count, after `UNTIMED` others.
        ask: requests a plan by its number, and returns the version.
        submit: runs work in the background, in order.
        done: is given the values of each plan, there.
    """

    def __init__(
        self,
        plans: int,
        turns: int,
        passes: int,
        ask: Callable[[int], int],
        submit: Callable[[Callable[[], None]], None],
        done: Callable[[list[list[float]]], None],
    ) -> None:
        self._left = list(range(plans)) * turns
        self._values: list[list[float]] = [[] for _ in range(plans)]
        self._passes, self._ask, self._submit, self._done = passes, ask, submit, done
        self._lock = threading.Lock()
        self._turn: _Turn | None = None

    def next(self) -> None:
        """Begin the next turn, or end. In the background."""
        if not self._left:
            self._done(self._values)
            return
        number = self._left.pop(0)
        with self._lock:  # the pass in which the plan is adopted is counted after this
            self._turn = _Turn(number, self._ask(number))

    def passed(self, version: int, value: float) -> None:
        """Count a pass that has ended: the version of its plan, and what it measured."""
        with self._lock:
            turn = self._turn
            if turn is None or version != turn.version:
                return
            turn.values.append(value)
            if len(turn.values) < UNTIMED + self._passes:
                return
            self._turn = None
        self._submit(partial(self._ended, turn))

    def _ended(self, turn: _Turn) -> None:
        self._values[turn.number] += turn.values[UNTIMED:]
        self.next()
