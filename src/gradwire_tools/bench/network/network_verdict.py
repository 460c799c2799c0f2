"""What the measured steps of `gradwire doctor --ranks N` mean, in plain sentences.

The choice is that of "auto": `worth` of the median steps, from the most exact method to the least.
It is sure if three turns of four by themselves choose the same, and the machines were idle. Where
it is not, the line to write is "auto", which tries.

The lines, in this order: the verdict; what was measured, where it was no network; what would make
the answer surer; what to write.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.decide.auto import worth
from gradwire_tools.bench.quantities import digits, faster, percent_of, seconds, than
from gradwire_tools.bench.rows import Row

METHODS = FULL, HALF, OWN, OURS = "torch-fp32", "torch-fp16-hook", "bf16", "qsgd:bits=4"

_MOSTLY = 0.75  # of the turns
_HARDLY = 0.1  # of a step: communication that nobody notices
_SAID = {
    FULL: "in fp32",
    HALF: "with torch's fp16 hook",
    OWN: "in gradwire's bf16",
    OURS: "at 4 bits",
}
_FOUND = {
    FULL: "Compression does not pay here",
    HALF: "16 bits pay here, 4 bits do not",
    OWN: "16 bits pay here, 4 bits do not",
    OURS: "4 bits pay here",
}
_LINES = {
    FULL: "Nothing to write: leave the script as it is.",
    HALF: "Write: from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    "       model.register_comm_hook(None, default_hooks.fp16_compress_hook)",
    OWN: 'Write: gw.attach(model, "bf16")',
    OURS: 'Write: gw.attach(model, "qsgd:bits=4")',
}
_TRY = 'To let training try it, write: gw.attach(model, "auto")'


def verdict(rows: Sequence[Row], surer: Sequence[str] = ()) -> tuple[bool, str]:
    """Whether 4 bits surely pay, and the lines, from the rows of methods.

    Args:
        surer: what would make the answer surer, beside an idle machine and a network.
    """
    by = {row["method"]: row for row in rows}
    chosen = worth([by[method]["step_seconds"] for method in METHODS])
    turns = list(zip(*(by[method]["turn_seconds"] for method in METHODS), strict=True))
    agreed = sum(worth(turn) == chosen for turn in turns)
    first, method = rows[0], METHODS[chosen]
    busy = first["load"] > first["cores"]
    sure = agreed >= _MOSTLY * len(turns) and not busy
    found = _FOUND[method]
    if busy:
        found = (
            f"{'The' if first['machines'] == 1 else 'A'} machine is busy, with a load average of "
            f"{first['load']:.1f} on {first['cores']} cores, so nothing is sure: by the medians"
        )
    elif not sure:
        found = f"Not clear: {agreed} of {len(turns)} turns choose as the medians do, by which"
    joint = ":" if sure else ""
    lines = [f"{found}{joint} a step {_SAID[method]} is {_gains(by, method)}."]
    lines += _circumstances(first)
    surer = [*(["let the machines idle"] if busy else []), *surer]
    lines += [f"To be surer: {'; '.join(surer)}."] if surer else []
    return sure and method == OURS, "\n".join([*lines, _LINES[method] if sure else _TRY])


def computing(rows: Sequence[Row]) -> str:
    """How long a step computes, and how much longer one in fp32 takes."""
    full = next(row for row in rows if row["method"] == FULL)
    waiting = full["exposed_seconds"] / full["step_seconds"]
    return (
        f"{seconds(full['compute_seconds'])} per step; a step in fp32 takes "
        f"{seconds(full['step_seconds'])}, of which {percent_of(waiting)} is waiting for gradients"
    )


def _gains(by: dict[str, Row], method: str) -> str:
    """How much faster a method's median step is than others'; and why, where little is gained."""
    took = {name: row["step_seconds"] for name, row in by.items()}
    others = [one for one in reversed(METHODS) if one not in (method, OWN)]
    others = others if method == OURS else [*others, *({OWN} - {method})]
    gains = [than(faster(took[method], took[one], 2), _SAID[one]) for one in others]
    said = ", ".join(gains)
    if method == OURS:
        own = took[HALF] / took[OWN]
        given = f"gives {digits(own, 2)}" if float(digits(own, 2)) > 1 else "gives nothing"
        said += f"; of this gradwire's transport alone, in bf16, {given}"
    elif by[FULL]["exposed_seconds"] < _HARDLY * took[FULL]:
        said += "; computing hides the communication"
    elif by[OURS]["communication_seconds"] >= by[method]["communication_seconds"]:
        said += "; encoding and decoding cost more than fewer bytes save"
    return said


def _circumstances(row: Row) -> list[str]:
    """What was measured, where that is not a network between all ranks."""
    ranks, machines, shared = row["ranks"], row["machines"], "shm" in row["transport"]
    within = "shared memory" if shared else "loopback"
    said = f"The {ranks} ranks are on {machines} machines; within one gradwire sends over {within}."
    if machines == 1:
        said = (
            f"No network was measured: the {ranks} ranks share this machine; torch sends over "
            f"loopback, gradwire over {within}{'' if shared else ', too'}."
        )
    return [said] if machines < ranks else []
