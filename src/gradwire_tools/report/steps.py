"""The report on a training step: how long it takes, of what parts, and how many bytes it sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradwire_tools.bench.lengths import per_step
from gradwire_tools.bench.quantities import (
    DASH,
    digits,
    faster,
    percent_of,
    rate,
    reach,
    seconds,
    size,
    than,
)
from gradwire_tools.bench.train.baselines import Baselines
from gradwire_tools.report.gain import Verdict, by_spreads
from gradwire_tools.report.parts import COMPUTING, Bar, Bars, Question, table
from gradwire_tools.report.rows import Row

_UNKNOWN = "not known"


def times(summaries: Sequence[Row]) -> Question:
    """Median step, its quartiles, and its parts; what no row carries is said to be not known."""
    baselines = Baselines.of_rows(summaries)
    baseline = baselines.best(summaries, "step_seconds")
    drawn, shown, answers, spent = [], [], [], []
    for row in summaries:
        whole, computing, kernels = (
            row.get(key) for key in ("step_seconds", "ideal_step_seconds", "kernel_seconds")
        )
        exposed = None
        if whole is not None and computing is not None:
            exposed = max(0.0, whole - computing)
        if whole is not None:
            parts = [whole] if exposed is None else [whole - exposed, exposed]
            drawn.append(Bar(row["method"], parts, row.get("step_seconds_quartiles")))
        told, cell = _against(row, baseline)
        if told and row["method"] != baselines.full:
            answers.append(f"A step of {row['method']} is {told}.")
        if kernels is not None and whole:
            spent.append(
                f"{row['method']} spends {seconds(kernels)} of a step in its kernels, "
                f"{percent_of(kernels / whole)} of the step's time."
            )
        shown.append({**row, "against": cell, "exposed": seconds(exposed)})
    spent.append(
        "Parts overlap and do not add up. Kernels are encoding, merging and decoding together, "
        "with checksums; no benchmark times encoding and decoding apart. The wire is what the "
        "bytes take at the network's rate, by calculation; all else is measured."
    )
    return Question(
        "How long does a step take, and where does it go?",
        [*answers, *spent],
        Bars(drawn, parts=COMPUTING) if drawn else None,
        "Median step of rank 0. Computing is a step without communication, measured at the end of "
        "the same run; the rest is communication that computing does not hide. "
        "The spread is that of the middle half of the steps.",
        table(
            shown,
            "method | step = step_seconds | middle half = half | computing = ideal_step_seconds | "
            "exposed | waiting after backward = waiting | kernels | wire at full rate = wire | "
            "against {name} = against",
            name=baselines.against(baseline),
            half=lambda row: middle_half(row, "step_seconds_quartiles"),
            waiting=lambda row: _known(row, "exposed_seconds"),
            kernels=lambda row: _known(row, "kernel_seconds"),
            wire=_wire,
        ),
    )


def middle_half(row: Row, key: str) -> str:
    """The bounds of the middle half, where the row has them."""
    return reach(row.get(key) or (), seconds, "not recorded")


def _known(row: Row, key: str) -> str:
    return _UNKNOWN if row.get(key) is None else seconds(row[key])


def _wire(row: Row) -> str:
    bits, sent = rate(row["net"]), per_step(row, "wire_bytes")
    if sent is None:
        return _UNKNOWN
    return seconds(8 * sent / bits) if bits and math.isfinite(bits) else "no network"


def _against(row: Row, baseline: Row | None) -> tuple[str, str]:
    """A row's step against the baseline's, in a clause and in the table."""
    if baseline is None or row is baseline:
        return "", DASH
    if not baseline["step_seconds"] or row["step_seconds"] is None:
        return "", DASH
    key = "step_seconds_quartiles"
    compared = faster(row["step_seconds"], baseline["step_seconds"])
    told = than(compared, f"one of {baseline['method']}")
    near = f"about as fast as one of {baseline['method']}: the middle halves of the steps overlap"
    unknown = f"{told}; the spread of the steps is not recorded, so this is not judged"
    verdict = by_spreads(row.get(key), baseline.get(key))
    return {
        Verdict.LESS: (told, compared),
        Verdict.MORE: (f"{told}: it does not pay here", compared),
        Verdict.NOISE: (near, "about as fast"),
        Verdict.UNKNOWN: (unknown, f"{compared}, {verdict.value}"),
    }[verdict]


def sent(summaries: Sequence[Row]) -> Question:
    """Bytes per rank and step, by the method's own count and by the kernel's."""
    baselines = Baselines.of_rows(summaries)
    baseline = baselines.best(summaries, "step_seconds")
    name = baselines.against(baseline)
    base = None if baseline is None else per_step(baseline, "wire_bytes")
    drawn, shown, answers = [], [], []
    for row in summaries:
        mine, against = per_step(row, "wire_bytes"), DASH
        if mine is not None:
            drawn.append(Bar(row["method"], [mine]))
        if mine and base and row is not baseline:
            against, word = _fewer(mine / base)
            if row["method"] != baselines.full:
                answers.append(f"{row['method']} sends {against} bytes {word} {name}.")
        shown.append({**row, "against": against})
    sharded = any("weights_wire_bytes" in row for row in summaries)
    by_kind = "weights, per step = weights | gradients, per step = gradients | " if sharded else ""
    return Question(
        "How many bytes are sent?",
        answers,
        Bars(drawn, "per rank and step", sizes=True) if drawn else None,
        "Sent by rank 0: torch's methods by formula, gradwire as counted, headers included. The "
        "link is what the network interface counted, TCP and IP included. Memory is what a method "
        f"holds beyond plain {'FSDP2' if sharded else 'DDP'}, where it counts it.",
        table(
            shown,
            f"method | per step = sent | against {{name}} = against | {by_kind}"
            "on the link, per step = link | in all = wire_bytes | memory = peak_extra_bytes",
            name=name,
            sent=lambda row: size(per_step(row, "wire_bytes")),
            weights=lambda row: size(per_step(row, "weights_wire_bytes")),
            gradients=lambda row: size(per_step(row, "gradients_wire_bytes")),
            link=lambda row: size(per_step(row, "link_bytes")),
        ),
    )


def _fewer(ratio: float) -> tuple[str, str]:
    """Of bytes against a baseline's: "2.00 times fewer", and "than" or "as"."""
    if f"{ratio:.2f}" == "1.00":
        return "as many", "as"
    return f"{digits(max(ratio, 1 / ratio))} times {'more' if ratio > 1 else 'fewer'}", "than"
