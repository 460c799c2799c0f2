"""The learning-rate schedule that the tasks share.

It does not depend on the length of a run: runs of different lengths share their beginning, and a
run that stops early has the rates of one that goes on.
"""

from __future__ import annotations

import math


def warm_up_then_decay(step: int, warmup: int, horizon: int, floor: float = 0.1) -> float:
    """Linear warm-up over `warmup` steps, then a cosine down to `floor` at step `horizon`; `floor`
    from there on.

    Returns:
        The factor on the peak learning rate, in (0, 1].
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, horizon - warmup))
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2
