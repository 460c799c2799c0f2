"""The watchdog of one process group: ranks find out together why a round does not complete.

A round that waits for long is *reported*: the first rank writes what it issued in that place, and
the others compare. A late rank is no error. The watchdog breaks the group on every rank, with an
error that names the rank and what it did, where

- two ranks issued different rounds in one place, by digest;
- two ranks wait for each other in two owners (engine/crossings.py);
- a peer has left the group, or detached the owner, before a place where it is needed;
- a peer reports that it has failed, or that its backward pass ended early, or its forward, and it
  has not issued the round;
- the process of a peer on this machine has ended, while this rank waits for a round, an exchange or
  an agreement.

For a silent peer, the timeout applies.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gradwire.engine.crossings import Crossings, Place
from gradwire.engine.owner import Issue, Owner, Ticket
from gradwire.errors import (
    ConfigError,
    GradwireError,
    TransportError,
    already_global,
    in_global_ranks,
)

if TYPE_CHECKING:
    from gradwire.engine.communicator import Communicator

log = logging.getLogger("gradwire")

_LONG_S = 0.4  # after which a waiting round is examined, and at first reported
_LONGER = 1.25  # factor on the time until a report, after a reported round ended by itself
_PATIENCE = 0.75  # fraction of the timeout after which a wait is announced to peers
_BLAME_S = 0.5  # how long a failed peer may take to name the rank that caused its failure

E = TypeVar("E", bound=BaseException)


class Watchdog:
    """The listener of one communicator; see `gradwire.control.Channel.join`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._reported: dict[str, Place] = {}  # owner -> its last reported place
        self._long = _LONG_S  # after which a round is reported
        self._busy = False  # a report is in progress
        self._expected: dict[Place, Mapping[str, Any]] = {}  # issued by peers, not yet by this rank
        self._broken: dict[str, GradwireError] = {}  # broken owners that are not open here yet
        self._closed: dict[str, Mapping[str, Any]] = {}  # owners that a peer has closed
        self._left: dict[int, Mapping[str, int]] = {}  # peer -> {owner: tickets returned}
        self._refused: dict[int, Mapping[str, Any]] = {}  # peer -> its newest call that has raised
        self._blamed: dict[int, int] = {}  # failed peer -> the rank that it blames
        # Failed peer -> its error, and the rank in the whole job that it holds responsible.
        self._reasons: dict[int, tuple[str, int]] = {}
        self._waits: dict[int, int | None] = {}  # peer with a long wait -> the rank it waits for
        self._crossings = Crossings(comm.all_owners, self._tell)
        self._awaited: int | None = None  # the rank for which this rank has waited long
        self.doing: list[str] = []  # see Communicator.busy

    # ---- notices that this rank sends ----------------------------------------------------------

    def tell_failure(self, error: BaseException, blamed: int, owner: Owner | None) -> None:
        """Tell peers that this rank has failed because of `blamed`: they end their waits, or those
        for `owner`, where they hold responsible whom the error does: it may be of another group.

        Args:
            error: as users see it.
        """
        comm, key = self._comm, None if owner is None else owner.key
        mistake = isinstance(error, ConfigError)
        origin, text = comm.ranks[comm.rank], _text(error)
        if isinstance(error, GradwireError):
            foreign = isinstance(error, TransportError) and error.peer is None
            if (foreign or owner is not None) and error._responsible is not None:
                origin = error._responsible
            origin, text = error._origin or (origin, text)
        notice = {"kind": "failed", "text": text, "blamed": blamed, "owner": key}
        self._tell({**notice, "mistake": mistake, "origin": origin})

    def opened(self, owner: Owner) -> None:
        """This rank has opened an owner, whose failure a peer may have reported already."""
        error = self._broken.pop(owner.key, None)
        if error is not None:
            self._comm.end_owner(owner, error)

    def refused(self, error: Exception) -> None:
        """A user's call has raised before it issued anything here. The caller may catch that and
        make another call in its place: so it breaks nothing, and explains what breaks later."""
        text = _text(in_global_ranks(error, self._comm.ranks))
        self._tell({"kind": "refused", "at": self._comm.calls.core.issued, "text": text})

    def _has_refused(self, peer: int, key: str, ticket: int) -> str:
        """What a peer has raised in place of a call that this rank waits for, in words."""
        refused = self._refused.get(peer)
        if refused is None or (self._comm.calls.key, refused["at"]) != (key, ticket):
            return ""
        return f". It had refused this call: {refused['text']}"

    def leave(self, frontier: Mapping[str, int]) -> None:
        """This rank leaves the group; `frontier`: owner -> tickets returned."""
        for owner in self._comm.all_owners():
            if owner.interrupted is not None and owner.error is None:
                self.tell_failure(owner.interrupted, self._comm.rank, owner)
        if self._comm.member is not None:
            self._comm.member.leave({"kind": "left", "frontier": frontier})

    def interrupted(self, owner: Owner) -> None:
        """Break an owner that is interrupted here, if a peer waits for a ticket that this rank has
        not issued."""
        error = owner.interrupted
        expected = [place for place in list(self._expected) if place[0] == owner.key]
        if error is not None and any(place[1] >= owner.core.issued for place in expected):
            self._comm.fail_owner(owner, error)

    def closed(self, owner: Owner) -> None:
        """This rank has closed an owner, and will not issue later tickets of it."""
        self._tell(
            {"kind": "closed", "owner": owner.key, "name": owner.name, "at": owner.core.issued}
        )

    def _tell(self, notice: Mapping[str, Any]) -> None:
        if self._comm.member is not None:
            self._comm.member.tell(notice)

    def tick(self) -> None:
        """Look for what waits for long; a worker thread makes the store operations."""
        comm = self._comm
        if not comm.alive():
            if not self._busy:
                self._busy = True
                comm.workers.run(comm.close)
            return
        if comm.error is not None:
            return
        self._tell_long_wait()
        if self._busy:
            return
        late = [t for owner in comm.all_owners() if (t := self._late(owner)) is not None]
        if late or self.doing or (comm.member is not None and comm.member.waits(_LONG_S)):
            self._busy = True
            comm.workers.run(partial(self._report, late))

    def _tell_long_wait(self) -> None:
        """Announce a long wait, so that a peer that waits for this rank does not blame it."""
        comm = self._comm
        longest = None if comm.opened is None else comm.opened.longest_wait()
        peer = longest[1] if longest and longest[0] > _PATIENCE * comm.timeout else None
        if peer != self._awaited:
            self._awaited = peer
            self._tell({"kind": "waits", "for": peer})

    def _late(self, owner: Owner) -> Ticket | None:
        ticket = owner.oldest() if owner.error is None else None
        return ticket if ticket and time.monotonic() - ticket.since > _LONG_S else None

    def _report(self, late: list[Ticket]) -> None:
        try:
            doing = [*self.doing, *["waits for a collective"][: len(late)]]
            if self._broken_by_a_death(doing):
                return
            for ticket in late:
                numbers, issue, since = ticket.under_way()
                place = (ticket.owner.key, *numbers)
                if issue is None or self._comm.error is not None:
                    continue
                # The agreement on a user's call gives a better error: the line that differs.
                pending = ticket.owner.single and not ticket.is_prepared
                if not pending and self._is_to_be_reported(place, since):
                    self._claim(place, issue)
                self._look_for_the_end(place)
            self._crossings.look(list(self._expected))
        except TransportError as error:  # the store is gone: the transport's timeout applies
            rank = self._comm.ranks[self._comm.rank]
            log.warning("rank %d: a long wait cannot be compared: %s", rank, error)
        finally:
            self._busy = False

    def _is_to_be_reported(self, place: Place, since: float) -> bool:
        """Whether this round has waited long enough to be reported; each round is, at most once.

        Reports stay in the store. So when a reported round ends by itself, on a slow link for
        example, the next ones get more time: a group makes some reports, not one per step.
        """
        last = self._reported.get(place[0])
        if last is not None and last != place:
            del self._reported[place[0]]
            self._long *= _LONGER
        if last == place or time.monotonic() - since < self._long:
            return False
        self._reported[place[0]] = place
        return True

    def _claim(self, place: Place, issue: Issue) -> None:
        """Write what was issued here; or compare it, if a peer has written first."""
        member = self._comm.member
        assert member is not None
        mine = {
            "kind": "late", "place": list(place), "digest": issue.digest, "what": str(issue),
            "rank": self._comm.rank,
        }  # fmt: skip
        value = json.dumps(mine).encode()
        first = member.first("late/" + "/".join(map(str, place)), value)
        if first == value:
            member.tell(mine)
        else:
            self._differs(json.loads(first), issue, place)

    def _broken_by_a_death(self, doing: list[str]) -> bool:
        """Break the group if the process of a peer on this machine has ended, that this rank needs.

        Args:
            doing: what this rank does that needs all peers, besides exchanges and agreements.
        """
        comm = self._comm
        assert comm.member is not None
        for died, lacking in comm.member.ended().items():
            needs = [*doing, *(f"waits for {what}" for what in lacking)]
            if needs:
                text = f"rank {comm.rank}: rank {died} has died, while this rank {needs[0]}"
                text = f"{text}: look at its log, then restart the job"
                comm.fail(TransportError(text, peer=died))
                return True
        return False

    def _look_for_the_end(self, place: Place) -> None:
        """Break the group if a peer that this rank waits for will not reach `place`."""
        comm, (key, ticket, _) = self._comm, place
        closed = self._closed.get(key)
        if closed is not None and ticket >= int(closed["at"]):
            comm.end(
                ConfigError(
                    f"rank {comm.rank}: rank {closed['rank']} has detached {closed['name']} while "
                    "this rank waits for it: detach on all ranks at the same step"
                )
            )
        for peer, frontier in list(self._left.items()):
            if int(frontier.get(key, 0)) <= ticket:
                comm.end(
                    TransportError(
                        f"rank {comm.rank}: rank {peer} has destroyed the process group, or ended, "
                        "while this rank waits for it: make the same calls on all ranks before "
                        f"destroy_process_group{self._has_refused(peer, key, ticket)}",
                        peer=peer,
                    )
                )

    # ---- notices from peers --------------------------------------------------------------------

    def heard(self, sender: int, notice: Mapping[str, Any]) -> None:
        """See `gradwire.control.Channel.join`."""
        kind = notice.get("kind")
        if kind == "failed":
            self._heard_failed(sender, notice)
        elif kind == "late":
            self._heard_late(notice)
        elif kind == "closed":
            self._closed[str(notice["owner"])] = {**notice, "rank": sender}
        elif kind == "waits":
            self._waits[sender] = notice["for"]
        elif kind == "left":
            self._left[sender] = dict(notice["frontier"])
        elif kind == "refused":
            self._refused[sender] = notice
        elif kind == "crossed":
            self._heard_crossed(sender, notice)
        elif kind == "differ":
            self._comm.end(ConfigError(str(notice["text"])))

    def _heard_crossed(self, sender: int, notice: Mapping[str, Any]) -> None:
        found = self._crossings.found(notice)
        if found is not None:
            mine, theirs = found
            self._end_all(
                f"rank {self._comm.rank} waits in {mine.name} where rank {sender} waits in "
                f"{theirs.name}: make the same calls (forwards, backwards, collectives), in the "
                "same order, on all ranks"
            )

    def _heard_failed(self, sender: int, notice: Mapping[str, Any]) -> None:
        comm, blamed = self._comm, int(notice["blamed"])
        told, origin = str(notice["text"]), int(notice["origin"])
        text = f"rank {comm.ranks[comm.rank]}: rank {origin} has failed: {told}"
        if notice.get("owner") is not None:
            mistake = bool(notice.get("mistake"))  # the user's, so a ConfigError here as well
            error = already_global((ConfigError if mistake else TransportError)(text), None)
            error._origin, error._responsible = (origin, told), origin
            owner = self._owner(str(notice["owner"]))
            if owner is None:
                self._broken[str(notice["owner"])] = error
            else:
                comm.end_owner(owner, error)
            return
        self._reasons[sender] = text, origin
        self._blamed[sender] = blamed
        if comm.first_to_fail():  # else this rank has failed itself, and calls `explained`
            comm.workers.run(partial(self._end, self._failure_of(sender), sender))

    def _end(self, error: TransportError, blamed: int) -> None:
        comm = self._comm
        error = self.explained(error, blamed)
        if comm.end(error) and comm.opened is not None:
            # Ends waits in shared memory.
            comm.opened.fail(blamed if error.peer is None else error.peer)

    def _failure_of(self, peer: int) -> TransportError:
        """The error that a failed peer has reported."""
        text, origin = self._reasons[peer]
        error = already_global(TransportError(text), None)
        error._responsible = origin
        return in_global_ranks(error, self._comm.ranks)

    def explained(self, error: E, blamed: int) -> E | TransportError:
        """`error`, with the first rank to fail added, if that is not `blamed`.

        A peer may close a connection because another of its connections broke, which it reports
        shortly after; and a peer that does not answer may itself wait for another.
        """
        first, seen = blamed, {self._comm.rank}
        end = time.monotonic() + _BLAME_S
        while first not in seen:
            seen.add(first)
            while first not in self._blamed and time.monotonic() < end:
                time.sleep(0.01)
            following = self._blamed.get(first, self._waits.get(first))
            if following is None or following in seen:
                break
            first = following
        if self._blamed.get(first) == first:  # it has reported the cause itself
            return self._failure_of(first)
        ranks = self._comm.ranks
        if first == blamed:
            waits = self._refused and self._comm.calls.oldest()
            why = self._has_refused(blamed, waits.owner.key, waits.number) if waits else ""
            text = f"{in_global_ranks(error, ranks)}{why}"
            return already_global(TransportError(text, peer=blamed), ranks) if why else error
        text = f"{in_global_ranks(error, ranks)}. The first to fail was rank {ranks[first]}"
        return already_global(TransportError(text, peer=first), ranks)

    def _heard_late(self, notice: Mapping[str, Any]) -> None:
        key, ticket, number = notice["place"]
        place = (str(key), int(ticket), int(number))
        owner = self._owner(place[0])
        # Store the notice first: `compare` handles rounds that are issued from now on.
        self._expected[place] = notice
        issue = None if owner is None else owner.issued(place[1], place[2])
        if issue is not None:
            self._expected.pop(place, None)
            self._differs(notice, issue, place)
        elif owner is not None:
            self._look_for_more(owner, place, notice)
            self._crossings.look([place])
            self.interrupted(owner)

    def ended(self, ticket: Ticket) -> None:
        """A ticket has no further round: check whether a peer has reported one."""
        if self._expected:
            for place, notice in list(self._expected.items()):
                if place[:2] == (ticket.owner.key, ticket.number):
                    self._look_for_more(ticket.owner, place, notice)

    def _look_for_more(self, owner: Owner, place: Place, notice: Mapping[str, Any]) -> None:
        """Break the group if a peer has issued a round where this rank has ended the scope."""
        rounds = owner.rounds_of(place[1])
        if (
            rounds is not None
            and place[2] >= rounds
            and self._expected.pop(place, None) is not None
        ):
            here = f"rank {self._comm.rank} had ended after {rounds} rounds"
            self._break(f"rank {notice['rank']} issued {notice['what']} where {here}", place)

    def compare(self, ticket: Ticket, issue: Issue) -> None:
        """A round was issued here: check whether a peer has reported another in its place."""
        if self._expected:
            place = ticket.owner.key, ticket.number, ticket.rounds
            notice = self._expected.pop(place, None)
            if notice is not None:
                self._differs(notice, issue, place)

    def _differs(self, other: Mapping[str, Any], issue: Issue, place: Place) -> None:
        """Break the group if two ranks issued different rounds in one place."""
        if other["digest"] == issue.digest:
            return
        theirs = f"rank {other['rank']} issued {other['what']}"
        self._break(f"{theirs} where rank {self._comm.rank} issued {issue}", place)

    def _break(self, what: str, place: Place) -> None:
        where = f"call {place[1]} of {self._name(place[0])}"
        if place[2]:
            where += f", round {place[2]}"
        owner = self._owner(place[0])
        self._end_all(f"{what} ({where})" + ("" if owner is None else f": {owner.advice}"))

    def _end_all(self, text: str) -> None:
        """Break the group on all ranks, because of what the user did."""
        if self._comm.end(ConfigError(text)):
            self._tell({"kind": "differ", "text": text})

    def _owner(self, key: str) -> Owner | None:
        return next((o for o in self._comm.all_owners() if o.key == key), None)

    def _name(self, key: str) -> str:
        owner = self._owner(key)
        return key if owner is None else owner.name


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
