"""What the measured steps of `gradwire doctor --ranks N` mean, in plain sentences.

The baseline is the faster of torch's fp32 and fp16: a codec that beats only fp32 has won nothing.
Compression pays if the median step is at least 5 % faster, and three turns of four are faster. It
will not pay if the median step is less than 5 % faster, and one of these explains why: computing
hides the communication of the baseline, averaging alone is not 5 % faster either, or three turns of
four are less than 5 % faster. All else is not clear.

The lines, in this order: the verdict; what a step waits for; what was measured, where it was no
network or the machine was busy; and what to write.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_tools.bench.rows import Row

FULL, HALF, OURS = "torch-fp32", "torch-fp16-hook", "gradwire-qsgd4"

_CLEARLY = 0.95  # of the baseline's step
_MOSTLY = 0.75  # of the turns
_HARDLY = 0.1  # of a step: communication that nobody notices
_COMPRESS = 'Write: gw.attach(model, "qsgd:bits=4")'
_HALVE = (
    "Nothing to gain here beyond 16 bit. Write: "
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook; "
    "model.register_comm_hook(None, fp16_compress_hook)"
)
_LEAVE = "Nothing to gain here: leave the script as it is."
_TRY = 'Leave the script as it is, or let training try it: gw.attach(model, "auto")'


def verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    """Whether compression clearly pays, and why, from the rows of `network`."""
    by_method = {row["method"]: row for row in rows}
    full, half, ours = (by_method[method] for method in (FULL, HALF, OURS))
    base = min(full, half, key=lambda row: float(row["step_seconds"]))
    ratios = _ratios(ours, base)
    ratio = ours["step_seconds"] / base["step_seconds"]  # of the medians, which are told beside it
    pays = _clearly_faster(ours, base)
    reason = _reason(base, ours, ratios) if ratio >= _CLEARLY else None
    if pays:
        found, line = _gain(base, ours, ratio), _COMPRESS
    elif reason is not None:
        found = f"Compression will not pay here: {reason}."
        line = _HALVE if _clearly_faster(half, full) else _LEAVE
    else:
        faster, line = sum(one < 1 for one in ratios), _TRY
        found = (
            f"Not clear: the median step with {OURS} took {ratio:.2f} of {base['method']}'s time, "
            f"and {faster} of {len(ratios)} turns were faster; repeat on an idle machine."
        )
    return pays, "\n".join([found, _waiting(full, pays), *_circumstances(full), line])


def _ratios(mine: Row, theirs: Row) -> list[float]:
    """Of the seconds of each turn."""
    turns = zip(mine["turn_seconds"], theirs["turn_seconds"], strict=True)
    return [one / other for one, other in turns]


def _clearly_faster(mine: Row, theirs: Row) -> bool:
    ratios = _ratios(mine, theirs)
    faster = sum(one < 1 for one in ratios)
    median = mine["step_seconds"] / theirs["step_seconds"]
    return bool(median < _CLEARLY and faster >= _MOSTLY * len(ratios))


def _waiting(full: Row, pays: bool) -> str:
    waiting = full["exposed_seconds"] / full["step_seconds"]
    said = (
        f"Of a step with fp32 ({_seconds(full['step_seconds'])}), {waiting:.0%} is communication "
        f"that computing ({_seconds(full['compute_seconds'])}) does not hide."
    )
    if full["machines"] == 1 or not (pays or waiting < _HARDLY):
        return said
    return f"{said} The network is {'not ' if waiting < _HARDLY else ''}the problem."


def _circumstances(row: Row) -> list[str]:
    """What was measured, where that is not a network between idle machines."""
    said, ranks, machines = [], row["ranks"], row["machines"]
    if machines == 1:
        said.append(
            f"No network was measured: the {ranks} ranks share this machine (torch sends over "
            f"loopback, gradwire over {_carried(row['transport'])}). For the network between your "
            "machines start gradwire doctor there by torchrun, or emulate it by --net."
        )
    elif machines < ranks:
        said.append(
            f"The {ranks} ranks are on {machines} machines; within one gradwire sends over "
            f"{_carried(row['transport'])}."
        )
    if row["load"] > row["cores"]:
        said.append(
            f"{'The' if machines == 1 else 'A'} machine is busy: a load average of "
            f"{row['load']:.1f} on {row['cores']} cores before this began. Repeat when it is idle."
        )
    return said


def _carried(transport: str) -> str:
    return "shared memory" if "shm" in transport else "loopback too"


def _gain(base: Row, ours: Row, ratio: float) -> str:
    alone = base["communication_seconds"]
    return (
        f"Compression pays here: a step takes {_seconds(ours['step_seconds'])} with {OURS}, and "
        f"{_seconds(base['step_seconds'])} with {base['method']}, which is "
        f"{1 / ratio:.2f} times as long. It will not pay for a step that computes for much longer "
        f"than {_seconds(alone)}, since computing hides what {base['method']} sends then."
    )


def _reason(base: Row, ours: Row, ratios: Sequence[float]) -> str | None:
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
