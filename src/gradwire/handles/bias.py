"""Codecs and error feedback that do not suit each other: a warning of each kind, once per process.

What a biased codec leaves out of a gradient is lost at every step, in the same direction, unless
error feedback keeps it: training may stop short of where it would end, with no error to be seen.
Error feedback around a codec whose error may be larger than what it encodes adds errors up, until
residuals exceed gradients by orders of magnitude.
"""

from __future__ import annotations

import sys
import warnings

from gradwire.planner import Plan
from gradwire.planner.plan import ParameterPlan

_NOT_THE_USER = ("gradwire.", "torch.")
_BIASED, _GROWS = "biased", "grows"
_warned: set[str] = set()  # kinds


def warn_of_bias(plan: Plan, ranks: int, call: str = "gw.attach") -> None:
    """Warn, unless this process has, of what `plan` sends through a biased codec alone, and of
    error feedback around a method that does not contract.

    Args:
        call: the user's, that made this plan.
    """
    if ranks == 1:  # one rank alone sends nothing
        return
    lossy = [p for p in plan.parameters if p.codec is not None and not p.feedback]
    biased = [p for p in lossy if p.codec is not None and p.codec.biased]
    if biased:
        warn_once(
            f"{_what(biased)}, which is biased: without error feedback what it leaves out is lost, "
            f"and training may not converge; give {call} error_feedback=True"
        )
    loose = [p for p in plan.parameters if p.feedback and not p.inner.contracts]
    if loose:
        codec = loose[0].codec
        needs = codec is not None and codec.biased
        mend = "" if needs else "leave error_feedback out, or "
        warn_once(
            f"{_what(loose)}, whose error may be larger than what it encodes: error feedback adds "
            f"such errors up, and residuals may grow without bound; {mend}use more bits, smaller "
            "blocks or another codec",
            _GROWS,
        )


def _what(found: list[ParameterPlan]) -> str:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"gradients of {found[0].name}{more} go through {found[0].inner}"


def warn_once(message: str, kind: str = _BIASED) -> None:
    """A UserWarning at the user's line; later calls for the same kind have no effect."""
    if kind not in _warned:
        _warned.add(kind)
        warn_user(message)


def warn_user(message: str) -> None:
    """A UserWarning at the user's line."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(_NOT_THE_USER):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
