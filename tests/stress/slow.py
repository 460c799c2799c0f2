"""A transport whose sends are late at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from gradwire import groups
from gradwire.transport.protocol import Pending


class Delays:
    """Sleeps of 0 to 20 ms, drawn by one rank.

    Args:
        seed: of the rank; ranks draw different ones.
        calls, sends: how often there is one before a call, and before a send.
    """

    def __init__(self, seed: str, calls: float = 0.1, sends: float = 0.02) -> None:
        self._draw = random.Random(seed)
        self._calls, self._sends = calls, sends

    def before_call(self) -> None:
        self._sleep(self._calls)

    def before_send(self) -> None:
        self._sleep(self._sends)

    def _sleep(self, share: float) -> None:
        if self._draw.random() < share:
            time.sleep(self._draw.uniform(0, 0.02))


class Slow:
    """A transport with delays before its sends."""

    def __init__(self, transport: Any, delays: Delays) -> None:
        self._transport = transport
        self._delays = delays

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def isend(self, data: torch.Tensor, peer: int, tag: int, in_use: int | None = None) -> Pending:
        self._delays.before_send()
        pending: Pending = self._transport.isend(data, peer, tag, in_use)
        return pending


def slow_groups(seed: str, **how: float) -> Delays:
    """Make the transports of this process's groups slow, by the delays that are returned."""
    delays = Delays(seed, **how)
    make: Callable[..., Any] = groups.host_transport
    groups.host_transport = lambda *args: Slow(make(*args), delays)  # type: ignore[assignment]
    return delays
