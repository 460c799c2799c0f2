"""A training on a network that follows a schedule: rank 0 asks, the parent changes the lab.

Rank 0 knows the step; the lab belongs to the parent of the ranks. Where the network is to change,
rank 0 appends an event `network` (`net`, `number`) between two steps, and waits until the parent
has written the number to a file beside the events. Meanwhile the other ranks wait for rank 0 in
their next collective. Rank 0's clock stands still: no timed step has two networks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire import lab
from gradwire.errors import GradwireError

_ANSWER = "network"  # a file: the number of the last change
_WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.005


class Follower:
    """Rank 0's side.

    Args:
        schedule: to follow; at first, the lab has the network of its first phase.
        write: appends an event, as `workers.Events.write`.
        events_file: where events go; None on other ranks, whose calls do nothing.
    """

    def __init__(
        self, schedule: lab.Schedule, write: Callable[..., None], events_file: str | None
    ) -> None:
        self.schedule = schedule
        self._now = schedule.first
        self._write = write
        self._answer = None if events_file is None else _answer(Path(events_file))
        self._asked = 0

    def follow(self, step: int, steps: int, step_seconds: list[float]) -> None:
        """Have the network that holds when `step` of `steps` steps are done.

        Raises:
            GradwireError: the parent did not answer.
        """
        if self._answer is None or not self.schedule.changes:
            return
        net = self.schedule.at(step, steps, sum(step_seconds))
        if net == self._now:
            return
        self._asked += 1
        self._write("network", net=str(net), number=self._asked)
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self._answered():
            if time.monotonic() > deadline:
                raise GradwireError(f"the lab did not change to {net} within {_WAIT_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        self._now = net

    def keys(self, step: int, steps: int, step_seconds: list[float]) -> dict[str, Any]:
        """What an evaluation tells: the network of the steps before it."""
        if not self.schedule.changes:
            return {}
        net = self.schedule.at(max(0, step - 1), steps, sum(step_seconds[:-1]))
        return {"net_now": str(net)}

    def _answered(self) -> bool:
        assert self._answer is not None
        return self._answer.exists() and int(self._answer.read_text()) >= self._asked


def change(emulated: lab.Lab, event: dict[str, Any], events_file: Path) -> None:
    """The parent's side: do what an event `network` asks for, and answer."""
    emulated.change(lab.Network.parse(event["net"]))
    answer = _answer(events_file)
    new = answer.with_suffix(".new")
    new.write_text(str(event["number"]))
    os.replace(new, answer)


def _answer(events_file: Path) -> Path:
    return events_file.with_name(_ANSWER)
