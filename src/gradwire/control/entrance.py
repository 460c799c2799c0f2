"""How a rank finds its place in the incarnation of the group that its peers mean.

A group may be made anew over the same store, where an earlier incarnation's keys still are, and
others' requests: of processes that died, or of ranks that are ahead. So an incarnation has a random
name, which rank 0 gives it, and a rank learns the name as the answer to a request that carries a
random token of its own: nothing that was there before can be taken for it. Each place is taken once
(compare-and-set), so that a rank that comes back early does not enter the incarnation that it has
left. Requests carry how often the rank has joined this group through its Channel, and rank 0
answers those that have its own count: ranks that pass through the same incarnations at different
times meet in the right ones.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any

from gradwire.control.journal import Journal
from gradwire.control.space import Space

_GROUP_KEY = "gradwire/control"


class Entrance:
    """A rank's search for its place; and, at rank 0, the answers to others.

    Args:
        root: of our part of the server.
        store: the group's own, with its prefixes; not kept.
        rank: whose place.
        attempts: how often each rank of each group has joined; counted on.
        patience: seconds, see `Journal`.
        garbled: called with what cannot be read.
    """

    def __init__(
        self,
        root: Space,
        store: Any,
        rank: int,
        attempts: dict[tuple[str, int], int],
        patience: float,
        garbled: Callable[[bytes], None],
    ) -> None:
        self._root = root
        self._rank = rank
        self._garbled = garbled
        # All that stands under the group's own prefixes is which group it is.
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

    def find(self) -> Space | None:
        """The incarnation's part of the store, once this rank has a place in it."""
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
        """Tell those who ask rank 0 its incarnation's name; whether there was anybody."""
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
        """Whether rank 0 has yet to answer somebody."""
        return len(self._answered) < world_size - 1

    @property
    def has_gaps(self) -> bool:
        return self._requests.has_gaps

    def _offered(self) -> str | None:
        name = self._answers.read(self._token)
        return name.decode() if name and re.fullmatch(rb"[0-9a-f]{16}", name) else None
