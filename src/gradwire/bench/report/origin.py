"""The report's first part: what was run, on which machine, at which commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gradwire.bench.report.parts import Cell, Question, Section, Table
from gradwire.bench.report.quantities import network, plural
from gradwire.bench.report.rows import Row

_KEYS = (
    ("command", "command"),
    ("note", "note"),
    ("commit", "commit"),
    ("gradwire", "gradwire"),
    ("machine", "machine"),
    ("torch", "torch"),
    ("python", "Python"),
    ("load", "load before"),
    ("date", "date"),
)


def section(rows: Sequence[Row]) -> Section:
    """A table for each run that rows tell of, and how many tell of none."""
    runs: dict[str, tuple[dict[str, Any], list[Row]]] = {}
    silent: list[Row] = []
    for row in rows:
        run = row.get("run")
        if isinstance(run, dict):
            runs.setdefault(json.dumps(run, sort_keys=True), (run, []))[1].append(row)
        else:
            silent.append(row)
    questions = [
        _run(run, mine, len(runs) > 1, at) for at, (run, mine) in enumerate(runs.values(), 1)
    ]
    if silent:
        count = plural(len(silent), "row")
        text = (
            f"{count} of {len(rows)} do not say what command, commit and machine made them: files "
            "written before gradwire recorded that, or by something else."
        )
        questions.append(Question("Rows of unknown origin", [text]))
    return Section("What was run", (), questions)


def _run(run: dict[str, Any], rows: Sequence[Row], several: bool, place: int) -> Question:
    table = []
    for key, name in _KEYS:
        if key in run:
            value = run[key]
            absent = "not in a git checkout" if key == "commit" else "not recorded"
            table.append([Cell(name), Cell(absent if value is None else str(value))])
    nets = dict.fromkeys(str(row["net"]) for row in rows if "net" in row)
    if nets:
        table.append([Cell("network"), Cell("; ".join(network(net) for net in nets))])
    table.append([Cell("rows"), Cell(f"{len(rows):,}")])
    return Question(f"Run {place}" if several else "", table=Table((), table))
