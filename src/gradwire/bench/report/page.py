"""`gradwire report FILE...`: the page, or the picture, of rows.

Every row is in one section. The page is one file: nothing is fetched when it is opened, and nothing
in it runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from gradwire.bench.report import (
    adapting,
    aggregators,
    collectives,
    doctor,
    errors,
    gains,
    kernels,
    learning,
    links,
    origin,
    others,
    planning,
    sharded_simulation,
    simulation,
    svg,
    training,
)
from gradwire.bench.report.kinds import Row, check
from gradwire.bench.report.parts import Section
from gradwire.bench.report.quantities import network, plural
from gradwire.bench.report.rows import grouped, read, sort
from gradwire.errors import ConfigError

TITLE = "gradwire benchmark report"
_RUN = (
    "parameters",
    "task_options",
    "sharded",
    "composed",
    "run",
)  # what else tells one run from another
_MAKERS = {
    "bench train": training.sections,
    "decisions": others.decisions,
    "bench adapt": adapting.sections,
    "probe": links.sections,
    "bench planner": planning.choices,
    "bench ablation": planning.ablations,
    "bench error": errors.sections,
    "bench aggregators": aggregators.sections,
    "bench collectives": collectives.sections,
    "bench kernels": kernels.sections,
    "sim": simulation.sections,
    "sim --sharded": sharded_simulation.sections,
    "sim --validate": simulation.validation,
    "bench transports": others.transports,
    "bench profile": others.profile,
    "doctor": doctor.sections,
    "": others.unknown,
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
    groups = grouped(rows, "task", "net", "ranks", *_RUN)
    runs = {
        key: mine for key, mine in groups.items() if any(r["row"] == "evaluation" for r in mine)
    }
    if len(runs) != 1:
        raise ConfigError(
            "--svg draws the evaluations of one `gradwire bench train`; these files have "
            f"{len(runs)} such runs"
        )
    ((task, net, ranks, *_), mine), *_ = runs.items()
    evaluations = [row for row in mine if row["row"] == "evaluation"]
    targets = [row["target"] for row in mine if row["row"] == "summary"]
    drawn = learning.against_seconds(evaluations, targets[0] if targets else None)
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

    package = resources.files("gradwire.bench.report")
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
    found: list[Section] = []
    for kind, make in _MAKERS.items():
        if by_kind[kind]:
            found += make(by_kind[kind])
    return [*found, origin.section(rows)]


def results(rows: Sequence[Row]) -> list[str]:
    """What stands first on the page: the result of a training."""
    return training.headline(sort(rows)["bench train"])


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error
