"""A meeting that has begun, and how it ends alike on all ranks of all replicas.

One applies what all can apply. Ranks of a replica tell each other whether they have the averages,
then the other replicas, and then each other what those have said. Their words travel as averages
do, in one way of the network; the control channel, which polls a store, would need ten.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.collectives import AllGather
from gradwire.collectives.calling import begin
from gradwire.engine import Outcome, Owner
from gradwire.errors import ConfigError, GradwireError, TransportError, again
from gradwire.outer_loop.fragment import Fragment
from gradwire.waiting import result_of, until_set

WORD = 1024  # bytes that a rank tells
_REASON, _NAME = 300, 100  # characters of an error, and of a weight's name, in them


@dataclass(eq=False)
class OuterMeeting:
    """A fragment's meeting that has begun.

    Attributes:
        step: the optimizer step after which it began.
        values: differences, which averages replace.
        by: lr and momentum of the outer step.
        before: what members had left out, as it was.
        fault: the name of a weight that is not finite, or "".
        prepared: whether it may be applied elsewhere: this rank has told that it can.
        is_there: whether all ranks of all replicas have the averages.
        tells: whether ranks have begun to tell each other so.
        steps: whether it is being applied.
        words: the collectives in which they have.
    """

    fragment: Fragment
    step: int
    values: list[torch.Tensor]
    by: tuple[float, float]
    before: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    fault: str = ""
    begun: float = field(default_factory=time.perf_counter)
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    prepared: bool = False
    is_there: bool = False
    tells: bool = False
    steps: bool = False
    words: list[Outcome] = field(default_factory=list)

    def commit(self, between: Owner, inside: Owner | None) -> None:
        """Raise unless all ranks of all replicas have the averages and may apply them.

        Once this rank has told other replicas that it can, they may apply them: where it does not
        hear from one of them, it is left `prepared`.

        Args:
            between: of the replicas, which has ended this meeting.
            inside: of this replica's ranks; None: it has one.

        Raises:
            ConfigError: replicas differ, or a weight is not finite.
            TransportError: a rank has not met, or failed.
        """
        number = self.fragment.fingerprint()  # while messages travel
        with between.awaited():
            until_set(self.ended)
        error, self.tells = None if self.error is None else again(self.error), True
        for owner in (inside, between, inside):
            if owner is None:
                continue
            self.prepared |= owner is between and error is None
            reason, fault = _short(str(error or ""), _REASON), _short(self.fault, _NAME)
            mine = [reason, self.prepared, self.step, number, *self.by, fault]
            try:
                found = self._told(owner, mine)
                absent = [(rank, *one[:2]) for rank, one in enumerate(found) if one[0]]
                if absent and error is None:
                    # One that has told no other replica that it can apply them ends it for all.
                    self.prepared &= owner is not between and all(one[2] for one in absent)
                    rank, reason, _ = absent[0]
                    raise TransportError(f"rank {owner.comm.ranks[rank]} has not met: {reason}")
                if owner is between and error is None:
                    self._check([one[2:] for one in found], owner.comm.ranks)
            except ConfigError as raised:  # all replicas find the same
                error, self.prepared = error or raised, False
            except GradwireError as raised:
                error = error or raised
        if error is not None:
            raise error

    def _check(self, told: Sequence[Sequence[Any]], ranks: Sequence[int]) -> None:
        """Raise ConfigError unless all replicas may apply what they have."""
        faults = [(rank, fault) for rank, (*_, fault) in enumerate(told) if fault]
        if faults:
            rank, name = faults[0]
            raise ConfigError(
                f"outer: rank {ranks[rank]}: parameter {name} is not finite after step "
                f"{self.step}: nothing of this meeting was applied; go on from a checkpoint"
            )
        for at, what in enumerate(("optimizer steps", "outer weights", "lr", "momentum")):
            found = [one[at] for one in told]
            common, many = Counter(found).most_common(1)[0]
            if many < len(found):
                rank = next(r for r, value in enumerate(found) if value != common)
                known = 2 * many > len(found)
                other = "most replicas" if known else f"rank {ranks[found.index(common)]}"
                values = "" if at == 1 else f": {found[rank]}, not {common}"
                raise ConfigError(
                    f"outer: rank {ranks[rank]} differs from {other} in {what}{values}; they must "
                    "be equal: load the same checkpoint everywhere, or call recover(), and set lr "
                    "and momentum alike between two meetings"
                )

    def _told(self, owner: Owner, value: Any) -> list[Any]:
        """What every rank of an owner's group tells, by rank."""
        ranks, text = owner.comm.world_size, json.dumps(value).encode()
        if ranks == 1:
            return [value]
        mine = torch.frombuffer(bytearray(text.ljust(WORD)), dtype=torch.uint8)
        every = mine.new_empty(ranks * WORD)
        running, found = begin(owner, AllGather(mine, into=every), "words")
        with owner.awaited():
            self.words.append(result_of(running))
        return [json.loads(bytes(one.numpy())) for one in found.split(WORD)]


def _short(text: str, most: int) -> str:
    """The beginning of a text, in characters of which JSON makes two at most."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:most])
