"""The report's last part: what was run, on which machine, at which commit."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from gradwire.bench.report.kinds import Row
from gradwire.bench.report.parts import Cell, Question, Section, Table
from gradwire.bench.report.quantities import DASH, network, plural
from gradwire.bench.report.rows import grouped

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
            f"{plural(len(silent), 'row')} of {len(rows)} {_are(len(silent))} without command, "
            "commit and machine: from files written before gradwire recorded these, from checks "
            "of `gradwire doctor` that measure nothing, or from something else."
        )
    found = list(runs.values())
    loaded = [run for run, _ in found if _overloaded(run)]
    if loaded:
        most = max(loaded, key=lambda run: float(run["load"]))
        about.append(
            f"Before {len(loaded)} of {plural(len(found), 'run')}, more processes ran or waited "
            f"than the machine has cores (a load of {most['load']} on {_cores(most)}): the times "
            f"of {'this run' if len(loaded) == 1 else 'these runs'} may be those of a busy machine."
        )
    if not found:
        return Section("What was run", about)
    common = [key for key in _NAMES if len({str(run.get(key)) for run, _ in found}) == 1]
    first, mine = found[0]
    if len(found) == 1:
        keys = _run_keys(found, list(_NAMES))
        cells = [[Cell(name), _cell(first, mine, key)] for key, name in keys.items()]
        return Section("What was run", about, [Question("", table=Table((), cells))])
    shared = Table((), [[Cell(_NAMES[key]), _value(first, key)] for key in common])
    keys = _run_keys(found, [key for key in _NAMES if key not in common])
    each = Table(list(keys.values()), [[_cell(*one, key) for key in keys] for one in found])
    return Section("What was run", about, [Question("", table=shared), Question("", table=each)])


def told(rows: Sequence[Row], among: Sequence[Row]) -> list[str]:
    """A sentence on the run of `rows`, where `among` has more than one run and they are of one."""
    runs = grouped(rows, "run")
    run = rows[0].get("run")
    if len(runs) > 1 or len(grouped(among, "run")) < 2 or not isinstance(run, dict):
        return []
    commit = run.get("commit") or "no git checkout"
    return [f"Rows of one run alone, of {run.get('date')}, at {commit}: {run.get('command')}"]


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _cores(run: dict[str, Any]) -> int | None:
    """Of the machine, where its description has them."""
    found = re.search(r"\b(\d{1,6}) cores?\b", str(run.get("machine")))
    return int(found[1]) if found else None


def _overloaded(run: dict[str, Any]) -> bool:
    cores, load = _cores(run), run.get("load")
    return cores is not None and load is not None and float(load) > cores


def _run_keys(
    found: Sequence[tuple[dict[str, Any], list[Row]]], more: Sequence[str]
) -> dict[str, str]:
    """The keys of runs that are shown, and their names."""
    keys = {"command": "command"}
    if any("note" in run for run, _ in found):
        keys["note"] = "note"
    keys |= {key: _NAMES[key] for key in more}
    return {**keys, "net": "network", "load": "load before", "date": "date", "rows": "rows"}


def _cell(run: dict[str, Any], rows: Sequence[Row], key: str) -> Cell:
    if key == "net":
        nets = dict.fromkeys(str(row["net"]) for row in rows if "net" in row)
        return Cell("; ".join(network(net) for net in nets) or DASH)
    return Cell(f"{len(rows):,}") if key == "rows" else _value(run, key)


def _value(run: dict[str, Any], key: str) -> Cell:
    if key == "commit" and key in run and run[key] is None:
        return Cell("not in a git checkout")
    return Cell("not recorded" if run.get(key) is None else str(run[key]))
