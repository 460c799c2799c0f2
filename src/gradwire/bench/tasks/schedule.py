"""The learning-rate schedule that the tasks share."""

from __future__ import annotations


def warm_up_then_decay(step: int, steps: int, warmup: int, floor: float = 0.1) -> float:
    """Linear warm-up over `warmup` steps, then linear decay to `floor` at the last step.

    Returns:
        The factor on the peak learning rate, in (0, 1].
    """
    if step < warmup:
        return (step + 1) / warmup
    remaining = max(1, steps - warmup)
    progress = min(1.0, (step - warmup) / remaining)
    return 1.0 - (1.0 - floor) * progress
