"""Ranks that tell each other values, and agree: of one process group, or of several.

Several groups, such as those of shards and of replicas, are asked one after the other: what all
ranks of the first hold is what each of them tells in the second.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, Generic, TypeVar

from gradwire.control.channel import Member
from gradwire.control.description import digest
from gradwire.errors import ConfigError, TransportError, again, already_global

T = TypeVar("T")
Steps = Generator["Future[Any]", Any, T]

_POLL_S = 0.2


def _nothing(*_: Any) -> None:
    pass


class Ranks:
    """The ranks that agree: of one group, or of several, one after the other.

    Uses of a key are counted, so that all ranks use it in the same order. A single rank answers at
    once.

    Args:
        members: this rank's memberships, such as that of shards and then that of replicas; None: a
            group of one rank.
        key: of all that they tell, the same on all ranks of a group; or one for each group.
        check: of the groups: called a few times per second while this rank waits; what it raises
            ends the wait.
        fail: called, on the thread that waits, with a TransportError that ends the wait. A rank
            whose first group has failed does not come to the second, whose ranks wait for it.

    Attributes:
        size: how many ranks there are.
        rank: the place of this one in what they tell: the last group's number counts most.
        check, fail: as above.
    """

    def __init__(
        self,
        members: Sequence[Member | None],
        key: str | Sequence[str],
        check: Callable[[], None] = _nothing,
        fail: Callable[[TransportError], None] = _nothing,
    ) -> None:
        keys = [key] * len(members) if isinstance(key, str) else key
        every = zip(members, keys, strict=True)
        self._members = [(member, key) for member, key in every if member is not None]
        self.check, self.fail = check, fail
        self.size, self.rank = 1, 0
        for member, _ in self._members:
            self.rank += member.rank * self.size
            self.size *= member.world_size

    def tell(self, key: str, value: Any) -> PendingResult[list[Any]]:
        """What all ranks tell, by rank.

        Args:
            value: for JSON, at most 4 MiB in all that a rank tells in a group.
        """
        return PendingResult(self, self._told(self._named(key), value))

    def agree(self, key: str, what: str, lines: Sequence[str]) -> PendingResult[int]:
        """Verify that all ranks hold the same lines; see `Member.agree`.

        Args:
            what: the subject, for errors.

        Returns:
            The digest in the first group. Where two ranks of a group differ, all ranks of it, and
            of the groups after it, get a ConfigError with the first difference, and who holds what.
        """
        return PendingResult(self, self._agreed(self._named(key), what, lines))

    def _named(self, key: str) -> list[tuple[Member, str]]:
        """The memberships, and the name of the next use of a key in each."""
        names = [(member, f"{of}/{key}" if of else key) for member, of in self._members]
        return [(member, member.counted(name)) for member, name in names]

    def _told(self, named: list[tuple[Member, str]], value: Any) -> Steps[list[Any]]:
        text = json.dumps([value] if not named else value).encode()
        for member, name in named:
            text = b"[" + b",".join((yield member.exchange(name, text))) + b"]"
        found: list[Any] = json.loads(text)
        for _ in named[1:]:
            found = [one for of in found for one in of]
        return found

    def _agreed(
        self, named: list[tuple[Member, str]], what: str, lines: Sequence[str]
    ) -> Steps[int]:
        numbers, refused = [] if named else [digest(1, what, lines)], None
        for number, (member, name) in enumerate(named):
            if number:  # what was refused in a group before
                told = yield member.exchange(f"{name}, before", str(refused or "").encode())
                said = next(filter(None, told), b"").decode()
                if said and refused is None:
                    refused = already_global(ConfigError(said), member.ranks)
            if refused is None:
                try:
                    numbers.append((yield member.agree(name, what, lines)))
                except ConfigError as error:
                    refused = error
        if refused is not None:
            raise refused
        return numbers[0]


class PendingResult(Generic[T]):
    """What ranks will have told, or agreed on.

    Args:
        ranks: whose `check` and `fail` a wait calls.
        steps: that lead to it. Each begins when the one before has ended, whether this rank waits
            or not.
    """

    def __init__(self, ranks: Ranks, steps: Steps[T]) -> None:
        self._whole: Future[T] = Future()
        self._ranks, self._steps = ranks, steps
        self._go_on()

    def _go_on(self, ended: Future[Any] | None = None) -> None:
        """Begin the next step."""
        try:
            if ended is None:
                step = next(self._steps)
            elif (error := ended.exception()) is not None:
                step = self._steps.throw(error)
            else:
                step = self._steps.send(ended.result())
        except StopIteration as end:
            self._whole.set_result(end.value)
        except Exception as error:
            self._whole.set_exception(error)
        else:
            step.add_done_callback(self._go_on)

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._whole.done()

    def result(self, check: Callable[[], None] | None = None, timeout: float | None = None) -> T:
        """Wait for all ranks.

        Args:
            check: called a few times per second; what it raises ends the wait.
            timeout: seconds; a later call may go on waiting.

        Raises:
            ConfigError: ranks differ.
            TransportError: a peer did not come, or a group is broken.
            TimeoutError: after `timeout` seconds.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            try:
                with suppress(FutureTimeout):
                    pause = max(0.0, min(_POLL_S, end - time.monotonic()))
                    if (error := self._whole.exception(pause)) is None:
                        return self._whole.result()
                    raise again(error)
                self._ranks.check()
            except TransportError as error:
                self._ranks.fail(error)
                raise
            if check is not None:
                check()
            if time.monotonic() >= end:
                raise FutureTimeout
