"""What a byte of each of DDP's buckets costs a policy (THESIS 4.5, "Optimizing for Time"; B.1).

    bytes      all alike
    priority   the bucket's number, in the order in which buckets are sent: the last ones, which
               nothing hides, are compressed more (B.1)
    time       by regression on *spans*, from the first bucket's readiness to the last average

For time, a trial precedes the first decision. The uniform plan, and for each bucket one in which
its parameters have the choice with the most bytes, are in force for `PASSES` passes each: no trial
loses more of a gradient than the uniform plan. Of many buckets neighbours are taken together, so
that there are `MOST` at most. The slowest rank's median span of a plan counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gradwire.aggregators import Aggregator
from gradwire.controllers import time_weights
from gradwire.controllers.tables import nbytes
from gradwire.controllers.targets import Target
from gradwire.decide.scripts import Make, Pass, Script, tried
from gradwire.errors import ConfigError

AFTER = 4  # passes before the trial: DDP rebuilds its buckets after the first
PASSES = 4
MOST = 12

Names = Sequence[Sequence[str]]  # of the parameters of each bucket, in the order of sending


def priorities(buckets: Names) -> dict[str, float]:
    """The weight of each parameter by its bucket's number, from 1."""
    return {name: float(i) for i, names in enumerate(buckets, 1) for name in names}


def together(buckets: Names, wanted: Mapping[str, object]) -> list[list[str]]:
    """The wanted parameters of neighbouring buckets, in at most `MOST` groups; none is empty."""
    kept = [[name for name in names if name in wanted] for names in buckets]
    kept = [names for names in kept if names]
    parts = np.array_split(np.arange(len(kept)), min(MOST, len(kept))) if kept else []
    return [[name for i in part for name in kept[i]] for part in parts]


def weighed(
    target: Target, buckets: Names, changed: Callable[[Mapping[str, Aggregator]], Make]
) -> Script:
    """Learn the weights of buckets by time.

    Args:
        target: gradients, and the choices of each parameter.
        buckets: as they are in force.
        changed: makes a plan with these methods of the target.

    Returns:
        The weights by name, and a line that tells them.

    Raises:
        ConfigError: nothing tells buckets apart; alike on all ranks.
    """
    groups, shapes = together(buckets, target.shapes), target.shapes
    if len(groups) < 2:
        raise ConfigError("there is one bucket")
    uniform = dict.fromkeys(shapes, target.reference)
    plans = [uniform, *(uniform | _largest(target, names) for names in groups)]
    spans = yield from tried("weigh", [changed(one) for one in plans], PASSES, measured=_span)
    sent = [
        [float(sum(nbytes([plan[name]], shapes[name])[0] for name in names)) for names in groups]
        for plan in plans
    ]
    weights = time_weights(np.array(sent), spans)
    told = ", ".join(f"{weight:.2f}" for weight in weights)
    named = zip(groups, weights, strict=True)
    return (
        {name: float(weight) for names, weight in named for name in names},
        f"weigh=time: bytes of the buckets count {told}",
    )


def _span(one: Pass) -> float:
    return one.span or 0.0  # 0: nobody on the host knows


def _largest(target: Target, names: Sequence[str]) -> dict[str, Aggregator]:
    """The choice with the most bytes, by name."""
    found = {}
    for name in names:
        methods = target.family.methods(target.shapes[name])
        found[name] = methods[int(nbytes(methods, target.shapes[name]).argmax())]
    return found
