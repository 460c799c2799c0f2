"""A future that other ranks take part in, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from gradwire.errors import TransportError

T = TypeVar("T")


class PendingResult(Generic[T]):
    """A future with a deadline.

    Args:
        post: runs a function on the control thread, which completes the future.
        timeout: seconds from now until it fails.
        rank: the rank that waits.
        what: what it waits for, for errors such as "rank 1 did not reach {what}".
        late: called on the control thread at the deadline, to find the missing ranks.
        grace: seconds that `late` may take.
        shown: what its future fails with, for an error in the group's own ranks.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        timeout: float,
        rank: int,
        what: str,
        late: Callable[[PendingResult[T]], None],
        grace: float,
        shown: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> None:
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # it cannot be cancelled
        self.timeout = timeout
        self.rank = rank
        self.what = what
        self.since = time.monotonic()
        self.deadline = self.since + timeout
        self._post = post
        self._late: Callable[[PendingResult[T]], None] | None = late
        self._grace = grace
        self._shown = shown

    @property
    def over(self) -> bool:
        return self.future.done()

    def succeed(self, result: T) -> None:
        def end() -> None:
            if not self.future.done():
                self.future.set_result(result)

        self._post(end)

    def fail(self, error: Exception) -> None:
        self._post(lambda: self.fail_here(error))

    def fail_here(self, error: BaseException) -> None:
        """Fail at once; on the control thread."""
        if not self.future.done():
            self.future.set_exception(self._shown(error))

    def fail_without(self, ranks: list[int], more: bool = False) -> None:
        """Fail because `ranks`, and perhaps `more`, have not come in time."""
        named = ", ".join(map(str, ranks))
        who = f"ranks {named} and others" if more else f"ranks {named}"
        if not more and len(ranks) == 1:
            who = f"rank {named}"
        self.fail(
            TransportError(
                f"rank {self.rank}: {who} did not reach {self.what} within {self.timeout:g} s. "
                "Check that the process is alive and makes the same calls",
                peer=ranks[0],
            )
        )

    def expire(self) -> None:
        """The deadline has passed; on the control thread."""
        if self._late is not None:
            late, self._late = self._late, None
            self.deadline += self._grace
            late(self)
        else:
            self.fail_here(
                TransportError(
                    f"rank {self.rank}: {self.what} did not complete within {self.timeout:g} s, "
                    "and the group's store does not answer"
                )
            )
