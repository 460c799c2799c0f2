"""Measures one pair of ranks: its latency, and the seconds per byte of each direction.

The lower rank decides sizes and counts (trips.py):

    1. alpha: from the shortest of many round trips, since other work only ever adds to one
    2. per direction, growing messages until one takes at least `_SEEN_S` more than a small one: the
       sizes to measure at
    3. beta: the slope between two sizes, low quantiles of several. The smaller takes 10 ms or more:
       what a token bucket lets pass at once counts in both, and cancels
"""

from __future__ import annotations

import time

from gradwire.engine import Communicator
from gradwire.planner.trips import Trips

SMALL = 64  # bytes

TRIPS = 8  # at a time
_OF_ALPHA, _OF_BETA = 0.1, 0.3  # of the seconds; of beta, in each direction
_GROWING = (1 << 14, 1 << 18, 1 << 22)
_TRIES = 3  # of each
_SEEN_S = 0.02
_FIRST_S = 0.01  # of the smaller of two sizes
_RATIO = 4  # of the two sizes
_SIZES = (1 << 10, 1 << 21)  # of the smaller
_BUCKET = 1 << 17  # a kernel lets pass a packet before segmentation, 64 KB, and a bucket's burst
_REPEATS = (3, 15)
_BLOCKS = 3
LEAST_BETA = 1e-13  # seconds per byte

Sample = tuple[int, int, float, float, float]  # ranks i < j, alpha, beta from i to j, from j to i


def measure_pair(
    comm: Communicator, pair: tuple[int, int], tags: int, seconds: float
) -> list[Sample]:
    """Measure a pair of ranks (lower first), or serve who measures; the sample is the driver's.

    Args:
        tags: a tag range that no other uses.
        seconds: what it should take.

    Raises:
        TransportError: the other rank failed or did not come.
    """
    driver, server = pair
    if comm.rank == server:
        Trips(comm.transport, driver, tags).serve()
        return []
    trips = Trips(comm.transport, server, tags)
    trip, begun = min(trips.drive(SMALL, SMALL, TRIPS)), time.perf_counter()  # connects, too
    while time.perf_counter() < begun + _OF_ALPHA * seconds:
        trip = min([trip, *trips.drive(SMALL, SMALL, TRIPS)])
    there, back = (_beta(trips, trip, there, _OF_BETA * seconds) for there in (True, False))
    trips.end()
    return [(driver, server, trip / 2, there, back)]


def _beta(trips: Trips, trip: float, there: bool, seconds: float) -> float:
    """Seconds per byte of one direction; `trip`: seconds of a small round trip."""

    def times(nbytes: int, count: int) -> list[float]:
        return trips.drive(*((nbytes, SMALL) if there else (SMALL, nbytes)), count)

    nbytes, extra = 0, 0.0
    for nbytes in _GROWING:
        extra = times(nbytes, _TRIES)[-1] - trip  # buckets are empty now, TCP's window is open
        if extra >= _SEEN_S:
            break
    about = max(extra, 1e-9) / nbytes
    # While a round trip lasts, a bucket fills again, up to its size.
    small = within(_SIZES, max(_FIRST_S / about, min(1.5 * trip / about, _BUCKET)))
    large = _RATIO * small
    each = 2 * trip + (1 + _RATIO) * small * about
    count = within(_REPEATS, seconds / each)
    blocks = _BLOCKS if count >= _BLOCKS * _REPEATS[0] else 1  # in turns: the load may change
    taken: dict[int, list[float]] = {small: [], large: []}
    for _ in range(blocks):
        for size, known in taken.items():
            known += times(size, 1 + count // blocks)[1:]
    # Other work only adds, and a bucket that is not empty yet takes away.
    short, long = (sorted(known)[len(known) // 3] for known in taken.values())
    return max((long - short) / (large - small), LEAST_BETA)


def within(bounds: tuple[int, int], wanted: float) -> int:
    low, high = bounds
    return int(min(max(wanted, low), high))
