"""What the measured steps of `gradwire doctor --ranks N` mean, in plain sentences.

The choice is that of "auto": `worth` of the median steps, from the most exact method to the least.
It is sure if three turns of four by themselves choose the same, and if what other processes took of
the machines could not turn it: on idle ones each method's step is shorter by `_slowed` at most.
Where it is not, the line to write is "auto", which tries.

The lines, in this order: the verdict; what was measured, where it was no network between idle
machines; what would make the answer surer; what may be faster still; what to write.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from gradwire.decide.auto import worth
from gradwire_tools.bench.quantities import digits, faster, percent_of, plural, seconds, than
from gradwire_tools.bench.rows import Row

METHODS = FULL, HALF, OWN, OURS = "torch-fp32", "torch-fp16-hook", "bf16", "qsgd:bits=4"

_MOSTLY = 0.75  # of the turns
_HARDLY = 0.1  # of a step: communication that nobody notices
_QUIET, _ALL = 0.1, 0.95  # of the cores: what others take of a machine at rest, and of a full one
_SLOW = 5e8  # bits per second, up to which docs/how-to/choosing.md advises powersgd
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
_LOWER = (
    "Below 500 Mbit/s powersgd:rank=8 may be faster still (docs/how-to/choosing.md), which depends "
    "on your model's shapes; to see it: gradwire plan --model MODEL --net RATE,LATENCY"
)


def verdict(
    rows: Sequence[Row], surer: Sequence[str] = (), bandwidth: float = math.inf
) -> tuple[bool, str]:
    """Whether 4 bits surely pay, and the lines, from the rows of methods.

    Args:
        surer: what would make the answer surer, beside an idle machine and a network.
        bandwidth: of the slowest link, in bits per second.
    """
    by = {row["method"]: row for row in rows}
    medians = [by[method]["step_seconds"] for method in METHODS]
    chosen, first = worth(medians), rows[0]
    turns = list(zip(*(by[method]["turn_seconds"] for method in METHODS), strict=True))
    agreed = sum(worth(turn) == chosen for turn in turns)
    method, slowed = METHODS[chosen], _slowed(first)
    idle = itertools.product(*((took, took / slowed) for took in medians))
    turned = any(worth(steps) != chosen for steps in idle)
    sure = agreed >= _MOSTLY * len(turns) and not turned
    found, where = _FOUND[method], "The" if first["machines"] == 1 else "A"
    cores = plural(first["cores"], "core")
    taken = f"other processes take {percent_of(first['others'])} of its {cores}"
    if turned:
        found = f"{where} machine is busy: {taken}, which may turn the answer: by the medians"
    elif not sure:
        found = f"Not clear: {agreed} of {len(turns)} turns choose as the medians do, by which"
    joint = ":" if sure else ""
    lines = [f"{found}{joint} a step {_SAID[method]} is {_gains(by, method)}."]
    lines += _circumstances(first)
    if slowed > 1 and not turned:
        lines += [f"{where} machine is busy: {taken}, too little to turn the answer."]
    surer = [*(["let the machines idle"] if turned else []), *surer]
    lines += [f"To be surer: {'; '.join(surer)}."] if surer else []
    lines += [_LOWER] if bandwidth < _SLOW and method == OURS else []
    return sure and method == OURS, "\n".join([*lines, _LINES[method] if sure else _TRY])


def computing(rows: Sequence[Row]) -> str:
    """How long a step computes, and how much longer one in fp32 takes."""
    full = next(row for row in rows if row["method"] == FULL)
    waiting = full["exposed_seconds"] / full["step_seconds"]
    return (
        f"{seconds(full['compute_seconds'])} per step; a step in fp32 takes "
        f"{seconds(full['step_seconds'])}, of which {percent_of(waiting)} is waiting for gradients"
    )


def _slowed(row: Row) -> float:
    """How many times as long computing may take beside other processes. Where these take all cores,
    more may wait for one: as many as the load average says."""
    taken = row["others"]
    full = row["load"] / row["cores"] if taken > _ALL else 0.0
    return float(1 + max(taken, full)) if taken > _QUIET else 1.0


def _gains(by: dict[str, Row], method: str) -> str:
    """How much faster a method's median step is than others'; and why, where little is gained."""
    took = {name: row["step_seconds"] for name, row in by.items()}
    others = [one for one in reversed(METHODS) if one not in (method, OWN)]
    others = others if method == OURS else [*others, *({OWN} - {method})]
    gains = [than(faster(took[method], took[one], 2), _SAID[one]) for one in others]
    said = ", ".join(gains)
    if method == OURS:
        own, whole = (digits(took[HALF] / took[one], 2) for one in (OWN, OURS))
        if float(own) > 1:
            said += f"; {own} of the {whole} times come from gradwire's transport, without 4 bits"
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
