"""Rendezvous: the ranks of a group meet in the same incarnation of the group.

A group may be made anew over a store that still holds an earlier incarnation's keys, and requests
of processes that died or of ranks that are ahead. So rank 0 gives each incarnation a random name,
and a rank learns the name as the answer to a request with its own random token: no earlier entry
can be mistaken for the answer. Each place is taken once (compare-and-set), so a rank that returns
early does not re-enter the incarnation that it has left. A request carries how often the rank has
joined this group through its Channel, and rank 0 answers requests that have its own count: so ranks
that pass through the same incarnations at different times meet in the right ones.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any

from gradwire.control.journal import Journal
from gradwire.control.namespace import Namespace

_GROUP_KEY = "gradwire/control"


class Rendezvous:
    """A rank's request for its place; and, at rank 0, the answers to the others.

    Args:
        root: gradwire's keys on the server.
        store: the group's own store, with its prefixes; not kept.
        rank: this rank.
        attempts: (group, rank) -> how often it has joined; incremented here.
        patience: seconds, see `Journal`.
        garbled: called with an entry that cannot be parsed.
    """

    def __init__(
        self,
        root: Namespace,
        store: Any,
        rank: int,
        attempts: dict[tuple[str, int], int],
        patience: float,
        garbled: Callable[[bytes], None],
    ) -> None:
        self._root = root
        self._rank = rank
        self._garbled = garbled
        # The only key under the group's own prefixes: a random name for the group.
        group = store.compare_set(_GROUP_KEY, "", secrets.token_hex(8)).decode()
        self._attempt = attempts[group, rank] = attempts.get((group, rank), 0) + 1
        self._token = secrets.token_hex(8)
        self._declined: str | None = None
        self._answered: set[int] = set()
        group_space = root.below(f"groups/{group}")
        self._answers = group_space.below("answers")
        self._requests = Journal(group_space.below("requests"), patience)
        if rank != 0:
            request = {"rank": rank, "attempt": self._attempt, "token": self._token}
            self._requests.append(json.dumps(request).encode())

    def find(self) -> Namespace | None:
        """The incarnation's keys, once this rank has a place in it; None before."""
        name = self._token if self._rank == 0 else self._offered()
        if name is None or name == self._declined:
            return None
        space = self._root.below(f"incarnations/{name}")
        token = self._token.encode()
        if space.below("places").first(str(self._rank), token) != token:
            self._declined = name
            return None
        return space

    def answer(self) -> bool:
        """At rank 0: answer new requests with the incarnation's name; whether there were any."""
        entries = self._requests.new()
        answered = False
        for entry in entries:
            try:
                asked = json.loads(entry)
                rank, attempt, token = int(asked["rank"]), asked["attempt"], str(asked["token"])
            except (ValueError, TypeError, KeyError, RecursionError):
                self._garbled(entry)
                continue
            if attempt == self._attempt:
                self._answers.write(token, self._token.encode())
                self._answered.add(rank)
                answered = True
        return answered

    def expects(self, world_size: int) -> bool:
        """Whether rank 0 has yet to answer a rank."""
        return len(self._answered) < world_size - 1

    @property
    def has_gaps(self) -> bool:
        return self._requests.has_gaps

    def _offered(self) -> str | None:
        name = self._answers.read(self._token)
        return name.decode() if name and re.fullmatch(rb"[0-9a-f]{16}", name) else None
