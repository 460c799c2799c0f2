"""A result that other ranks have a part in, and the time by which it must be there."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from gradwire.errors import TransportError

T = TypeVar("T")


class Awaited(Generic[T]):
    """A future, and what it waits for.

    Args:
        post: runs a function on the control thread, where the future ends.
        timeout: seconds from now until it ends with an error.
        rank: who waits.
        what: it waits for, in a sentence such as "rank 1 did not come to {what}".
        late: called on the control thread when the time has run out, to find out who is missing.
        grace: seconds that `late` may take.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        timeout: float,
        rank: int,
        what: str,
        late: Callable[[Awaited[T]], None],
        grace: float,
    ) -> None:
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # nobody can cancel it
        self.timeout = timeout
        self.rank = rank
        self.what = what
        self.deadline = time.monotonic() + timeout
        self._post = post
        self._late: Callable[[Awaited[T]], None] | None = late
        self._grace = grace

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

    def fail_here(self, error: Exception) -> None:
        """End it now; on the control thread."""
        if not self.future.done():
            self.future.set_exception(error)

    def fail_without(self, ranks: list[int], more: bool = False) -> None:
        """End it because `ranks`, and perhaps `more`, have not come in time."""
        named = ", ".join(map(str, ranks))
        who = f"ranks {named} and others" if more else f"ranks {named}"
        if not more and len(ranks) == 1:
            who = f"rank {named}"
        self.fail(
            TransportError(
                f"rank {self.rank}: {who} did not come to {self.what} within {self.timeout:g} s. "
                "Look whether that process lives, and makes the same calls",
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
                    f"rank {self.rank}: {self.what} did not end within {self.timeout:g} s, and "
                    "the group's store does not answer"
                )
            )
