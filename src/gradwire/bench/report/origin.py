"""The report's first part: what was run, on which machine, at which commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gradwire.bench.report.parts import Cell, Question, Section, Table
from gradwire.bench.report.quantities import network, plural
from gradwire.bench.report.rows import Row

_NAMES = {
    "commit": "commit",
    "gradwire": "gradwire",
    "machine": "machine",
    "torch": "torch",
    "python": "Python",
}


def section(rows: Sequence[Row]) -> Section:
    """What all runs have in common, what each run was, and how many rows tell of none."""
    runs: dict[str, tuple[dict[str, Any], list[Row]]] = {}
    silent: list[Row] = []
    for row in rows:
        run = row.get("run")
        if isinstance(run, dict):
            runs.setdefault(json.dumps(run, sort_keys=True), (run, []))[1].append(row)
        else:
            silent.append(row)
    about = []
    if silent:
        about.append(
            f"{plural(len(silent), 'row')} of {len(rows)} do not say what command, commit and "
            "machine made them: files written before gradwire recorded that, or by something else."
        )
    found = list(runs.values())
    common = [key for key in _NAMES if len({str(run.get(key)) for run, _ in found}) == 1]
    questions = []
    if len(found) > 1 and common:
        cells = [[Cell(_NAMES[key]), _value(found[0][0], key)] for key in common]
        questions.append(Question("", table=Table((), cells)))
    for place, (run, mine) in enumerate(found, 1):
        own = [key for key in _NAMES if len(found) == 1 or key not in common]
        title = f"Run {place}" if len(found) > 1 else ""
        questions.append(Question(title, table=Table((), _run(run, mine, own))))
    return Section("What was run", about, questions)


def _run(run: dict[str, Any], rows: Sequence[Row], own: Sequence[str]) -> list[list[Cell]]:
    cells = [[Cell("command"), _value(run, "command")]]
    if "note" in run:
        cells.append([Cell("note"), _value(run, "note")])
    cells += [[Cell(_NAMES[key]), _value(run, key)] for key in own]
    nets = dict.fromkeys(str(row["net"]) for row in rows if "net" in row)
    if nets:
        cells.append([Cell("network"), Cell("; ".join(network(net) for net in nets))])
    when = _value(run, "date").text
    load = f", load {run['load']} in the minute before" if "load" in run else ""
    return [*cells, [Cell("date"), Cell(f"{when}{load}; {plural(len(rows), 'row')}")]]


def _value(run: dict[str, Any], key: str) -> Cell:
    if key == "commit" and key in run and run[key] is None:
        return Cell("not in a git checkout")
    return Cell("not recorded" if run.get(key) is None else str(run[key]))
