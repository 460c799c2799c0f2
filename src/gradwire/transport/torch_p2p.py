"""torch.distributed point-to-point messages as a transport (gloo; NCCL is a link, queued_p2p.py).

Facts about gloo that shape this file, each found by experiment:
- a message that is longer than its receive aborts the process, so ranks compare plans first; a
  shorter one fills the beginning of the receive's memory;
- a dead peer fails the pending receives from it at once ("Connection closed by peer");
- a wait that times out closes every connection of the rank, so its peers fail too, at once.

So one failing rank breaks the others, which at first blame the wrong one: gradwire.engine.watchdog
finds the rank that failed first.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import TransportError, again
from gradwire.transport.protocol import Loan

# gradwire's tags start high, so that the user's own messages on the group never match them.
TAG_BASE = 1 << 30
_RETURN_S = 0.5  # time for threads to return from waits that have ended


class TorchP2P:
    """Messages over a process group's own send and recv.

    Args:
        group: a process group of CPU tensors (gloo); None is the default group. It is not kept
            alive: the store may live in it, and the next group on the store's port would connect to
            a store that outlives destroy_process_group.

    Attributes:
        companion: `group`, if only this transport keeps it alive.

    Raises:
        TransportError: the group cannot carry CPU tensors between ranks.
    """

    in_memory = False
    shared_bytes = lent_bytes = 0
    reached: frozenset[int] = frozenset()
    lenders: frozenset[int] = frozenset()
    store = None

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group if group is not None else _default_group()
        self.rank = group.rank()
        self.world_size = group.size()
        self.timeout = timeout_of(group)
        self._group = weakref.ref(group)
        self.companion: dist.ProcessGroup | None = None
        self.error: TransportError | None = None
        self.waiting: dict[Any, float] = {}  # an object with a `peer` -> when its wait began

    @property
    def group(self) -> dist.ProcessGroup:
        """The group.

        Raises:
            TransportError: it was destroyed.
        """
        group = self._group()
        if group is None:
            raise destroyed(self.rank)
        return group

    @property
    def board(self) -> dist.Store:
        return self.group.get_group_store()

    def close(self) -> None:
        self.error = self.error or TransportError(f"rank {self.rank}: this transport was closed")
        group, self.companion = self._group(), None
        if self.waiting and group is not None:
            # A thread that returned from gloo during interpreter shutdown would abort the process.
            end_waits(group)
            deadline = time.monotonic() + _RETURN_S
            while self.waiting and time.monotonic() < deadline:
                time.sleep(0.005)

    def isend(self, data: torch.Tensor, peer: int, tag: int, in_use: int | None = None) -> _Work:
        return self._start("send", data, peer, tag, "send to")

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> _Work:
        return self._start("recv", data, peer, tag, "receive from")

    def borrow(self, nbytes: int, peer: int, tag: int) -> Loan:
        raise AssertionError("no peer lends")

    def _start(
        self,
        operation: str,
        data: torch.Tensor,
        peer: int,
        tag: int,
        what: str,
    ) -> _Work:
        if self.error is not None:
            raise again(self.error)
        start: Callable[..., dist.Work] = getattr(self.group, operation)
        try:
            return _Work(self, start([data], peer, TAG_BASE + tag), data, peer, what)
        except RuntimeError as error:
            raise self.explain(peer, what, error) from None

    def explain(
        self, peer: int, what: str, error: RuntimeError, blamed: int | None = None
    ) -> TransportError:
        """The error to raise when an operation with `peer` failed; `blamed`: the rank that `peer`
        blames."""
        if self.error is None and self._group() is None:
            self.error = destroyed(self.rank)
        if self.error is not None:
            return self.error
        reason = str(error).split("] ", 1)[-1].split(". This is")[0].splitlines()[0]
        culprit = peer if blamed in (None, self.rank) else blamed
        self.error = TransportError(
            f"rank {self.rank}: {what} rank {peer} failed ({reason}). Rank {culprit} of this "
            "process group died, hangs, cannot be reached, or runs a different collective than "
            "this rank: look at its log, then restart the job",
            peer=culprit,
        )
        return self.error

    def fail(self, peer: int) -> None:
        """Nothing to do: peers notice that gloo's connections break."""

    def longest_wait(self) -> tuple[float, int] | None:
        waits = list(self.waiting.items())
        if not waits:
            return None
        work, begun = min(waits, key=lambda wait: wait[1])
        return time.monotonic() - begun, work.peer


class _Work:
    def __init__(
        self, owner: TorchP2P, work: dist.Work, data: torch.Tensor, peer: int, what: str
    ) -> None:
        self.owner = owner
        self.work: dist.Work | None = work
        self.data = data  # in use by gloo until the wait returns
        self.peer = peer
        self.what = what

    def wait(self) -> None:
        """Wait for the end; called once.

        gloo's work keeps its connections and the store alive, which may live in this process. So
        its last reference is dropped before the caller continues, and may destroy the group.
        """
        owner = self.owner
        work, self.work = self.work, None
        assert work is not None
        owner.waiting[self] = time.monotonic()
        try:
            work.wait(timedelta(seconds=owner.timeout))
        except RuntimeError as error:
            raise owner.explain(self.peer, self.what, error) from None
        finally:
            del owner.waiting[self]


def end_waits(group: dist.ProcessGroup) -> None:
    """End all waits of this rank in a gloo group, and close its connections, by a wait that times
    out."""
    with suppress(RuntimeError):
        last = group.recv(
            [torch.zeros(1, dtype=torch.uint8)], (group.rank() + 1) % group.size(), TAG_BASE - 1
        )
        last.wait(timedelta(milliseconds=1))


def destroyed(rank: int) -> TransportError:
    """The error for calls on a process group that was destroyed."""
    return TransportError(
        f"rank {rank}: this process group was destroyed; attach again in the new one"
    )


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise TransportError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def timeout_of(group: dist.ProcessGroup) -> float:
    """The group's timeout, in seconds: of its backend for the CPU, if it has one. torch has no
    public getter for it."""
    for device in sorted(group._device_types, key=lambda device: device.type != "cpu"):
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return float(options._timeout.total_seconds())
    return float(dist.distributed_c10d.default_pg_timeout.total_seconds())
