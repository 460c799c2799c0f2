"""torch.distributed point-to-point messages as a transport (gloo; NCCL is a link, queued_p2p.py).

gloo facts that shape this file, each found by experiment:
- a message that is longer than its receive aborts the process, so ranks compare plans first; one
  that is shorter fills the beginning, and the rest stays as it was;
- a dead peer fails the pending receives from it at once ("Connection closed by peer");
- a wait that times out closes every connection of the rank, so its peers fail too, at once.

So whoever fails breaks the others, who at first blame the messenger (see gradwire.engine.watch).
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

from gradwire.errors import TransportError
from gradwire.transport.protocol import Loan

# Our tags start high, so that a user's own point-to-point messages on the group never match them.
TAG_BASE = 1 << 30
_RETURN_S = 0.5  # in which threads come back from waits that have ended


class TorchP2P:
    """Messages over a process group's own send and recv.

    Args:
        group: a process group of CPU tensors (gloo); None is the default group. It is not kept: the
            store may live in it, and one that outlives destroy_process_group would be taken for
            that of the next group on its port.

    Attributes:
        companion: `group`, where nobody else keeps it.

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
        self.waiting: dict[Any, float] = {}  # what has a peer -> when the wait for it began

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
            # A thread that came back from gloo as the interpreter ends would abort the process. A
            # wait that times out ends all others of this rank.
            with suppress(RuntimeError):
                peer = (self.rank + 1) % self.world_size
                last = group.recv([torch.zeros(1)], peer, TAG_BASE - 1)
                last.wait(timedelta(milliseconds=1))
            deadline = time.monotonic() + _RETURN_S
            while self.waiting and time.monotonic() < deadline:
                time.sleep(0.005)

    def isend(self, data: torch.Tensor, peer: int, tag: int, in_use: int | None = None) -> _Work:
        return self._start("send", data, peer, tag, "send to")

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> _Work:
        return self._start("recv", data, peer, tag, "receive from")

    def borrow(self, nbytes: int, peer: int, tag: int) -> Loan:
        raise AssertionError("nobody lends")

    def _start(
        self,
        operation: str,
        data: torch.Tensor,
        peer: int,
        tag: int,
        what: str,
    ) -> _Work:
        if self.error is not None:
            raise self.error
        start: Callable[..., dist.Work] = getattr(self.group, operation)
        try:
            return _Work(self, start([data], peer, TAG_BASE + tag), data, peer, what)
        except RuntimeError as error:
            raise self.explain(peer, what, error) from error

    def explain(
        self, peer: int, what: str, error: RuntimeError, blamed: int | None = None
    ) -> TransportError:
        """The error to raise when an operation with `peer` failed, who may hold `blamed`
        responsible."""
        if self.error is None and self._group() is None:
            self.error = destroyed(self.rank)
        if self.error is not None:
            return self.error
        reason = str(error).split("] ", 1)[-1].split(". This is")[0].splitlines()[0]
        culprit = peer if blamed in (None, self.rank) else blamed
        self.error = TransportError(
            f"rank {self.rank}: {what} rank {peer} failed ({reason}). Rank {culprit} of this "
            "process group died, hangs, cannot be reached, or runs another collective than this "
            "rank: look at its log, then restart the job",
            peer=culprit,
        )
        return self.error

    def fail(self, peer: int) -> None:
        """gloo's own connections break with ours."""

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
        self.data = data  # gloo reads and writes it until the wait returns
        self.peer = peer
        self.what = what

    def wait(self) -> None:
        """Wait for the end; called once.

        The work holds gloo's connections and the store, which may live in this process: it is gone
        before anybody learns that it has ended, and may destroy the group.
        """
        owner = self.owner
        work, self.work = self.work, None
        assert work is not None
        owner.waiting[self] = time.monotonic()
        try:
            work.wait(timedelta(seconds=owner.timeout))
        except RuntimeError as error:
            raise owner.explain(self.peer, self.what, error) from error
        finally:
            del owner.waiting[self]


def destroyed(rank: int) -> TransportError:
    """What ends the calls of a process group that is no more."""
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
    """The group's own timeout, in seconds; torch has no public getter for it."""
    try:
        options = group._get_backend(torch.device("cpu")).options
        return float(options._timeout.total_seconds())
    except (RuntimeError, AttributeError):
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())
