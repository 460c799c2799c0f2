"""`gradwire report FILE...`: the page, or the picture, of rows.

Every row is in one section. The page is one file: nothing is fetched when it is opened, and nothing
in it runs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire_tools.bench.quantities import digits, network, plural, spelled
from gradwire_tools.report import (
    adapting,
    costs,
    errors,
    gains,
    learning,
    machine,
    origin,
    planning,
    simulation,
    svg,
    training,
)
from gradwire_tools.report.kinds import Row, check
from gradwire_tools.report.parts import Question, Section, Table
from gradwire_tools.report.rows import grouped, read, sort, split

TITLE = "gradwire benchmark report"

Make = Callable[[Sequence[Row]], list[Section]]


def _per(keys: str, section: Callable[[Sequence[Row]], Section]) -> Make:
    """A section for each group of rows that have the same values under `keys`."""
    return lambda rows: [section(mine) for mine in grouped(rows, *keys.split()).values()]


def _unknown(rows: Sequence[Row]) -> list[Section]:
    """Rows that no other part knows: said so, and shown under their own keys."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(key for key in row if key != "run"), []).append(row)
    questions = []
    for keys, mine in kinds.items():
        cells = [[_plain(row[key]) for key in keys] for row in mine]
        questions.append(Question(f"{plural(len(mine), 'row')}", table=Table(keys, cells)))
    about = (
        "The report has no figure for these rows: no benchmark of this version writes such keys. "
        "They are listed as they are, without units."
    )
    return [Section("Rows of an unknown kind", [about], questions)]


def _plain(value: object) -> str:
    if isinstance(value, float):
        return digits(value, 4)
    return json.dumps(value) if isinstance(value, list | dict) else spelled("", value)


_MAKERS: dict[str, Make] = {
    "bench train": training.sections,
    "decisions": _per("task net ranks", planning.decisions),
    "bench adapt": _per("task error_metric run", adapting.policies),
    "probe": _per("ranks net run", machine.probe),
    "bench planner": _per("ranks run", planning.choices),
    "bench ablation": _per("model numel net run", planning.ablation),
    "bench error": errors.sections,
    "bench aggregators": _per("task ranks numel", costs.aggregators),
    "bench collectives": _per("ranks per_node net numel", costs.collectives),
    "bench kernels": costs.kernels,
    "sim": simulation.collectives,
    "sim --sharded": _per("model machine", simulation.sharded),
    "sim --validate": simulation.validation,
    "bench transports": costs.transports,
    "bench profile": _per("method net ranks numel", costs.profile),
    "doctor": machine.doctor,
    "": _unknown,
}


def write(files: Iterable[Path], page: Path, title: str = TITLE) -> None:
    """Reads rows from `files` (a JSON object per line) and writes the page.

    Raises:
        ConfigError: a file cannot be read, holds no rows, or a line of it is no row, as the message
            says; the page cannot be written; or jinja2 is not installed.
    """
    check_packages()
    _write(page, _render([row for file in files for row in read(file)], title))


def picture(files: Iterable[Path], file: Path) -> None:
    """Writes one figure alone, as an SVG for a page of one's own: loss against training time, or
    of a training on several networks the map of gains.

    Raises:
        ConfigError: as `write`, or the rows are not those of one `gradwire bench train`.
    """
    rows = sort([row for one in files for row in read(one)])["bench train"]
    rows = [row for row in rows if row["row"] != "validation"]
    several = gains.picture(rows)
    if several is not None:
        _write(file, svg.alone(*several))
        return
    of_run = ("parameters", "task_options", "sharded", "composed", "run")
    groups = grouped(rows, "task", "net", "ranks", *of_run)
    runs = {key: mine for key, mine in groups.items() if split(mine)[1]}
    if len(runs) != 1:
        raise ConfigError(
            "--svg draws the evaluations of one `gradwire bench train`; these files have "
            f"{len(runs)} such runs"
        )
    ((task, net, ranks, *_), mine), *_ = runs.items()
    summaries, evaluations = split(mine)
    drawn = learning.against_seconds(evaluations, summaries[0]["target"] if summaries else None)
    _write(file, svg.alone(drawn, f"{task}, {ranks} ranks, {network(net)}"))


def render(rows: Sequence[Row], title: str = TITLE) -> str:
    """The page as HTML.

    Raises:
        ConfigError: a row is not as its kind is, or jinja2 is not installed.
    """
    check_packages()
    for place, row in enumerate(rows, start=1):
        check(row, f"row {place}")
    return _render(rows, title)


def _render(rows: Sequence[Row], title: str) -> str:
    import jinja2

    package = resources.files("gradwire_tools.report")
    template = package.joinpath("page.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        title=title,
        results=results(rows),
        sections=sections(rows),
        rows=plural(len(rows), "row"),
        style=svg.STYLE,
    )


def check_packages() -> None:
    """Whether a report can be made: before minutes of measuring, not after.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise ConfigError(
            'the report needs jinja2, which is not installed: pip install "gradwire[report]"'
        )


def sections(rows: Sequence[Row]) -> list[Section]:
    """The kinds of rows in a fixed order, each row in exactly one section, then what was run.

    The rows have been checked.

    Raises:
        ConfigError: there are no rows.
    """
    if not rows:
        raise ConfigError("there are no rows to report on")
    by_kind = sort(rows)
    made = [make(by_kind[kind]) for kind, make in _MAKERS.items() if by_kind[kind]]
    return [*(section for some in made for section in some), origin.section(rows)]


def results(rows: Sequence[Row]) -> list[str]:
    """What stands first on the page: the result of a training."""
    return training.headline(sort(rows)["bench train"])


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error
