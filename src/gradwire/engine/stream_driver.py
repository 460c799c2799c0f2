"""The driver on a stream: runs rounds one after the other, as NCCL requires.

It has no thread and no queue: `run` puts a round's kernels and messages on the communicator's side
stream, stage by stage (see engine/schedule.py), and returns. The host does not wait: the
stream waits for batches. The CPU has no streams: there, the caller waits, and a round has ended
when `run` returns; tests run it so.

NCCL has no tags, so all ranks must issue their operations on a communicator in the same order. The
rule: the thread that issues a round queues it, and the rounds that follow it, before the call
returns. So a ticket runs depth-first, and tickets of all owners follow each other in program order,
together with anything else that the ranks issue on the group, such as DDP's broadcasts. A program
that issues from several threads must order them itself, as for NCCL.

Memory is reused without further synchronisation: on the stream, the next round's kernels come after
this round's messages.

Messages have no headers to check: layouts were compared before, the link keeps the order, and NCCL
delivers the bytes intact. A payload that cannot be decoded shows in a verdict, which the GPU writes
and the host reads at a later `run`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gradwire.engine.cuda_streams import on
from gradwire.engine.graph import Graph, Kind
from gradwire.engine.schedule import Wave
from gradwire.errors import TransportError
from gradwire.transport.link import OrderedLink, Posting
from gradwire.transport.protocol import Pending


class Checkable(Protocol):
    """Whether payloads could be decoded; known once the stream has reached it."""

    def known(self) -> bool:
        """Whether `check` would return without waiting; does not wait itself."""
        ...

    def check(self) -> None:
        """Raise CodecError if a payload could not be decoded."""
        ...


class StreamWork(Protocol):
    """A collective that this driver runs; its methods are called with the stream current.

    Attributes:
        graph, schedule: its tasks.
        kernel_calls: calls of kernels so far.
    """

    graph: Graph
    kernel_calls: int

    @property
    def schedule(self) -> Sequence[Wave]: ...

    def start(self) -> None:
        """Allocate memory, and make the stream wait for the caller's values."""
        ...

    def memory(self, *buffers: int) -> torch.Tensor:
        """The memory (uint8) of the message of these buffers."""
        ...

    def compute(self, task: int) -> None:
        """Queue the kernels of an encode, merge or decode."""
        ...

    def verdicts(self) -> Sequence[Checkable]:
        """Verdicts on the decoded payloads; called once, when everything is queued."""
        ...

    def finish(self) -> None:
        """Release memory; called once, when everything is queued."""
        ...


class StreamDriver:
    """Runs rounds over one link.

    Args:
        link: carries the messages.
        stream: runs the kernels, and waits for messages; None on the CPU.
        failed: called with the error that breaks the group.
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

    def run(self, work: StreamWork) -> int:
        """Queue a round.

        Returns:
            The bytes that it sends.

        Raises:
            TransportError: a peer or link failed.
            CodecError: an earlier round received a payload that cannot be decoded; the group
                breaks.
        """
        with self._lock:
            try:
                while self._verdicts and self._verdicts[0].known():
                    self._verdicts.popleft().check()
                with on(self.stream):
                    wire_bytes = self._queue(work)
                    self._verdicts.extend(work.verdicts())
            except Exception as error:
                self._fail(error)
                raise
            except BaseException as error:  # a KeyboardInterrupt: the round is queued in part
                what = type(error).__name__
                self._fail(
                    TransportError(f"rank {self.link.rank}: {what} while a collective started")
                )
                raise
        return wire_bytes

    def _queue(self, work: StreamWork) -> int:
        """Queue the stages, in the schedule's order."""
        work.start()
        under_way: deque[Pending] = deque()
        ended = wire_bytes = 0
        for stage in work.schedule:
            while ended < stage.ended:
                under_way.popleft().wait()
                ended += 1
            for task in stage.kernels:
                work.compute(task)
            if stage.messages:
                batch = [_message(work, task) for task in stage.messages]
                under_way.append(self.link.post(batch))
                wire_bytes += sum(m.memory.numel() for m in batch if not m.incoming)
        while under_way:
            under_way.popleft().wait()
        work.finish()
        return wire_bytes

    def _fail(self, error: BaseException) -> None:
        peer = error.peer if isinstance(error, TransportError) else None
        self._failed(error)
        self.link.fail(self.link.rank if peer is None else peer)


def _message(work: StreamWork, task: int) -> Posting:
    graph = work.graph
    incoming = graph.kind[task] is Kind.RECV
    return Posting(work.memory(*graph.message(task)), graph.peer[task], incoming)
