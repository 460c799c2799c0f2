"""The report on a machine and its network: `gradwire doctor` and `gradwire probe`."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_tools.bench.interleaved import quartiles
from gradwire_tools.bench.quantities import DASH, digits, network, plural, reach, seconds, short
from gradwire_tools.report.parts import COMPUTING, Bar, Bars, Question, Section, lines, table
from gradwire_tools.report.rows import Row

_PAYS = "Does compression pay here?"
_VERDICT = "verdict"
_VALUES = (1e4, 1e5, 1e6, 1e7)


# ---- doctor


def doctor(rows: Sequence[Row]) -> list[Section]:
    """One section per examination: a part that has been there begins the next one."""
    found: list[dict[str, Row]] = []
    for row in rows:
        if not found or _VERDICT in found[-1] or row["part"] in found[-1]:
            found.append({})
        found[-1][row["part"]] = row
    return [_examination(mine) for mine in found]


def _examination(rows: dict[str, Row]) -> Section:
    steps = [row for row in rows.values() if "step_seconds" in row]
    told = [rows.pop(_VERDICT)["detail"]] if _VERDICT in rows else []
    parts = [row for row in rows.values() if "step_seconds" not in row]
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
    drawn = []
    for row in rows:
        whole, exposed = row["step_seconds"], min(row["exposed_seconds"], row["step_seconds"])
        drawn.append(Bar(row["method"], [whole - exposed, exposed], quartiles(row["turn_seconds"])))
    first = rows[0]
    net = first["net"]
    where = "the network between torchrun's ranks" if net == "as it is" else network(net)
    return Question(
        _PAYS,
        told,
        Bars(drawn, parts=COMPUTING),
        f"A step of {first['numel']:,} values on {first['ranks']} ranks, {where}. "
        "The median turn of the slowest rank; the spread is that of the middle half of "
        f"{plural(len(first['turn_seconds']), 'turn')}.",
        table(
            rows,
            "method | step = step_seconds | computing = compute_seconds | "
            "exposed = exposed_seconds | alone = communication_seconds | "
            "middle half = half | turns",
            half=lambda row: reach(quartiles(row["turn_seconds"]), seconds),
            turns=lambda row: len(row["turn_seconds"]),
        ),
    )


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
    shown = table(
        pairs,
        "ranks = pair | latency | bandwidth = rate",
        pair=lambda row: f"{row['from']} to {row['to']}",
        latency=lambda row: seconds(row["alpha"]),
        rate=_rate,
    )
    return Question("How fast are the links?", [answer], table=shown)


def _rate(row: Row) -> str:
    return DASH if not row["bandwidth"] else f"{short(row['bandwidth'])}bit/s"


def _sends(sends: Sequence[Row]) -> Question:
    points = [("rank 0 to rank 1", "", row["bytes"], row["seconds"]) for row in sends]
    ordered = sorted(sends, key=lambda row: int(row["bytes"]))
    return Question(
        "How long does a message take?",
        (),
        lines(points, "bytes of a message", "seconds", log_x=True, log_y=True),
        "Medians of several messages.",
        table(ordered, "message = bytes | takes = seconds"),
    )


def _kernels(curves: Sequence[Row]) -> Question:
    points = [
        (row["codec"], row["form"], values, row["call"] + values * row["value"])
        for row in curves
        for values in _VALUES
        if row["form"] in ("encode", "decode")
    ]
    chart = lines(points, "values of fp32", "seconds", "encode", log_x=True, log_y=True)
    return Question(
        "What do codecs cost on this machine?",
        (),
        chart if points else None,
        "Solid: encode; dashed: decode.",
        table(
            curves,
            "codec | form | per call = call | per value = value | per value of a payload = payload",
            call=lambda row: seconds(row["call"]),
            value=lambda row: f"{digits(1e9 * row['value'])} ns",
            payload=lambda row: f"{digits(1e9 * row['payload'])} ns",
        ),
    )
