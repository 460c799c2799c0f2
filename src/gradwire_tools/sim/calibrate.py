"""Fit the engine's overheads from the time of a tiny all-reduce.

The costs of posting, latency and checksums are measured directly. The rest of the time of a tiny
all-reduce has two unknowns: the start of a collective and the overhead per task. Two measurements,
with different numbers of segments, determine them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradwire.codecs import Identity
from gradwire.collectives import Options
from gradwire_tools.sim.curves import Curves, Software
from gradwire_tools.sim.predict import Net, Scenario, predict
from gradwire_tools.sim.rank import Overheads

VALUES = 1 << 14
SEGMENTS = (1, 8)
_NUDGE_S = 1e-5


def engine(kernels: Curves, found: Mapping[str, float]) -> Curves:
    """`kernels` with the overheads that two ranks measured.

    Args:
        kernels: contains curves of Identity.
        found: in seconds: "trip" (a small message, one way), "post", "check", "tiny 1" and
            "tiny 8" (an all-reduce of `VALUES` fp32 values between two ranks, in 1 or 8 segments);
            in seconds per byte: "check_byte" and "stack"; in bytes per second: "memory".
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
    # The number of tasks on the critical path, according to the simulator.
    tasks = {s: (_seconds(nudged, s) - _seconds(base, s)) / _NUDGE_S for s in SEGMENTS}
    task = max((left[many] - left[one]) / (tasks[many] - tasks[one]), 0.0)
    start = max(left[one] - tasks[one] * task, 0.0)
    return replace(base, engine=replace(posts, start=start, task=task))


def _seconds(curves: Curves, segments: int) -> float:
    options = Options(segments=segments)
    scenario = Scenario(2, Net("none"), Identity(), str(VALUES), options=options)
    return float(predict(scenario, curves)["seconds"])
