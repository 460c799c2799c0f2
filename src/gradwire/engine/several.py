"""Agreements over several process groups, one after the other; and work with the peers of one.

A rank that fails in one group does not come to the next, where ranks that share no group with the
cause wait for it: so a failure breaks all groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import TypeVar

from gradwire.control import Ranks
from gradwire.engine.communicator import Communicator
from gradwire.errors import TransportError

T = TypeVar("T")

_POLL_S = 0.2
_NAMING_S = 1.0


def ranks_of(
    comms: Sequence[Communicator],
    key: str | Sequence[str] = "",
    check: Callable[[], None] = lambda: None,
    breaks: bool = True,
) -> Ranks:
    """All ranks of these groups.

    Args:
        key: of what they tell, the same on all ranks; or one for each group.
        check: called while this rank waits; what it raises ends the wait. Where a group breaks, a
            wait in it ends by itself.
        breaks: whether a TransportError, of a peer that did not come for example, breaks all of the
            groups: what all ranks call at one place. Else it ends the wait alone.
    """

    def fail_all(error: TransportError) -> None:
        for comm in comms if breaks else ():
            comm.fail(error)

    return Ranks([comm.member for comm in comms], key, check, fail_all)


def run_with_peers(comm: Communicator, task: Callable[[], T]) -> T:
    """What a task that works with peers returns, on a worker thread: see `Workers.submit`.

    Raises:
        TransportError: a peer did not come, or the group is broken. What the task raises breaks it,
            since peers wait for this rank; the error names the rank that failed first.
    """
    pending = comm.workers.submit(task)
    try:
        while True:
            with suppress(FutureTimeout):
                return pending.result(_POLL_S)
            comm.check()
    except Exception as error:
        comm.fail(error)
        deadline = time.monotonic() + _NAMING_S
        while comm.error is None and time.monotonic() < deadline:
            time.sleep(0.01)  # the watchdog has heard of a failure, and asks whose it is
        raise comm.error or error from error
