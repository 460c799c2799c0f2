"""A process group's own messages as a link: NCCL's; or gloo's without their tags, for tests.

Facts about torch's NCCL groups that shape this file, from its documentation and source (it has not
been run on NCCL):
- only messages that are issued together (a coalesced group) may be between several pairs at a time;
  all of them go through the group's one communicator, on its own stream;
- `torch.distributed.batch_isend_irecv` coalesces only for groups of torch's own class, not for
  groups of the backend gradwire, so its parts are called here;
- a coalesced group has one work; its `wait()` makes the current stream wait, whereas
  `wait(timeout)` blocks the host;
- all ranks must take part in creating the communicator, but some may have no message in the first
  batch; so a broadcast precedes it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire.errors import TransportError
from gradwire.transport.link import Posting
from gradwire.transport.torch_p2p import destroyed, end_waits

# The tag of all messages on gloo, which must not match the user's own messages.
_TAG = (1 << 31) - 2


class HostTransport(Protocol):
    """What a link uses of the host transport of the same ranks: see TorchP2P."""

    timeout: float

    @property
    def waiting(self) -> dict[Any, float]: ...

    def explain(self, peer: int, what: str, error: RuntimeError) -> TransportError: ...

    def fail(self, peer: int) -> None: ...


class QueuedP2P:
    """Messages within a process group, in issue order; all ranks construct it together.

    Args:
        group: a process group of tensors on `device`.
        device: of the messages.
        host: the host transport, which explains a failed wait.

    Raises:
        TransportError: a peer did not answer.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, host: HostTransport) -> None:
        self._group = weakref.ref(group)  # see TorchP2P
        self.device = device
        self.host = host
        self.rank = group.rank()
        self.world_size = group.size()
        self.coalesces = bool(group._get_backend(device).supports_coalescing)
        if self.world_size > 1:
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            self._queued([(0, group.broadcast(first, 0))]).wait()

    def post(self, batch: Sequence[Posting]) -> _Batch:
        peer = batch[0].peer
        group = self._group()
        if group is None:
            raise destroyed(self.rank)
        try:
            if self.coalesces:
                group._start_coalescing(self.device)
            works = []
            try:
                for message in batch:
                    peer = message.peer  # a connection that is known to be broken raises here
                    works.append((peer, self._issue(group, message)))
            finally:
                if self.coalesces:
                    works = [(peer, group._end_coalescing(self.device))]
            return self._queued(works)
        except RuntimeError as error:
            raise self.host.explain(peer, "exchange with", error) from error

    def _issue(self, group: dist.ProcessGroup, message: Posting) -> dist.Work:
        start = group.recv if message.incoming else group.send
        work: dist.Work = start([message.memory], message.peer, 0 if self.coalesces else _TAG)
        return work

    def _queued(self, works: Iterable[tuple[int, dist.Work]]) -> _Batch:
        return _Batch(self, list(works))

    def fail(self, peer: int) -> None:
        self.host.fail(peer)

    def interrupt(self) -> None:
        # Of gloo, a rank may wait for one that has stopped, and whose connection to it is good.
        group = self._group()
        if not (self.coalesces or group is None or self.world_size == 1):
            end_waits(group)


class _Wait:
    """A wait in the host transport's table of waits."""

    def __init__(self, peer: int) -> None:
        self.peer = peer


class _Batch:
    def __init__(self, link: QueuedP2P, works: list[tuple[int, dist.Work]]) -> None:
        self._link = link
        self._works = works

    def wait(self) -> None:
        host = self._link.host
        for peer, work in self._works:
            waiting = _Wait(peer)
            host.waiting[waiting] = time.monotonic()
            try:
                if self._link.coalesces:
                    work.wait()  # a timeout would block the host
                else:
                    work.wait(timedelta(seconds=host.timeout))
            except RuntimeError as error:
                raise host.explain(peer, "exchange with", error) from error
            finally:
                del host.waiting[waiting]
        self._works = []
