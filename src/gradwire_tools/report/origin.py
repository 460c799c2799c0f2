"""The report's last part: what was run, on which machine, at which commit."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from gradwire_tools.bench.quantities import DASH, network, plural
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.parts import Question, Section, Table
from gradwire_tools.report.rows import grouped

_SHARED = ("commit", "gradwire", "machine", "torch", "Python")  # may be told once for all runs
_NAMES = {
    "command": "command", "note": "note", **{name.lower(): name for name in _SHARED},
    "net": "network", "load": "load before", "date": "date", "rows": "rows",
}  # fmt: skip


def section(rows: Sequence[Row]) -> Section:
    """What all runs have in common, what each run was, and how many rows tell of none."""
    telling = [row for row in rows if isinstance(row.get("run"), dict)]
    runs: dict[str, list[Row]] = {}
    for row in telling:
        runs.setdefault(json.dumps(row["run"], sort_keys=True), []).append(row)
    silent = len(rows) - len(telling)
    about = []
    if silent:
        about.append(
            f"{plural(silent, 'row')} of {len(rows)} {'is' if silent == 1 else 'are'} without "
            "command, commit and machine: from files written before gradwire recorded these, from "
            "checks of `gradwire doctor` that measure nothing, or from something else."
        )
    loaded = [mine[0]["run"] for mine in runs.values() if _overloaded(mine[0]["run"])]
    if loaded:
        most = max(loaded, key=lambda run: float(run["load"]))
        about.append(
            f"Before {len(loaded)} of {plural(len(runs), 'run')}, more processes ran or waited "
            f"than the machine has cores (a load of {most['load']} on {_cores(most)}): the times "
            f"of {'this run' if len(loaded) == 1 else 'these runs'} may be those of a busy machine."
        )
    each = {name: [_said(mine, key) for mine in runs.values()] for key, name in _NAMES.items()}
    if not any("note" in row["run"] for row in telling):
        del each["note"]
    common = {name: told[0] for name, told in each.items() if len(set(told)) == 1}
    if len(runs) > 1:
        common = {name: told for name, told in common.items() if name in _SHARED}
    own = {name: told for name, told in each.items() if name not in common}
    tables = [Table((), list(common.items()))] if common else []
    if own:
        tables.append(Table(list(own), list(zip(*own.values(), strict=True))))
    return Section("What was run", about, [Question("", table=table) for table in tables if runs])


def told(rows: Sequence[Row], among: Sequence[Row]) -> list[str]:
    """A sentence on the run of `rows`, where `among` has more than one run and they are of one."""
    runs = grouped(rows, "run")
    run = rows[0].get("run")
    if len(runs) > 1 or len(grouped(among, "run")) < 2 or not isinstance(run, dict):
        return []
    commit = run.get("commit") or "no git checkout"
    return [f"Rows of one run alone, of {run.get('date')}, at {commit}: {run.get('command')}"]


def _cores(run: dict[str, Any]) -> int | None:
    """Of the machine, where its description has them."""
    found = re.search(r"\b(\d{1,6}) cores?\b", str(run.get("machine")))
    return int(found[1]) if found else None


def _overloaded(run: dict[str, Any]) -> bool:
    cores, load = _cores(run), run.get("load")
    return cores is not None and load is not None and float(load) > cores


def _said(rows: Sequence[Row], key: str) -> str:
    """A cell on the run of these rows."""
    run = rows[0]["run"]
    if key == "net":
        nets = dict.fromkeys(str(row["net"]) for row in rows if "net" in row)
        return "; ".join(map(network, nets)) or DASH
    if key == "rows":
        return f"{len(rows):,}"
    if key == "commit" and run.get(key, "") is None:
        return "not in a git checkout"
    return "not recorded" if run.get(key) is None else str(run[key])
