"""What the measured steps of `gradwire doctor --ranks N` mean, in plain sentences.

The baseline is the faster of torch's fp32 and fp16: a codec that beats only fp32 has won nothing.
Compression pays if the median step is at least 5 % faster, and three turns of four are faster. It
will not pay if the median step is less than 5 % faster, and one of these explains why: computing
hides the communication of the baseline, averaging alone is not 5 % faster either, or three turns of
four are less than 5 % faster. All else is not clear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FULL, HALF, OURS = "torch-fp32", "torch-fp16-hook", "gradwire-qsgd4"

_CLEARLY = 0.95  # of the baseline's step
_MOSTLY = 0.75  # of the turns
_HARDLY = 0.1  # of a step: communication that nobody notices


def verdict(rows: Sequence[dict[str, Any]]) -> tuple[bool, str]:
    """Whether compression clearly pays, and why, from the rows of gradwire.bench.network."""
    by_method = {row["method"]: row for row in rows}
    full, ours = by_method[FULL], by_method[OURS]
    base = min(full, by_method[HALF], key=lambda row: float(row["step_seconds"]))
    ratios = [
        mine / theirs
        for mine, theirs in zip(ours["turn_seconds"], base["turn_seconds"], strict=True)
    ]
    ratio = ours["step_seconds"] / base["step_seconds"]  # of the medians, which are told beside it
    faster = sum(one < 1 for one in ratios)
    pays = ratio < _CLEARLY and faster >= _MOSTLY * len(ratios)
    waiting = full["exposed_seconds"] / full["step_seconds"]
    share = (
        f"Of a step with fp32 ({_seconds(full['step_seconds'])}), {waiting:.0%} is communication "
        f"that computing ({_seconds(full['compute_seconds'])}) does not hide."
    )
    if waiting < _HARDLY:
        share += " The network is not the problem."
    elif pays:
        share += " The network is the problem."
    if pays:
        return True, f"{share} {_gain(base, ours, ratio)}"
    reason = _reason(base, ours, ratios) if ratio >= _CLEARLY else None
    if reason is not None:
        return False, f"{share} Compression will not pay here: {reason}."
    return False, (
        f"{share} Not clear: the median step with {OURS} took {ratio:.2f} of {base['method']}'s "
        f"time, and {faster} of {len(ratios)} turns were faster; repeat on an idle machine."
    )


def _gain(base: dict[str, Any], ours: dict[str, Any], ratio: float) -> str:
    alone = base["communication_seconds"]
    return (
        f"Compression pays here: a step takes {_seconds(ours['step_seconds'])} with {OURS}, and "
        f"{_seconds(base['step_seconds'])} with {base['method']}, which is "
        f"{1 / ratio:.2f} times as long. It will not pay for a step that computes for much longer "
        f"than {_seconds(alone)}, since computing hides what {base['method']} sends then."
    )


def _reason(base: dict[str, Any], ours: dict[str, Any], ratios: Sequence[float]) -> str | None:
    """Why compression does not pay; None if the turns differ too much to say so."""
    alone, our_alone = base["communication_seconds"], ours["communication_seconds"]
    exposed = base["exposed_seconds"]
    if exposed < _HARDLY * base["step_seconds"]:
        return (
            f"computing hides the communication of {base['method']}, and compression could save "
            f"{_seconds(exposed)} of a step of {_seconds(base['step_seconds'])} at most"
        )
    if our_alone >= _CLEARLY * alone:
        return (
            f"averaging takes {_seconds(our_alone)} with {OURS}, and {_seconds(alone)} with "
            f"{base['method']}: on a network as fast as this, encoding and decoding cost more than "
            "fewer bytes save"
        )
    slow = sum(one >= _CLEARLY for one in ratios)
    if slow < _MOSTLY * len(ratios):
        return None
    return (
        f"a step takes {_seconds(ours['step_seconds'])} with {OURS}, and "
        f"{_seconds(base['step_seconds'])} with {base['method']}; in {slow} of {len(ratios)} turns "
        "it is less than 5 % faster"
    )


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
