"""torch.distributed point-to-point messages as a transport (gloo; NCCL is a link, queued_p2p.py).

gloo facts that shape this file, each found by experiment:
- a receive whose size differs from what was sent aborts the process, so ranks compare plans first;
- a dead peer fails the pending receives from it at once ("Connection closed by peer");
- a wait that times out closes every connection of the rank, so its peers fail too, at once.

So whoever fails breaks the others, who would blame the messenger: hence gradwire.transport.notices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import TransportError
from gradwire.transport.notices import Notices
from gradwire.transport.protocol import Loan

# Our tags start high, so that a user's own point-to-point messages on the group never match them.
_TAG_BASE = 1 << 30
_NOTICE_TAG = (1 << 31) - 1
# A wait as long as this part of the timeout is told to the peers, while they can still be reached.
_PATIENCE = 0.75


class TorchP2P:
    """Messages over a process group's own send and recv.

    Args:
        group: a process group of CPU tensors (gloo); None is the default group.

    Raises:
        TransportError: the group cannot carry CPU tensors between ranks.
    """

    in_memory = False
    shared_bytes = lent_bytes = 0
    lenders: frozenset[int] = frozenset()
    store = None

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: dist.ProcessGroup = group if group is not None else _default_group()
        self.rank = self.group.rank()
        self.world_size = self.group.size()
        self.timeout = timeout_of(self.group)
        self.error: TransportError | None = None
        self.waiting: dict[Any, float] = {}  # what has a peer -> when the wait for it began
        try:
            self.notices = Notices(self.group, _NOTICE_TAG)
        except RuntimeError as error:  # a peer has gone already
            raise TransportError(f"rank {self.rank}: the group cannot be used: {error}") from error
        self._told = False

    @property
    def board(self) -> dist.Store:
        return self.group.get_group_store()

    def close(self) -> None:
        self.error = self.error or TransportError(f"rank {self.rank}: this transport was closed")
        # Nothing of ours may keep a destroyed process group alive.
        del self.group, self.notices

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> _Work:
        return self._start(self.group.send, data, peer, tag, "send to")

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> _Work:
        return self._start(self.group.recv, data, peer, tag, "receive from")

    def borrow(self, nbytes: int, peer: int, tag: int) -> Loan:
        raise AssertionError("nobody lends")

    def _start(
        self,
        operation: Callable[[list[torch.Tensor], int, int], dist.Work],
        data: torch.Tensor,
        peer: int,
        tag: int,
        what: str,
    ) -> _Work:
        if self.error is not None:
            raise self.error
        try:
            return _Work(self, operation([data], peer, _TAG_BASE + tag), data, peer, what)
        except RuntimeError as error:
            raise self.explain(peer, what, error) from error

    def explain(self, peer: int, what: str, error: RuntimeError) -> TransportError:
        """The error to raise when an operation with `peer` failed: it names who failed first."""
        if self.error is not None:
            return self.error
        reason = str(error).split("] ", 1)[-1].split(". This is")[0].splitlines()[0]
        culprit = self.notices.first_to_fail(peer)
        text = f"rank {self.rank}: {what} rank {peer} failed ({reason})"
        text += "" if culprit == peer else f"; the first to fail was rank {culprit}"
        self.error = TransportError(
            f"{text}. Rank {culprit} of this process group died, hangs, cannot be reached, or runs "
            "another collective than this rank: look at its log, then restart the job",
            peer=culprit,
        )
        return self.error

    def fail(self, peer: int) -> None:
        self.notices.tell(peer)

    def tick(self) -> None:
        """Tell peers of a wait that is likely to end in a timeout; withdraw it if it does not."""
        if self.error is not None:
            return
        longest = self.longest_wait()
        if longest is not None and longest[0] > _PATIENCE * self.timeout:
            if not self._told:
                self.notices.tell(longest[1])
            self._told = True
        elif self._told:
            self.notices.tell(None)
            self._told = False
        self.notices.collect()

    def longest_wait(self) -> tuple[float, int] | None:
        """Seconds and peer of the longest wait under way, or None."""
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
        self.work = work
        self.data = data  # gloo reads and writes it until the wait returns
        self.peer = peer
        self.what = what

    def wait(self) -> None:
        owner = self.owner
        owner.waiting[self] = time.monotonic()
        try:
            self.work.wait(timedelta(seconds=owner.timeout))
        except RuntimeError as error:
            raise owner.explain(self.peer, self.what, error) from error
        finally:
            del owner.waiting[self]


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
