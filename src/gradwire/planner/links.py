"""The links between ranks: latency and seconds per byte of every pair, as they are measured.

`alpha` is half a round trip of a small message, `beta` the seconds that one more byte of a large
message takes; so a message of n bytes takes alpha + n beta seconds. Both include the transport's
software on both ends, as gradwire's own messages do.

Ranks measure in rounds of disjoint pairs, a round-robin tournament: N - 1 rounds for an even number
of ranks, N for an odd one. link_pair.py measures a pair. Ranks of one machine that share a link
measure at the same time, so that a beta is that of a share.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.engine import Communicator, run_with_peers
from gradwire.errors import ConfigError
from gradwire.planner.files import write_whole
from gradwire.planner.link_pair import SMALL, TRIPS, Sample, measure_pair
from gradwire.planner.trips import Trips

SECONDS = 5.0
MOST_SECONDS = 600.0

_SENDS = 3  # of each size

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Links:
    """What messages between ranks cost.

    Attributes:
        alpha: seconds of latency, [from][to]; N x N with zeros on the diagonal.
        beta: seconds per byte, alike.
    """

    alpha: Matrix
    beta: Matrix

    def __post_init__(self) -> None:
        n = len(self.alpha)
        for name, matrix in (("alpha", self.alpha), ("beta", self.beta)):
            if len(matrix) != n or any(len(row) != n for row in matrix) or not n:
                raise ConfigError(f"Links: {name} is not a matrix of {n} x {n} numbers")
            if not all(math.isfinite(x) and x >= 0 for row in matrix for x in row):
                raise ConfigError(f"Links: {name} has a number that is negative or not finite")

    @classmethod
    def of(cls, ranks: int, samples: list[Sample]) -> Links:
        """The links, from a sample for each pair of ranks."""
        alpha = [[0.0] * ranks for _ in range(ranks)]
        beta = [[0.0] * ranks for _ in range(ranks)]
        for i, j, latency, there, back in samples:
            alpha[i][j] = alpha[j][i] = latency
            beta[i][j], beta[j][i] = there, back
        return cls(tuple(map(tuple, alpha)), tuple(map(tuple, beta)))

    @property
    def ranks(self) -> int:
        """How many there are. One rank has no link, and all its costs are 0."""
        return len(self.alpha)

    @property
    def worst_alpha(self) -> float:
        """The highest latency between two ranks."""
        return max(self._between(self.alpha), default=0.0)

    @property
    def typical_alpha(self) -> float:
        """The median latency between two ranks."""
        return statistics.median(self._between(self.alpha) or [0.0])

    @property
    def worst_beta(self) -> float:
        """The most seconds per byte between two ranks."""
        return max(self._between(self.beta), default=0.0)

    @property
    def typical_beta(self) -> float:
        """The median of the seconds per byte between two ranks."""
        return statistics.median(self._between(self.beta) or [0.0])

    def _between(self, matrix: Matrix) -> list[float]:
        return [x for i, row in enumerate(matrix) for j, x in enumerate(row) if i != j]

    def changed(self, other: Links, by: float) -> bool:
        """Whether the highest latency or the lowest bandwidth differs from `other`'s by more than a
        share `by` of the smaller value. A collective waits for its slowest link.

        Raises:
            ConfigError: `by` is not above 0, or `other` has another number of ranks.
        """
        if not by > 0 or other.ranks != self.ranks:
            raise ConfigError(
                f"changed: {self.ranks} and {other.ranks} ranks, by={by}: compare links of the "
                "same ranks, by a share above 0"
            )
        pairs = (self.worst_alpha, other.worst_alpha), (self.worst_beta, other.worst_beta)
        return any(max(pair) > (1 + by) * min(pair) for pair in pairs)

    def text(self) -> str:
        """As JSON; `Links.read` reads it."""
        return json.dumps({"alpha": self.alpha, "beta": self.beta})

    @classmethod
    def read(cls, text: str) -> Links:
        """The links in a text.

        Raises:
            ConfigError: there are none.
        """
        try:
            found = json.loads(text)
            alpha, beta = (
                tuple(tuple(float(x) for x in row) for row in found[name])
                for name in ("alpha", "beta")
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"no links: {type(error).__name__}: {error}") from None
        return cls(alpha, beta)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file; it is whole or not there."""
        write_whole(path, self.text() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Links:
        """The links in a file.

        Raises:
            ConfigError: there are none; the message names the file.
        """
        try:
            return cls.read(Path(path).read_text("utf-8"))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from None


def measure_links(comm: Communicator, seconds: float = SECONDS) -> Links:
    """Measure the links between all ranks; collective, and the same on all ranks.

    Args:
        seconds: what it should take in all. Fewest counts take longer on slow networks: about 11 s
            per round at 50 ms of latency, 20 s per round at 64 kbit/s.

    Raises:
        ConfigError: `seconds` is not above 0, or above `MOST_SECONDS`.
        TransportError: a peer failed or did not come; the group is then broken, on all ranks.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(
            f"measure_links: seconds={seconds}: give seconds above 0, {MOST_SECONDS:g} at most"
        )
    if comm.world_size == 1:
        return Links.of(1, [])
    owner = comm.owner("links")
    rounds = list(tournament(comm.world_size))
    mine = [pair for pairs in rounds for pair in pairs if comm.rank in pair]

    def measure() -> list[list[Any]]:
        tags, each = comm.ranges.claim(owner, "links"), seconds / len(rounds)
        samples = [sample for pair in mine for sample in measure_pair(comm, pair, tags, each)]
        return owner.ranks.tell("links", samples).result()

    try:
        every = run_with_peers(comm, measure)
    finally:
        comm.close_owner(owner)
    return Links.of(comm.world_size, [tuple(one) for found in every for one in found])


def measure_sends(comm: Communicator, sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of a message from rank 0 to rank 1 by its bytes, latency included: the median of
    three; collective, and the same on all ranks.

    Raises:
        TransportError: as `measure_links`.
    """
    assert comm.world_size > 1
    owner = comm.owner("sends")

    def measure() -> list[list[tuple[int, float]]]:
        tags, found = comm.ranges.claim(owner, "sends"), []
        if comm.rank == 0:
            trips = Trips(comm.transport, 1, tags)
            back = min(trips.drive(SMALL, SMALL, TRIPS)) / 2
            for size in sizes:
                times = trips.drive(size, SMALL, 1 + _SENDS)[1:]
                found.append((size, statistics.median(times) - back))
            trips.end()
        elif comm.rank == 1:
            Trips(comm.transport, 0, tags).serve()
        return owner.ranks.tell("sends", found).result()

    try:
        every = run_with_peers(comm, measure)
    finally:
        comm.close_owner(owner)
    return dict(every[0])


def tournament(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs (lower rank first), in which each two ranks meet once: all but the
    first rank move round a circle."""
    circle = list(range(ranks)) + [-1] * (ranks % 2)  # who meets -1 rests
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        circle = [circle[0], circle[-1], *circle[1:-1]]
