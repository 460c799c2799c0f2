"""Watches the links while training runs: small measurements in the background.

    1. all ranks meet on the control channel: one that has stopped ends the watch of all
    2. a round of disjoint pairs (links.py): a few small round trips, and one message of moderate
       size each way; the pair alone waits for them
    3. ranks rest so long that measuring takes at most `share` of the time, and of the bandwidth

What a round found travels with the next meeting, so all ranks have the same links after the same
meeting. Training may delay each message: of an entry's last `_KEPT` samples the least counts.
Values so differ from those of `measure_links`, which repeats messages: compare a watch's links with
earlier ones of the same watch. Where the large message took no longer than small ones, the seconds
per byte are as they were known before the watch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from typing import Any

from gradwire.engine import Communicator
from gradwire.errors import ConfigError, TransportError
from gradwire.planner.link_pair import LEAST_BETA, SMALL, Sample, within
from gradwire.planner.links import Links, tournament
from gradwire.planner.trips import Trips

log = logging.getLogger("gradwire")

_TRIPS = 4
_SECONDS = 0.02  # of a message of moderate size
_BYTES = (1 << 10, 1 << 20)
_KEPT = 3
_LEAST_REST_S = 0.05
_LOOK_S = 0.1  # between two looks whether the group still is
_CLOSING_S = 5.0


class LinkWatch:
    """The links between the ranks of a group, measured little by little; opened on all ranks.

    Args:
        comm: of the ranks; there are several.
        links: as `measure_links` found them: messages are sized by them.
        share: of time, and of bandwidth, that measuring may take.

    Attributes:
        newest: the links, once all have been measured; None before, and with one rank.
        rounds: how many rounds have been counted in; ranks with the same number have the same
            links.

    Raises:
        ConfigError: `share` is not above 0 and at most 1, or `links` is of other ranks.
    """

    def __init__(self, comm: Communicator, links: Links, share: float = 0.01) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"LinkWatch: share={share}: give a share above 0, of at most 1")
        if links.ranks != comm.world_size:
            raise ConfigError(f"LinkWatch: links of {links.ranks} ranks, not {comm.world_size}")
        self.newest: Links | None = None
        self.rounds = 0
        self._comm, self._links, self._share = comm, links, share
        self._stop = threading.Event()
        self._over = threading.Event()
        self._kept: dict[tuple[int, int], deque[Sample]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._owner = comm.owner("link watch")
        if comm.world_size == 1:
            comm.close_owner(self._owner)
            self._over.set()
            return
        comm.workers.run(self._work)

    @property
    def running(self) -> bool:
        """Whether it measures."""
        return not self._over.is_set()

    def close(self) -> None:
        """Measure no more, on all ranks from their next meeting on; a second call does nothing.

        It waits for that up to 5 s: no message is then on its way, so that the group can be
        destroyed. Close on all ranks at the same step.
        """
        self._stop.set()
        self._over.wait(_CLOSING_S)

    # ---- on a thread of the engine's pool

    def _work(self) -> None:
        comm = self._comm
        try:
            self._watch()
        except Exception as error:
            if comm.error is None and not self._stop.is_set():
                if isinstance(error, TransportError):
                    comm.fail(error)  # the transport is broken, which the next pass would find
                rank = comm.ranks[comm.rank]
                log.warning("rank %d: the links are watched no more: %s", rank, error)
        finally:
            comm.close_owner(self._owner)
            self._over.set()

    def _watch(self) -> None:
        comm = self._comm
        tags = comm.ranges.claim(self._owner, "links")
        rounds = list(tournament(comm.world_size))
        found: list[Sample] = []
        rested = time.monotonic()  # from when on this rank may measure again
        while True:
            told = {"stop": self._stop.is_set(), "rested": time.monotonic() >= rested}
            every = self._met({**told, "found": found})
            if any(one["stop"] for one in every):
                return
            found = []
            if all(one["rested"] for one in every):
                pairs = rounds[self.rounds % len(rounds)]
                self.rounds += 1
                mine = next((pair for pair in pairs if comm.rank in pair), None)
                begun = time.monotonic()
                found = [] if mine is None else self._pair(mine, tags)
                spent = time.monotonic() - begun
                rested = begun + max(spent / self._share, _LEAST_REST_S)
            # Peers wait at the next meeting, but not for longer than the group's timeout.
            self._rest(min(max(rested - time.monotonic(), 0.0), comm.timeout / 4))

    def _rest(self, seconds: float) -> None:
        """Wait, unless the watch or the group is closed."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._stop.wait(min(left, _LOOK_S)):
            self._comm.check()

    def _met(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What all ranks tell at a meeting; and count what they have found."""
        comm, told = self._comm, self._owner.ranks.tell("watch", mine)
        if mine["stop"]:  # peers wait for this rank, which waits for none
            return [mine]
        every = told.result()
        for one in every:
            for i, j, alpha, there, back in one["found"]:
                self._kept[i, j].append((i, j, alpha, there, back))
        if len(self._kept) == comm.world_size * (comm.world_size - 1) // 2:
            self.newest = Links.of(comm.world_size, list(map(_least, self._kept.values())))
        return every

    def _pair(self, pair: tuple[int, int], tags: int) -> list[Sample]:
        comm, (driver, server) = self._comm, pair
        if comm.rank == server:
            Trips(comm.transport, driver, tags).serve()
            return []
        trips = Trips(comm.transport, server, tags)
        trip = min(trips.drive(SMALL, SMALL, _TRIPS))
        each = []
        for beta, there in ((self._links.beta[driver][server], True),
                            (self._links.beta[server][driver], False)):  # fmt: skip
            nbytes = within(_BYTES, _SECONDS / max(beta, 1e-12))
            sizes = (nbytes, SMALL) if there else (SMALL, nbytes)
            found = (trips.drive(*sizes, 1)[0] - trip) / nbytes
            each.append(found if found > LEAST_BETA else beta)  # else the small trips were late
        trips.end()
        return [(driver, server, trip / 2, each[0], each[1])]


def _least(samples: deque[Sample]) -> Sample:
    i, j, *_ = samples[0]
    alpha, there, back = (min(sample[k] for sample in samples) for k in (2, 3, 4))
    return i, j, alpha, there, back
