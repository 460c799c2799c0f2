"""torch.distributed point-to-point messages as a transport (gloo now; NCCL and MPI later).

gloo facts that shape this file, each found by experiment:
- a receive whose size differs from what was sent aborts the process, so ranks compare plans first;
- a dead peer fails the pending receives from it at once ("Connection closed by peer"), and a wait that
  times out breaks the whole context;
- whoever sees a failure raises and usually exits, which closes its own connections, so the next rank
  would blame the messenger. Hence the notices: a small receive from every peer stands posted from the
  start, and a rank that fails first says through it whom it blames.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.errors import TransportError

# Our tags start high, so that a user's own point-to-point messages on the same group never match ours.
_TAG_BASE = 1 << 29
_NOTICE_TAG = (1 << 30) - 1
_TAGS = _NOTICE_TAG - _TAG_BASE


class TorchP2P:
    """Messages over a process group's own send and recv.

    Args:
        group: a process group of CPU tensors (gloo); None is the default group.

    Raises:
        TransportError: the group cannot carry CPU tensors between ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: dist.ProcessGroup = group if group is not None else _default_group()
        self.rank = self.group.rank()
        self.world_size = self.group.size()
        self.timeout = _timeout_of(self.group)
        self.error: TransportError | None = None
        self._notices: dict[int, torch.Tensor] = {}
        # gloo reads and writes these for as long as it likes, so they live as long as the transport.
        self._kept: list[tuple[dist.Work, torch.Tensor]] = []
        for peer in range(self.world_size):
            if peer != self.rank:
                notice = torch.zeros(8, dtype=torch.uint8)
                self._notices[peer] = notice
                self._kept.append((self.group.recv([notice], peer, _NOTICE_TAG), notice))

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> _Work:
        return self._start(self.group.send, data, peer, tag, "send to")

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> _Work:
        return self._start(self.group.recv, data, peer, tag, "receive from")

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
            return _Work(self, operation([data], peer, _TAG_BASE + tag % _TAGS), data, peer, what)
        except RuntimeError as error:
            raise self.explain(peer, what, error) from error

    def explain(self, peer: int, what: str, error: RuntimeError) -> TransportError:
        """The error to raise when an operation with `peer` failed: it names who failed first."""
        if self.error is not None:
            return self.error
        culprit = next((b for b in map(self._blamed_by, sorted(self._notices)) if b is not None), peer)
        reason = str(error).split("] ", 1)[-1].split(". This is")[0].splitlines()[0]
        if culprit == self.rank:
            culprit = peer  # a peer blames us, and we are alive: the link between us has failed
        text = f"rank {self.rank}: {what} rank {peer} failed ({reason})"
        text += "" if culprit == peer else f"; the first to fail was rank {culprit}"
        self.error = TransportError(
            f"{text}. Rank {culprit} of this process group died, hangs or cannot be reached: "
            "look at its log, then restart the job",
            peer=culprit,
        )
        return self.error

    def _blamed_by(self, peer: int) -> int | None:
        """The rank that `peer` gave the blame in its notice, if one came."""
        value = int(self._notices[peer].view(torch.int64).item())
        return value - 1 if value else None

    def fail(self, peer: int) -> None:
        notice = torch.tensor([peer + 1], dtype=torch.int64).view(torch.uint8)
        for other in self._notices:
            if other == peer:
                continue
            try:
                self._kept.append((self.group.send([notice], other, _NOTICE_TAG), notice))
            except RuntimeError:
                continue  # that peer is gone too; the ones that can be reached are being told


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
        try:
            self.work.wait(timedelta(seconds=self.owner.timeout))
        except RuntimeError as error:
            raise self.owner.explain(self.peer, self.what, error) from error


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise TransportError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _timeout_of(group: dist.ProcessGroup) -> float:
    """The group's own timeout, in seconds; torch has no public getter for it."""
    try:
        options = group._get_backend(torch.device("cpu")).options
        return float(options._timeout.total_seconds())
    except (RuntimeError, AttributeError):
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())
