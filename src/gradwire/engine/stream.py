"""The driver on a stream: runs rounds one after the other, as NCCL wants it.

There is no thread and no queue: `begin` puts a round's kernels and messages on the communicator's
side stream, stage by stage (see engine/schedule.py), and returns. The host waits for nothing: the
stream waits for batches. On the CPU, which has no streams, waits are the caller's, and a round has
ended when `begin` returns; that is how it is tested.

NCCL has no tags, so what ranks issue on one communicator must have one order on all of them. The
rule: a round is queued by the thread that issues it, before the call returns, and so are the rounds
that follow it, whose end is known then. So a ticket runs depth-first, tickets of all owners follow
each other in the order of the program, and whatever else a group's ranks issue on it, such as DDP's
broadcasts, keeps that order too. Programs that issue from several threads order them, as for NCCL.

Memory needs no care: the next round's kernels are behind this one's messages on the stream.

Nor does anyone look at what has come. Layouts were compared before, the link keeps the order, and
NCCL is trusted with the bytes. A payload that cannot be decoded shows in a verdict, which the GPU
leaves for the host to find at a later `begin`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from gradwire.engine.core import Actions, Do, Run
from gradwire.engine.graph import Graph, Kind
from gradwire.engine.schedule import Wave
from gradwire.engine.streams import on
from gradwire.engine.threads import Flight
from gradwire.errors import TransportError
from gradwire.transport.link import OrderedLink, Posting
from gradwire.transport.protocol import Pending


class Checkable(Protocol):
    """Whether payloads were good; known once the stream has come to it."""

    def known(self) -> bool:
        """Whether `check` need not wait; asking does not wait either."""
        ...

    def check(self) -> None:
        """Raise CodecError if one was not."""
        ...


class StreamWork(Protocol):
    """What this driver asks of a round; all of it is called with the stream current.

    Attributes:
        graph, schedule: what to do.
        kernel_calls: calls of kernels so far.
    """

    graph: Graph
    kernel_calls: int

    @property
    def schedule(self) -> Sequence[Wave]: ...

    def start(self) -> None:
        """Take memory, and have the stream wait for the caller's values."""
        ...

    def memory(self, *buffers: int) -> torch.Tensor:
        """The message (uint8) of these buffers, where the kernels have it."""
        ...

    def compute(self, task: int) -> None:
        """Queue the kernels of an encode, merge or decode."""
        ...

    def verdicts(self) -> Sequence[Checkable]:
        """On the payloads that were decoded; called once, when everything is queued."""
        ...

    def finish(self) -> None:
        """Give memory back; called once, when everything is queued."""
        ...


class StreamDriver:
    """Runs rounds over one link.

    Args:
        link: moves the bytes.
        stream: on which kernels run, and which waits for messages; None on the CPU.
        failed: is told what breaks the group.
    """

    def __init__(
        self,
        link: OrderedLink,
        stream: torch.cuda.Stream | None,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.link = link
        self.stream = stream
        self._failed = failed
        self._lock = threading.RLock()
        self._verdicts: deque[Checkable] = deque()

    def begin(self, flight: Flight, work: StreamWork) -> int:
        """Queue a round; the bytes that it sends.

        Raises:
            TransportError: a peer or link failed.
            CodecError: an earlier round decoded what no encode makes; that breaks the group too.
        """
        with self._lock:
            try:
                while self._verdicts and self._verdicts[0].known():
                    self._verdicts.popleft().check()
                with on(self.stream):
                    wire_bytes = self._run(flight, work)
                    self._verdicts.extend(work.verdicts())
            except Exception as error:
                self._fail(error)
                raise
            except BaseException as error:  # a KeyboardInterrupt: half of it is queued
                what = type(error).__name__
                self._fail(
                    TransportError(f"rank {self.link.rank}: {what} while a collective started")
                )
                raise
        return wire_bytes

    def _run(self, flight: Flight, work: StreamWork) -> int:
        """Queue the stages; the core says what may run, the schedule in which order."""
        core, graph = flight.ticket.owner.core, work.graph
        run, actions = core.begin(flight.ticket.place, graph, flight)
        assert actions, (
            "an older ticket of this owner is under way: rounds run where they are issued"
        )
        work.start()
        ready = _Ready(core.started(run))
        under_way: deque[tuple[Pending, Sequence[int]]] = deque()
        ended = wire_bytes = 0
        for stage in work.schedule:
            while ended < stage.ended:
                _land(core, run, under_way.popleft(), ready)
                ended += 1
            for task in stage.kernels:
                assert task in ready.kernels, f"{graph.describe(task)}: scheduled too early"
                work.compute(task)
                ready.take(core.done(run, task))
            if stage.messages:
                batch = [_message(work, task) for task in stage.messages]
                under_way.append((self.link.post(batch), stage.messages))
                wire_bytes += sum(m.memory.numel() for m in batch if not m.incoming)
        while under_way:
            _land(core, run, under_way.popleft(), ready)
        assert ready.free, "a schedule leaves nothing out"
        work.finish()
        return wire_bytes

    def _fail(self, error: BaseException) -> None:
        peer = error.peer if isinstance(error, TransportError) else None
        self._failed(error)
        self.link.fail(self.link.rank if peer is None else peer)


class _Ready:
    """What the core has released."""

    def __init__(self, actions: Actions) -> None:
        self.kernels: set[int] = set()
        self.free = False
        self.take(actions)

    def take(self, actions: Actions) -> None:
        for action in actions:
            if action.do is Do.KERNEL:
                self.kernels.update(action.tasks)
            self.free |= action.do is Do.FREE


def _land(core: Any, run: Run, batch: tuple[Pending, Sequence[int]], ready: _Ready) -> None:
    """A batch has ended."""
    pending, tasks = batch
    pending.wait()
    for task in tasks:
        if run.graph.kind[task] is Kind.RECV:
            ready.take(core.done(run, task))
        else:
            ready.take(core.posted(run, task))
            ready.take(core.sent(run, task))


def _message(work: StreamWork, task: int) -> Posting:
    graph = work.graph
    incoming = graph.kind[task] is Kind.RECV
    return Posting(work.memory(*graph.message(task)), graph.peer[task], incoming)
