"""A thread pool for steps that may block. It grows on demand, and idle threads end.

gloo can neither poll a message nor call back, so each wait needs a thread. A *lane* runs its steps
in order and holds a thread only while it has steps: two waits on different lanes do not block each
other.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

from gradwire.engine.trace import Timeline

log = logging.getLogger("gradwire")

_IDLE_S = 5.0  # after which a thread ends

Step = partial[None]
T = TypeVar("T")


def ending() -> bool:
    """Whether this process is ending: what fails in the background then is of no use to anybody."""
    return not threading.main_thread().is_alive()


class Workers:
    """A pool of daemon threads, started on demand."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._idle = 0
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()

    def run(self, task: Callable[[], None]) -> None:
        """Call `task` on a thread of the pool; exceptions are logged."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._serve, name="gradwire-worker", daemon=True)
                self._threads.add(thread)
                thread.start()
        self._tasks.put(task)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Call `task` on a thread of the pool; what it returns or raises. A signal interrupts who
        waits for the future, but not who waits for a message in torch's C++."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(task())
            except BaseException as error:
                result.set_exception(error)

        self.run(run)
        return result

    def finish(self, seconds: float) -> bool:
        """Wait until no task runs; whether that came within `seconds`."""
        with self._lock:
            return self._lock.wait_for(lambda: self._idle == len(self._threads), seconds)

    def __len__(self) -> int:
        """The number of threads."""
        return len(self._threads)

    def owns(self, thread: threading.Thread) -> bool:
        """Whether `thread` is one of these."""
        return thread in self._threads

    def _serve(self) -> None:
        me = threading.current_thread()
        while True:
            try:
                task = self._tasks.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._idle:
                        continue  # a task is on its way
                    self._idle -= 1
                    self._threads.discard(me)
                    return
            try:
                task()
            except BaseException:
                if not ending():
                    log.exception("gradwire: a task failed")
            with self._lock:
                self._idle += 1
                self._lock.notify_all()
            del task  # else it would live until the next one arrives


class Lane:
    """A serial queue of steps.

    Args:
        workers: the thread pool that runs them.
        name: in traces.
        failed: called with what a step raises.
        trace: returns the trace that records the steps, or None.
        stopped: whether to drop steps instead of running them.
    """

    def __init__(
        self,
        workers: Workers,
        name: str,
        failed: Callable[[BaseException], None],
        trace: Callable[[], Timeline | None],
        stopped: Callable[[], bool],
    ) -> None:
        self._workers = workers
        self._name = name
        self._failed = failed
        self._trace = trace
        self._stopped = stopped
        self._lock = threading.Lock()
        self._steps: deque[tuple[float, Step, bool]] = deque()
        self._busy = False

    def put(self, function: Callable[..., None], *arguments: object) -> None:
        """Call `function` after all earlier steps."""
        self._put(partial(function, *arguments), False)

    def put_always(self, function: Callable[..., None], *arguments: object) -> None:
        """As `put`, but the step runs even if the lane is stopped."""
        self._put(partial(function, *arguments), True)

    def _put(self, step: Step, always: bool) -> None:
        with self._lock:
            self._steps.append((time.perf_counter(), step, always))
            if self._busy:
                return
            self._busy = True
        self._workers.run(self._drain)

    def _drain(self) -> None:
        threading.current_thread().name = f"gradwire-{self._name}"  # in traces and debuggers
        free = 0.0  # when this thread became idle
        while True:
            with self._lock:
                if not self._steps:
                    self._busy = False
                    return
                posted, step, always = self._steps.popleft()
            trace = self._trace()
            begun = None if trace is None else trace.begin()
            try:
                if always or not self._stopped():
                    step()
            except BaseException as error:
                self._failed(error)
            if trace is not None and begun is not None:
                trace.end(begun, self._name, describe(step), begun[0] - max(posted, free))
            free = time.perf_counter()
            del step


class TicketLanes(NamedTuple):
    """The lanes of one ticket: one waits for receives, one for sends."""

    inbound: Lane
    outbound: Lane


def describe(step: Step) -> str:
    """A step in words, with its task."""
    name = step.func.__name__.lstrip("_").replace("_", " ")
    run, *rest = step.args or (None,)
    if isinstance(run, int):
        return f"{name}: round {run}"
    if rest and isinstance(rest[0], tuple):
        return f"{name}: {len(rest[0])} receives"
    return f"{name}: {run.graph.describe(rest[0])}" if rest else name
