"""`gradwire report FILE...`: the page, or the picture, of rows.

Every row is in one section. The page is one file: nothing is fetched when it is opened, and nothing
in it runs.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire_tools.bench.quantities import DASH, digits, network, plural, spelled
from gradwire_tools.report import costs, errors, machine, predictions, training
from gradwire_tools.report.parts import Question, Section, Table
from gradwire_tools.report.rows import Row, grouped, read, sort

TITLE = "gradwire benchmark report"


def write(files: Iterable[Path], page: Path, title: str = TITLE) -> None:
    """Reads rows from `files` (a JSON object per line) and writes the page.

    Raises:
        ConfigError: a file cannot be read, holds no rows, or a line of it is no row, as the message
            says; the page cannot be written; or a package is not installed.
    """
    _write(page, render(read(*files), title))


def picture(files: Iterable[Path], file: Path) -> None:
    """Writes one chart alone, as an SVG for a page of one's own: that of `training.picture`.

    Raises:
        ConfigError: as `write`, or the rows are not those of one `gradwire bench train`.
    """
    _write(file, drawn(read(*files)))


def drawn(rows: Iterable[Row]) -> str:
    """What `picture` writes."""
    check_packages()
    from gradwire_tools.report import draw

    return draw.alone(*training.picture(sort(rows)["bench train"]))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def render(rows: Sequence[Row], title: str = TITLE) -> str:
    """The page as HTML.

    The rows have been checked.

    Raises:
        ConfigError: there are no rows, or a package is not installed.
    """
    check_packages()
    import jinja2

    from gradwire_tools.report import draw

    template = resources.files("gradwire_tools.report").joinpath("page.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    number = itertools.count(1)
    return environment.from_string(template).render(
        title=title,
        results=training.headline(sort(rows)["bench train"]),
        sections=sections(rows),
        rows=plural(len(rows), "row"),
        style=draw.STYLE,
        drawn=lambda chart, told: draw.svg(chart, told, f"figure {next(number)}"),
    )


def check_packages() -> None:
    """Whether a report can be made: before minutes of measuring, not after.

    Raises:
        ConfigError: jinja2 or matplotlib is not installed.
    """
    for name in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f'the report needs {name}, which is not installed: pip install "gradwire[report]"'
            )


def sections(rows: Sequence[Row]) -> list[Section]:
    """The kinds of rows in a fixed order, each row in exactly one section, then what was run.

    The rows have been checked.

    Raises:
        ConfigError: there are no rows.
    """
    if not rows:
        raise ConfigError("there are no rows to report on")
    by_kind, made = sort(rows), []
    for kind, (keys, section) in _SECTIONS.items():
        for mine in grouped(by_kind[kind], *keys.split()).values():
            of_kind = section(mine)
            made += of_kind if isinstance(of_kind, list) else [of_kind]
    return [*made, _what_was_run(rows)]


def _listed(rows: Sequence[Row], title: str, about: Sequence[str] = ()) -> Section:
    """Rows under their own keys, as they are."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(key for key in row if key != "run"), []).append(row)
    questions = []
    for keys, mine in kinds.items():
        cells = [[_plain(row[key]) for key in keys] for row in mine]
        questions.append(Question(f"{plural(len(mine), 'row')}", table=Table(keys, cells)))
    return Section(title, about, questions)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return digits(value, 4)
    return json.dumps(value) if isinstance(value, list | dict) else spelled("", value)


_UNKNOWN = (
    "The report has no figure for these rows: no benchmark of this version writes such keys. "
    "They are listed as they are, without units."
)
# Kinds of rows in the page's order: a section for all rows that share the values of these keys.
_SECTIONS: dict[str, tuple[str, Callable[[Sequence[Row]], Section | list[Section]]]] = {
    "bench train": ("", training.sections),
    "decisions": ("task net ranks", predictions.decisions),
    "bench adapt": ("task error_metric run", errors.policies),
    "bench adapt --sensitivity": (
        "task at reference run",
        lambda rows: _listed(rows, "Error and loss by group"),
    ),
    "probe": ("ranks net run", machine.probe),
    "bench planner": ("ranks run", predictions.choices),
    "bench ablation": ("model numel net run", predictions.ablation),
    "bench error": ("", errors.sections),
    "bench aggregators": ("task ranks numel", costs.aggregators),
    "bench collectives": ("ranks per_node net numel", costs.collectives),
    "bench kernels": ("", costs.kernels),
    "sim": ("", predictions.simulated),
    "sim --sharded": ("model machine", predictions.sharded),
    "sim --methods outer": (
        "model net machine",
        lambda rows: _listed(rows, "Simulation of replicas that meet"),
    ),
    "sim --validate": ("", predictions.validation),
    "bench transports": ("", costs.transports),
    "bench profile": ("method net ranks numel", costs.profile),
    "doctor": ("", machine.doctor),
    "bench record": ("", lambda rows: _listed(rows, "Recorded gradients")),
    "gpu-check": ("", lambda rows: _listed(rows, "Checks on a GPU")),
    "": ("", lambda rows: _listed(rows, "Rows of an unknown kind", [_UNKNOWN])),
}


# ---- what was run

_SHARED = ("commit", "gradwire", "machine", "torch", "Python")  # may be told once for all runs
_NAMES = {
    "command": "command", "note": "note", **{name.lower(): name for name in _SHARED},
    "net": "network", "load": "load before", "date": "date", "rows": "rows",
}  # fmt: skip


def _what_was_run(rows: Sequence[Row]) -> Section:
    """What all runs have in common, what each run was, and how many rows tell of none."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if isinstance(row.get("run"), dict):
            runs.setdefault(json.dumps(row["run"], sort_keys=True), []).append(row)
    about, loaded = [], []
    silent = len(rows) - sum(map(len, runs.values()))
    if silent:
        about.append(
            f"{plural(silent, 'row')} of {len(rows)} {'is' if silent == 1 else 'are'} without "
            "command, commit and machine: from files written before gradwire recorded these, from "
            "checks of `gradwire doctor` that measure nothing, or from something else."
        )
    for run in (mine[0]["run"] for mine in runs.values()):
        found = re.search(r"\b(\d{1,6}) cores?\b", str(run.get("machine")))
        if found and run.get("load") is not None and float(run["load"]) > int(found[1]):
            loaded.append((float(run["load"]), run["load"], found[1]))
    if loaded:
        _, load, cores = max(loaded)
        about.append(
            f"Before {len(loaded)} of {plural(len(runs), 'run')}, more processes ran or waited "
            f"than the machine has cores (a load of {load} on {cores}): the times "
            f"of {'this run' if len(loaded) == 1 else 'these runs'} may be those of a busy machine."
        )
    each = {name: [_said(mine, key) for mine in runs.values()] for key, name in _NAMES.items()}
    if not any("note" in mine[0]["run"] for mine in runs.values()):
        del each["note"]
    common = {
        name: told[0]
        for name, told in each.items()
        if len(set(told)) == 1 and (len(runs) == 1 or name in _SHARED)
    }
    own = {name: told for name, told in each.items() if name not in common}
    tables = [Table((), list(common.items()))] if common else []
    if own and runs:
        tables.append(Table(list(own), list(zip(*own.values(), strict=True))))
    return Section("What was run", about, [Question("", table=table) for table in tables])


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
