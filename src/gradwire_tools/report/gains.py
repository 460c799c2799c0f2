"""The report on all networks of a training: the gain over 16 bit, as a map methods x networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwire_tools.bench.quantities import DASH, network, plural, rate
from gradwire_tools.bench.train.baselines import Baselines
from gradwire_tools.report import gain, heat, origin
from gradwire_tools.report.gain import Gain, Standing
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.parts import Figure, Question, Section, Table
from gradwire_tools.report.rows import grouped, run_of, split

_TITLE = "Where does compression pay, and where does it not?"
_COLUMNS = 5  # of a figure

Runs = Sequence[Sequence[Row]]
ByNet = Sequence[dict[str, Gain]]


def sections(rows: Sequence[Row]) -> list[Section]:
    """A section per training that ran on two networks or more; its rows are in other sections,
    too."""
    return [_section(runs, rows) for runs in _trainings(rows)]


def picture(rows: Sequence[Row]) -> tuple[str, str] | None:
    """The map of a training on two networks or more, and its heading; None if `rows` are not of
    one."""
    found = _trainings(rows)
    if len(found) != 1 or sum(map(len, found[0])) != len(rows):
        return None
    runs, by_net, names, methods = _compared(found[0])
    first = runs[0][0]
    return _drawn(
        names, by_net, methods
    ), f"{first['task']}, {first['ranks']} ranks: gain over 16 bit"


def _trainings(rows: Sequence[Row]) -> list[Runs]:
    of_model = ("task", "ranks", "parameters", "task_options")
    return [
        runs
        for same in grouped(rows, *of_model, "sharded", "accumulate").values()
        for runs in _maps(same)
        if len({run[0]["net"] for run in runs}) > 1
    ]


def _maps(rows: Sequence[Row]) -> list[list[list[Row]]]:
    """The columns of each map: rows of one run on one network. Runs on different networks share a
    map; where two were on the same network, each run has its own."""
    columns = [mine for mine in grouped(rows, "net", "composed", "run").values() if split(mine)[0]]
    places = {(mine[0]["net"], mine[0].get("composed")) for mine in columns}
    if len(places) == len(columns):
        return [columns]
    runs: dict[object, list[list[Row]]] = {}
    for mine in columns:
        runs.setdefault(run_of(mine[0]), []).append(mine)
    return list(runs.values())


def _compared(runs: Runs) -> tuple[Runs, ByNet, list[str], list[str]]:
    """The columns from the slowest network on, the gains and the name of each, and all methods."""
    runs = sorted(runs, key=lambda run: rate(run[0]["net"]))
    by_net = [gain.of_summaries(*split(run)) for run in runs]
    methods = list(dict.fromkeys(name for gains in by_net for name in gains))
    return runs, by_net, [_name(run[0], runs) for run in runs], methods


def _drawn(names: Sequence[str], by_net: ByNet, methods: Sequence[str]) -> str:
    rows = [(name, [gains.get(name) for gains in by_net]) for name in methods]
    return heat.tiles([_lines(name) for name in names], rows, _TITLE)


def _section(runs: Runs, among: Sequence[Row]) -> Section:
    runs, by_net, names, methods = _compared(runs)
    questions = []
    for at in range(0, len(runs), _COLUMNS):
        part = slice(at, at + _COLUMNS)
        answers = [_answer(*one) for one in zip(names[part], by_net[part], strict=True)]
        drawn = _drawn(names[part], by_net[part], methods)
        questions.append(Question(_TITLE, answers, Figure(_CAPTION, drawn)))
    cells = [
        [name, *(gains[name].text if name in gains else DASH for gains in by_net)]
        for name in methods
    ]
    shown = Question("The same as a table", table=Table(["method", *names], cells))
    first = runs[0][0]
    under = ", sharded" if first.get("sharded") else ""
    title = f"Training {first['task']}, {first['ranks']} ranks{under}: gain over 16 bit by network"
    about = (
        "Gain is the time to the target loss of the best 16-bit baseline on the same network, "
        "divided by the method's."
    )
    told = origin.told([row for run in runs for row in run], among)
    return Section(title, [about, *told], [*questions, shown])


_CAPTION = (
    "Time to the target of the best 16-bit baseline / time of the method: ▲ above 1 it saves time, "
    "▼ below 1 it costs time. never: the target is not reached with every seed. Only differences "
    "that are more than noise have a colour; a loss is as strong as a gain of the same factor."
)


def _name(row: Row, runs: Sequence[Sequence[Row]]) -> str:
    """A network, with how it was measured where the rows have both."""
    told = network(row["net"])
    both = len({run[0].get("composed") for run in runs if run[0]["net"] == row["net"]}) > 1
    if both:
        told += ", composed" if row.get("composed") else ", whole"
    return told


def _lines(name: str) -> list[str]:
    """A network's name above a column: "300 Mbit/s", "1 ms"."""
    return [part.removesuffix(" latency").removesuffix(" emulated") for part in name.split(", ")]


def _answer(name: str, gains: Mapping[str, Gain]) -> str:
    """Which methods lose on a network, and which gain."""
    bar = next((n for n, one in gains.items() if one.standing is Standing.BAR), None)
    baselines = Baselines.among(gains).names
    parts = []
    for standing, word in _CLAUSES.items():
        mine = [n for n, one in gains.items() if one.standing is standing and n not in baselines]
        if standing in (Standing.GAIN, Standing.LOSS):
            mine = [f"{n} ({gains[n].text})" for n in mine]
        if mine:
            parts.append(f"{word}: {', '.join(mine)}")
    against = f"against {bar}" if bar else "no 16-bit baseline reached the target"
    what = "; ".join(parts) or f"no method but {plural(len(gains), 'baseline')}"
    return f"{name}, {against}: {what}."


_CLAUSES = {
    Standing.LOSS: "cost time",
    Standing.NEVER: "do not reach the target",
    Standing.NOISE: "within noise",
    Standing.UNJUDGED: "not judged, for want of seeds",
    Standing.GAIN: "save time",
    Standing.ONLY: "reach the target, unlike 16 bit",
    Standing.UNKNOWN: "not known",
}
