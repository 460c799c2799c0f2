"""One rank's part in one group, in the group's store; all of it runs on the store's thread."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from gradwire.control.agreement import Description
from gradwire.control.connection import Connection
from gradwire.control.journal import Journal
from gradwire.control.pending import Pending
from gradwire.control.space import Space
from gradwire.errors import ConfigError, TransportError

log = logging.getLogger("gradwire")

Fail = Callable[[Exception], None]

_GROUP_KEY = "gradwire/control"
_NAMED = 8  # of ranks that are missing, at most
_REMEMBERED = 1024  # differences found by others, before this rank has come


class _Agreement:
    """An agreement that this rank has come to and that is not complete."""

    def __init__(self, pending: Pending[int], mine: Description) -> None:
        self.pending = pending
        self.mine = mine
        self.other: int | None = None  # a rank that is known to differ


class Participant:
    """See the package's docstring for the protocol.

    Args:
        connection: to the store's server.
        store: the group's; let go by `begin`.
        attempts: how often a rank of a group has joined through this Channel.
        hear: called with (sender, notice).
    """

    def __init__(
        self,
        connection: Connection,
        store: Any,
        rank: int,
        world_size: int,
        timeout: float,
        attempts: dict[tuple[str, int], int],
        hear: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._connection = connection
        self._store: Any = store
        self._timeout = timeout
        self._attempts = attempts
        self._hear = hear
        self._attempt = 0
        self._token = secrets.token_hex(8).encode()
        self._name: bytes | None = None  # of the incarnation that this rank has a place in
        self._declined: bytes | None = None
        self._group: Space
        self._space: Space
        self._news: Journal
        self._requests: Journal | None = None  # rank 0's
        self._answered: set[int] = set()
        self._queued: deque[tuple[Callable[[], None], Fail | None]] = deque()
        self._exchanges: dict[str, Pending[list[bytes]]] = {}
        self._agreements: dict[str, _Agreement] = {}
        self._differing: dict[str, int] = {}
        self._ended: str | None = None  # why this rank's part is over
        self._warned = False

    # ---- joining and leaving

    def begin(self) -> None:
        store, self._store = self._store, None
        if self._connection.gone is not None:
            self.lost(self._connection.gone)
            return
        self._connection.participants.append(self)
        # The connection has no prefixes: under the group's own there is only its identity.
        prefixed = self._connection.prefixed(store)
        group = prefixed.compare_set(_GROUP_KEY, "", secrets.token_hex(8)).decode()
        del store, prefixed
        self._attempt = self._attempts.get((group, self.rank), 0) + 1
        self._attempts[(group, self.rank)] = self._attempt
        self._group = self._connection.root.below(f"groups/{group}")
        self._connection.look()
        requests = Journal(self._group.below("requests"), self._timeout)
        if self.rank == 0:
            self._requests = requests
            self._take_place(self._token)  # a name is a token of rank 0's
        else:
            request = {"rank": self.rank, "attempt": self._attempt, "token": self._token.decode()}
            requests.append(json.dumps(request).encode())
            self._connection.ring()

    def leave(self, record: bytes) -> None:
        if self in self._connection.participants:
            self._connection.participants.remove(self)
        if self._name is not None and self._ended is None:
            self._space.below("left").write(str(self.rank), record)
        self._end("this rank has left the group")

    @property
    def settled(self) -> bool:
        """Whether this rank has a place among the others."""
        return self._name is not None

    def when_settled(self, command: Callable[[], None], fail: Fail | None) -> None:
        """Run `command` once this rank has its place; or `fail`, if it never gets one."""
        if self._ended is not None:
            if fail is not None:
                fail(self._error(self._ended))
        elif self._name is None:
            self._queued.append((command, fail))
        else:
            command()

    def _look_for_place(self) -> None:
        """Take the place that rank 0 offers, unless it was taken in an earlier incarnation."""
        name = self._group.below("answers").read(self._token.decode())
        if name is None or name == self._declined or not re.fullmatch(rb"[0-9a-f]{16}", name):
            return
        self._take_place(name)

    def _take_place(self, name: bytes) -> None:
        space = self._connection.root.below(f"incarnations/{name.decode()}")
        if space.below("places").first(str(self.rank), self._token) != self._token:
            self._declined = name
            return
        self._name = name
        self._space = space
        self._news = Journal(space.below("news"), self._timeout)
        self._connection.look()
        while self._queued:
            command, _ = self._queued.popleft()
            command()

    def _answer_requests(self, requests: Journal) -> None:
        assert self._name is not None
        for entry in requests.new():
            try:
                asked = json.loads(entry)
                rank, attempt, token = int(asked["rank"]), asked["attempt"], str(asked["token"])
            except (ValueError, TypeError, KeyError):
                self._garbled(entry)
                continue
            if attempt == self._attempt:
                self._group.below("answers").write(token, self._name)
                self._answered.add(rank)
                self._connection.ring()

    # ---- what the store's thread asks

    @property
    def waits(self) -> bool:
        return (
            self._name is None
            or bool(self._exchanges or self._agreements)
            or self._news.has_gaps
            or (self.rank == 0 and len(self._answered) < self.world_size - 1)
        )

    @property
    def looks_again(self) -> bool:
        if self._name is None:
            return False
        return (
            self._news.has_gaps
            or (self._requests is not None and self._requests.has_gaps)
            or any(a.other is not None for a in self._agreements.values())
        )

    def look(self) -> None:
        try:
            self._look()
        except ValueError as error:
            self._connection.participants.remove(self)
            reason = f"what the group's store holds makes no sense ({error})"
            if self._end(reason):
                log.warning("gradwire: rank %d: %s", self.rank, reason)

    def _look(self) -> None:
        if self._name is None:
            self._look_for_place()
        if self._name is None:
            return
        if self._requests is not None:
            self._answer_requests(self._requests)
        for entry in self._news.new():
            self._read(entry)
        for key, agreement in list(self._agreements.items()):
            if agreement.other is not None:
                self._compare(key, agreement, agreement.other)

    def lost(self, reason: str) -> bool:
        return self._end(reason)

    # ---- news

    def tell(self, notice: str) -> None:
        """Tell all others; `notice` is JSON."""
        self._publish(f'"told": {notice}')

    def _publish(self, what: str) -> None:
        self._news.append(f'{{"from": {self.rank}, {what}}}'.encode())
        self._connection.ring()

    def _read(self, entry: bytes) -> None:
        try:
            news = json.loads(entry)
            sender = news["from"]
            if type(sender) is not int or not 0 <= sender < self.world_size:
                raise ValueError
            if sender == self.rank:
                return
            if isinstance(notice := news.get("told"), dict):
                self._hear(sender, notice)
            elif isinstance(key := news.get("exchanged"), str):
                self._exchanged(key)
            elif isinstance(key := news.get("agreed"), str):
                self._agreed(key)
            elif isinstance(key := news.get("differs"), str):
                self._hear_difference(key, sender)
            else:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._garbled(entry)

    def _garbled(self, entry: bytes) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "gradwire: rank %d ignores what it cannot read in the group's store, from now on "
                "in silence; somebody else writes there: %r",
                self.rank,
                entry[:80],
            )

    # ---- exchanges

    def exchange(self, key: str, mine: bytes, pending: Pending[list[bytes]]) -> None:
        if pending.over:
            return
        if key in self._exchanges:
            pending.fail(self._twice(key))
            return
        self._exchanges[key] = pending
        space = self._space.below(f"exchanges/{key}")
        space.write(str(self.rank), mine)
        if space.add("n") == self.world_size:
            self._publish(f'"exchanged": {json.dumps(key)}')
            self._exchanged(key)

    def _exchanged(self, key: str) -> None:
        pending = self._exchanges.get(key)
        if pending is None:
            return
        found = self._space.below(f"exchanges/{key}").read_all(self._all_ranks())
        if found is None:
            raise ValueError  # not all are there, so that the news was forged
        del self._exchanges[key]
        pending.succeed(found)

    # ---- agreements

    def agree(self, key: str, mine: Description, pending: Pending[int]) -> None:
        if pending.over:
            return
        if key in self._agreements:
            pending.fail(self._twice(key))
            return
        agreement = self._agreements[key] = _Agreement(pending, mine)
        space = self._space.below(f"agreements/{key}")
        held = f"{mine.digest.hex()} {self.rank}".encode()
        first = space.first("digest", held)
        space.below("came").write(str(self.rank), held)
        if first.split(b" ")[0] != held.split(b" ")[0]:
            space.below("bodies").write(str(self.rank), mine.packed())
            self._publish(f'"differs": {json.dumps(key)}')
            holder = re.fullmatch(rb"[0-9a-f]{64} ([0-9]{1,9})", first)
            if holder is not None:
                self._compare(key, agreement, int(holder[1]))
            else:
                self._garbled(first)
            return
        if first == held:
            space.below("bodies").write(str(self.rank), mine.packed())
        if key in self._differing:
            self._compare(key, agreement, self._differing.pop(key))
        elif space.add("n") == self.world_size:
            self._publish(f'"agreed": {json.dumps(key)}')
            self._agreed(key)

    def _agreed(self, key: str) -> None:
        agreement = self._agreements.pop(key, None)
        if agreement is not None:
            agreement.pending.succeed(agreement.mine.number)

    def _hear_difference(self, key: str, sender: int) -> None:
        agreement = self._agreements.get(key)
        if agreement is not None:
            if agreement.other is None:  # else this rank differs itself, and knows from whom
                self._compare(key, agreement, sender)
        elif len(self._differing) < _REMEMBERED:
            self._differing.setdefault(key, sender)

    def _compare(self, key: str, agreement: _Agreement, other: int) -> None:
        """End the agreement, since `other` holds something else, once that can be read."""
        agreement.other = other
        body = self._space.below(f"agreements/{key}/bodies").read(str(other))
        if body is None:
            return  # it is being written
        try:
            theirs = Description.unpacked(other, body)
        except ValueError:
            self._garbled(body)
            theirs = Description(other, ("(what cannot be read)",))
        if theirs.lines == agreement.mine.lines:
            agreement.other = None  # the news was not true
            self._garbled(body)
            return
        del self._agreements[key]
        agreement.pending.fail(ConfigError(agreement.mine.difference(theirs)))

    # ---- small questions

    def first(self, key: str, value: bytes, reply: Future[bytes]) -> None:
        self._reply(reply, lambda: self._space.below("firsts").first(key, value))

    def left(self, rank: int, reply: Future[bytes | None]) -> None:
        self._reply(reply, lambda: self._space.below("left").read(str(rank)))

    def _reply(self, reply: Future[Any], ask: Callable[[], Any]) -> None:
        try:
            reply.set_result(ask())
        except Exception as error:
            reply.set_exception(self._error(str(error)))
            raise

    # ---- ends

    def expire(self, pending: Pending[Any]) -> None:
        """The time of `pending` has run out: end it with the ranks that have not come."""
        if self._ended is not None:
            return  # it has ended with that
        if self._name is None:
            pending.fail_without([0])
            return
        for key, exchange in list(self._exchanges.items()):
            if exchange is pending:
                del self._exchanges[key]
                self._fail_without_missing(pending, self._space.below(f"exchanges/{key}"))
        for key, agreement in list(self._agreements.items()):
            if agreement.pending is pending:
                del self._agreements[key]
                if agreement.other is not None:
                    other = agreement.other
                    reason = f"rank {other} holds another {pending.what}, and has not said what"
                    pending.fail(self._error(reason, other))
                else:
                    came = self._space.below(f"agreements/{key}/came")
                    self._fail_without_missing(pending, came)

    def _fail_without_missing(self, pending: Pending[Any], came: Space) -> None:
        missing = came.missing(self._all_ranks(), _NAMED + 1)
        if missing:
            pending.fail_without(missing[:_NAMED], more=len(missing) > _NAMED)
        else:
            pending.fail(
                self._error(
                    f"all ranks came to {pending.what} as {pending.timeout:g} s ran out, and "
                    "other ranks may hold it for complete: give the group more time"
                )
            )

    def _end(self, reason: str) -> bool:
        """End what is pending, and let the connection go; returns whether anything was pending."""
        self._ended = self._ended or reason
        for name in ("_group", "_space", "_news", "_requests"):
            self.__dict__.pop(name, None)
        fails: list[Fail] = [pending.fail for pending in self._exchanges.values()]
        fails += [agreement.pending.fail for agreement in self._agreements.values()]
        fails += [fail for _, fail in self._queued if fail is not None]
        self._exchanges.clear()
        self._agreements.clear()
        self._queued.clear()
        for fail in fails:
            fail(self._error(reason))
        return bool(fails)

    def _error(self, reason: str, peer: int | None = None) -> TransportError:
        return TransportError(f"rank {self.rank}: {reason}", peer)

    def _twice(self, key: str) -> ConfigError:
        return ConfigError(f"rank {self.rank} uses the key '{key}' twice: use each once")

    def _all_ranks(self) -> list[str]:
        return [str(rank) for rank in range(self.world_size)]
