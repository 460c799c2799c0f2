"""A training on a network that follows a schedule: rank 0 asks, the parent changes the lab.

Rank 0 knows the step; the lab belongs to the parent of the ranks. Where the network is to change,
rank 0 appends an event `network` (`net`) between two steps, and waits until the parent has written
that network to a file beside the events. Meanwhile the other ranks wait for rank 0 in their next
collective. Rank 0's clock stands still: no timed step has two networks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.errors import GradwireError
from gradwire.planner.whole import write_whole
from gradwire_tools import lab

_ANSWER = "network"  # a file: the network as it is now
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
        self._answer = None if events_file is None else Path(events_file).with_name(_ANSWER)

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
        self._write("network", net=str(net))
        deadline = time.monotonic() + _WAIT_SECONDS
        while not (self._answer.exists() and self._answer.read_text() == str(net)):
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


def change(emulated: lab.Lab, event: dict[str, Any], events_file: Path) -> None:
    """The parent's side: do what an event `network` asks for, and answer."""
    emulated.change(lab.Network.parse(event["net"]))
    write_whole(events_file.with_name(_ANSWER), event["net"])
