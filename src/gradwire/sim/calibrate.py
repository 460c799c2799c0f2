"""What the engine costs beside kernels and links, from what a tiny all-reduce takes.

Posting, latency and checksums are measured as they are. What a tiny all-reduce takes beyond the
simulation with those alone is the start of a collective, and what every task adds: two unknowns,
found from two numbers of segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradwire.codecs import Identity
from gradwire.collectives import Options
from gradwire.sim.curves import Curves, Software
from gradwire.sim.predict import Net, Scenario, predict
from gradwire.sim.rank import Overheads

VALUES = 1 << 14
SEGMENTS = (1, 8)
_NUDGE_S = 1e-5


def engine(kernels: Curves, found: Mapping[str, float]) -> Curves:
    """`kernels` with the overheads that two ranks found.

    Args:
        kernels: has curves of Identity.
        found: seconds: "trip" (one way of a small message), "post", "check"; "check_byte" and
            "stack" for each byte; "tiny 1" and "tiny 8" (an all-reduce of `VALUES` fp32 values
            between two ranks, in so many segments); "memory", bytes a second.
    """
    posts = Overheads(post=found["post"], check=found["check"], check_byte=found["check_byte"])
    link = Software(
        overhead=max(found["trip"] - found["post"], 0.0),
        stack=found["stack"],
        memory=found["memory"],
    )
    base = replace(kernels, engine=posts, link=link)
    nudged = replace(base, engine=replace(posts, task=_NUDGE_S))
    one, many = SEGMENTS
    left = {s: found[f"tiny {s}"] - _seconds(base, s) for s in SEGMENTS}
    # How many tasks come one after the other on the longest way, as the simulator sees it.
    tasks = {s: (_seconds(nudged, s) - _seconds(base, s)) / _NUDGE_S for s in SEGMENTS}
    task = max((left[many] - left[one]) / (tasks[many] - tasks[one]), 0.0)
    start = max(left[one] - tasks[one] * task, 0.0)
    return replace(base, engine=replace(posts, start=start, task=task))


def _seconds(curves: Curves, segments: int) -> float:
    options = Options(segments=segments)
    scenario = Scenario(2, Net("none"), Identity(), str(VALUES), options)
    return float(predict(scenario, curves)["seconds"])
