"""The report on a step's parts: computing, kernels, the wire, and communication that is exposed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lengths import per_step
from gradwire.bench.report.parts import Cell, Question, Table
from gradwire.bench.report.quantities import percent_of, rate, seconds

_TITLE = "What happens in a step's time?"
_UNKNOWN = "not known"


def question(summaries: Sequence[Row]) -> Question:
    """A row per method; what no row carries is said to be not known."""
    table, answers = [], []
    for row in summaries:
        step, computing = row["step_seconds"], row["ideal_step_seconds"]
        exposed = None if None in (step, computing) else max(0.0, step - computing)
        kernels = row.get("kernel_seconds")
        if kernels is not None and step:
            answers.append(
                f"{row['method']} spends {seconds(kernels)} of a step in its kernels, "
                f"{percent_of(kernels / step)} of the step's time."
            )
        table.append([
            Cell(row["method"]), Cell(_known(computing), True), Cell(_known(kernels), True),
            Cell(_UNKNOWN), Cell(_wire(row), True), Cell(_known(exposed), True),
            Cell(_known(row.get("exposed_seconds")), True),
        ])  # fmt: skip
    answers.append(
        "Parts overlap and do not add up. Kernels are encoding, merging and decoding together, "
        "with checksums; no benchmark times encoding and decoding apart. The wire is what the "
        "bytes take at the network's rate, by calculation; all else is measured."
    )
    headings = ["method", "computing", "kernels", "encode and decode apart", "wire at full rate"]
    headings += ["exposed: step less computing", "waiting after backward"]
    return Question(_TITLE, answers, table=Table(headings, table))


def _known(value: float | None) -> str:
    return _UNKNOWN if value is None else seconds(value)


def _wire(row: Row) -> str:
    bits = rate(row["net"])
    sent = per_step(row, "wire_bytes")
    if sent is None:
        return _UNKNOWN
    if not math.isfinite(bits) or not bits:
        return "no network"
    return seconds(8 * sent / bits)
