"""A biased codec without error feedback: a warning, once per process.

What such a codec leaves out of a gradient is lost at every step, in the same direction: training
may stop short of where it would end, with no error to be seen.
"""

from __future__ import annotations

import sys
import warnings

from gradwire.integrations.summary import short
from gradwire.planner import Plan

_NOT_THE_USER = ("gradwire.", "torch.")
_warned = False


def warn_of_bias(plan: Plan, ranks: int) -> None:
    """Warn, unless this process has, of what `plan` sends through a biased codec alone."""
    if _warned or ranks == 1:  # one rank alone sends nothing
        return
    lossy = [p for p in plan.parameters if p.codec is not None and not p.feedback]
    biased = {codec for codec in {p.codec for p in lossy} if codec is not None and codec.biased}
    found = [p for p in lossy if p.codec in biased]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warn_once(
            f"gradients of {found[0].name}{more} go through {short(found[0].inner)}, which is "
            "biased: without error feedback what it leaves out is lost, and training may not "
            "converge; give gw.attach or gw.register error_feedback=True"
        )


def warn_once(message: str) -> None:
    """A UserWarning at the user's line; later calls have no effect."""
    global _warned  # noqa: PLW0603  # one warning per process
    if _warned:
        return
    _warned = True
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(_NOT_THE_USER):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
