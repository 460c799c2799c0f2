"""The report on a machine and its network: `gradwire doctor` and `gradwire probe`."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_tools.bench.interleaved import quartiles
from gradwire_tools.bench.quantities import DASH, digits, network, plural, reach, seconds, short
from gradwire_tools.report import svg
from gradwire_tools.report.bars import Bar, bars
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.lines import Axes, Line, lines
from gradwire_tools.report.parts import Figure, Question, Section, table

_PAYS = "Does compression pay here?"
_VERDICT = "verdict"
_LINKS = "How fast are the links?"
_SENDS = "How long does a message take?"
_KERNELS = "What do codecs cost on this machine?"
_VALUES = (1e4, 1e5, 1e6, 1e7)


# ---- doctor


def doctor(rows: Sequence[Row]) -> list[Section]:
    """One section per examination: a part that has been there begins the next one."""
    found: list[list[Row]] = []
    seen: set[str] = set()
    for row in rows:
        if not found or _VERDICT in seen or row["part"] in seen:
            found.append([])
            seen = set()
        found[-1].append(row)
        seen.add(row["part"])
    return [_examination(mine) for mine in found]


def _examination(rows: Sequence[Row]) -> Section:
    steps = [row for row in rows if "step_seconds" in row]
    told = [row["detail"] for row in rows if row["part"] == _VERDICT]
    parts = [row for row in rows if "step_seconds" not in row and row["part"] != _VERDICT]
    questions = []
    if steps:
        questions.append(_steps(steps, told))
    elif told:
        questions.append(Question(_PAYS, told))
    if parts:
        shown = table(parts, "part | there = available | detail")
        questions.append(Question("What is there?", table=shown))
    return Section("Examination of this machine and network", (), questions)


def _steps(rows: Sequence[Row], told: Sequence[str]) -> Question:
    drawn, shown = [], []
    for row in rows:
        whole, exposed = row["step_seconds"], min(row["exposed_seconds"], row["step_seconds"])
        turns = row["turn_seconds"]
        drawn.append(Bar(row["method"], [whole - exposed, exposed], quartiles(turns)))
        half = reach(quartiles(turns), seconds)
        shown.append({**row, "middle half": half, "turns": len(turns)})
    first = rows[0]
    net = first["net"]
    where = "the network between torchrun's ranks" if net == "as it is" else network(net)
    caption = (
        f"A step of {first['numel']:,} values on {first['ranks']} ranks, {where}. "
        "The median turn of the slowest rank; the spread is that of the middle half of "
        f"{plural(len(first['turn_seconds']), 'turn')}."
    )
    parts_of = ("computing", "exposed communication")
    figure = Figure(caption, bars(drawn, "per step", _PAYS, parts_of))
    columns = (
        "method | step = step_seconds | computing = compute_seconds | exposed = exposed_seconds | "
        "alone = communication_seconds | middle half | turns"
    )
    return Question(_PAYS, told, figure, table(shown, columns))


# ---- probe


def probe(rows: Sequence[Row]) -> Section:
    """Of one run."""
    first = rows[0]
    pairs, sends, curves = (
        [row for row in rows if row["part"] == part] for part in ("pair", "send", "curve")
    )
    kept = next((f" Links are of {r['measured']}." for r in pairs if r["cached"]), "")
    about = f"{plural(first['ranks'], 'rank')}, {network(first['net'])}.{kept}"
    made = ((_pairs, pairs), (_sends, sends), (_kernels, curves))
    return Section("The network, probed", [about], [make(mine) for make, mine in made if mine])


def _pairs(pairs: Sequence[Row]) -> Question:
    slow = max(pairs, key=lambda row: float(row["beta"]))
    far = max(pairs, key=lambda row: float(row["alpha"]))
    answer = (
        f"The slowest is {slow['from']} to {slow['to']}: {_rate(slow)}. The longest latency is "
        f"{seconds(far['alpha'])}, {far['from']} to {far['to']}."
    )
    shown = [
        {
            "ranks": f"{row['from']} to {row['to']}",
            "latency": seconds(row["alpha"]),
            "bandwidth": _rate(row),
        }
        for row in pairs
    ]
    return Question(_LINKS, [answer], table=table(shown, "ranks | latency | bandwidth"))


def _rate(row: Row) -> str:
    return DASH if not row["bandwidth"] else f"{short(row['bandwidth'])}bit/s"


def _sends(sends: Sequence[Row]) -> Question:
    ordered = sorted(sends, key=lambda row: int(row["bytes"]))
    sizes, took = ([row[key] for row in ordered] for key in ("bytes", "seconds"))
    line = Line("rank 0 to rank 1", svg.Stroke("var(--g0)"), sizes, took)
    axes = Axes("bytes of a message", "seconds", _SENDS, log_x=True, log_y=True)
    figure = Figure("Medians of several messages.", lines([line], axes))
    return Question(_SENDS, (), figure, table(ordered, "message = bytes | takes = seconds"))


def _kernels(curves: Sequence[Row]) -> Question:
    strokes = svg.plain(row["codec"] for row in curves)
    drawn = []
    for row in curves:
        if row["form"] in ("encode", "decode"):
            stroke = strokes[row["codec"]]
            stroke = stroke if row["form"] == "encode" else stroke.dashed
            took = [row["call"] + values * row["value"] for values in _VALUES]
            drawn.append(Line(f"{row['codec']}, {row['form']}", stroke, _VALUES, took))
    axes = Axes("values of fp32", "seconds", _KERNELS, log_x=True, log_y=True)
    figure = Figure("Solid: encode; dashed: decode.", lines(drawn, axes)) if drawn else None
    shown = [
        {
            **row,
            "per call": seconds(row["call"]),
            "per value": f"{digits(1e9 * row['value'])} ns",
            "per value of a payload": f"{digits(1e9 * row['payload'])} ns",
        }
        for row in curves
    ]
    columns = "codec | form | per call | per value | per value of a payload"
    return Question(_KERNELS, (), figure, table(shown, columns))
