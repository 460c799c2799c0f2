"""The report on predictions: of the planner, of the ablation's parts, and of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire_tools.bench.paper.ablation import part_gain
from gradwire_tools.bench.quantities import (
    digits,
    faster,
    network,
    percent,
    percent_of,
    plural,
    spelled,
    than,
    times,
)
from gradwire_tools.predict.sim_sweep import place
from gradwire_tools.report.parts import (
    COMPUTING,
    Bar,
    Bars,
    Chart,
    Dots,
    Question,
    Section,
    lines,
    table,
)
from gradwire_tools.report.rows import Row, grouped

NEAR = 1.15  # times the fastest setting's seconds
PARTITION = 1.05  # times those of the best partition
TRUE = 0.2  # off what is measured


def choices(rows: Sequence[Row]) -> Section:
    """Of one run: a line per network, dashed where it is what the planner expects."""
    near = sum(row["ratio"] <= NEAR for row in rows)
    true = sum(abs(row["error"]) <= TRUE for row in rows)
    parts = [row["partition_ratio"] for row in rows if row["partition_ratio"] is not None]
    least = sum(part <= PARTITION for part in parts)
    right = sum(row["compress"] == row["best_compresses"] for row in rows)
    worst = digits(max(float(row["ratio"]) for row in rows))
    answers = [
        (
            f"Of {plural(len(rows), 'choice')}, {near} took at most {percent_of(NEAR - 1)} longer "
            f"than the fastest setting that was measured, the worst {worst} times as long."
        ),
        f"It compressed, or declined to, as the fastest did in {right} of {len(rows)}.",
        (
            f"Its partition was at most {percent_of(PARTITION - 1)} slower than another one in "
            f"{least} of {len(parts)}."
        ),
        (
            f"What it expected was within {percent_of(TRUE)} of what was measured in {true} of "
            f"{len(rows)}."
        ),
    ]
    points = [
        (row["net"], note, row["nbytes"], row[key])
        for row in rows
        for note, key in (("", "seconds"), ("expected", "expected_seconds"))
    ]
    question = Question(
        "Does the planner choose the fastest, and is what it expects true?",
        answers,
        lines(points, "bytes of the gradient", "seconds", log_x=True, log_y=True),
        "Solid: measured; dashed: expected.",
        table(
            rows,
            "network = net | gradient = nbytes | choice | took = seconds | "
            "expected = expected_seconds | off by = off | fastest = best_method | "
            "over the fastest = ratio | over the best partition = partition_ratio",
            choice=lambda row: (
                f"{row['method']} by {row['algorithm']}, segments {spelled('', row['segments'])}"
            ),
            off=lambda row: percent(1 + row["error"]),
        ),
    )
    about = f"One matrix, {plural(rows[0]['ranks'], 'rank')}; medians, in the lab."
    return Section("The planner's choices", [about], [question])


def ablation(rows: Sequence[Row]) -> Section:
    """Of one model, network and run (HIPRESS, Fig. 12)."""
    first = rows[0]
    drawn, answers, shown = [], [], []
    for row in rows:
        colour = {"lab": "g0", "simulator": "t1"}.get(row["where"], "g1")
        time = row["synchronisation_seconds"]
        drawn.append(Bar(f"{row['part']}, {row['where']}", [time], colour=colour))
        gain = part_gain(row)
        shown.append({**row, "faster": times(gain) if gain else None})
        if gain:
            told = than(faster(1.0, gain), "before")
            answers.append(f"{row['where']}, {row['part']}: {told}.")
    question = Question(
        "What does each part bring?",
        answers,
        Bars(drawn),
        "Synchronisation per step: averaging, less what backward hides. Each part is added to "
        "those above it.",
        table(
            shown,
            "where | part | method | synchronisation = synchronisation_seconds | "
            "faster than before = faster | step = step_seconds",
        ),
    )
    about = f"{first['ranks']} ranks, {network(first['net'])}, {first['numel']:,} values."
    return Section(f"Ablation of {first.get('model', 'a model')}", [about], [question])


def decisions(rows: Sequence[Row]) -> Section:
    """What policies and automatic mode have decided while they trained on one network."""
    first = rows[0]
    questions = [
        Question(
            f"What has {method} decided, seed {seed}?", table=table(mine, "step | decision = line")
        )
        for (method, seed), mine in grouped(rows, "method", "seed").items()
    ]
    about = f"{first['task']}, {first['ranks']} ranks, {network(first['net'])}."
    return Section("Decisions during training", [about], questions)


def simulated(rows: Sequence[Row]) -> list[Section]:
    """One section per model, network or swept network, and swept parameter."""
    fixed = [
        {
            **row,
            "fixed net": None if row.get("sweep") in ("rate", "latency") else row["net"],
            "fixed ranks": None if row.get("sweep") == "ranks" else row["ranks"],
        }
        for row in rows
    ]
    found = grouped(fixed, "model", "fixed net", "fixed ranks", "sweep", "machine")
    return [_simulated(mine) for mine in found.values()]


def _simulated(rows: Sequence[Row]) -> Section:
    first = rows[0]
    swept = first.get("sweep")
    machine = first.get("machine", "a machine that the rows do not name")
    where = [] if swept == "ranks" else [f"{first['ranks']} ranks"]
    where += [] if swept in ("rate", "latency") else [network(first["net"])]
    about = (
        "Predicted, not measured: the engine's own scheduler on a virtual clock, with kernels' "
        f"times from {machine}."
    )
    told = f"Gradients of {first['model']}; {', '.join(where)}."
    points: list[tuple[Any, ...]] = []
    drawn = []
    for row in rows:
        label, limit = f"{row['codec']}, {row['algorithm']}", row["limit_seconds"]
        if swept:
            no_band = (None, None)
            points.append((label, "", place(row), row["seconds"], *no_band, limit or None))
            label = f"{swept}={row['value']}, {label}"
        drawn.append(Bar(label, [row["seconds"]], None, limit, "g0"))
    chart: Chart = Bars(drawn)
    limits = "The tick is the limit of the wire."
    if swept is not None and all(at is not None for _, _, at, *_ in points):
        places = sorted({at for _, _, at, *_ in points})
        wide = places[0] > 0 and places[-1] >= 8 * places[0]
        unit = {"rate": "rate, bit/s", "latency": "latency, s"}.get(swept, str(swept))
        ticks = places if len(places) <= 8 else ()  # labels of more have no room
        chart = lines(points, unit, "seconds", log_x=wide, log_y=True, x_ticks=ticks)
        limits = "Dotted: the limit of the wire."
    question = Question(
        "How long does a step's communication take" + (f", by {swept}?" if swept else "?"),
        (),
        chart,
        f"Seconds of the collectives of one step. {limits}",
        table(
            rows,
            ("{swept} = value | " if swept else "")
            + "codec | algorithm | predicted = seconds | limit = limit_seconds | "
            "sent per rank = wire_bytes | messages",
            swept=str(swept),
        ),
    )
    return Section(f"Simulation of {first['model']}", [about, told], [question])


def sharded(rows: Sequence[Row]) -> Section:
    """Of one model and machine, with a question per network and number of ranks."""
    first = rows[0]
    about = (
        "Predicted, not measured: FSDP2's order of gathers, computing and reduce-scatters on a "
        f"virtual clock, with kernels' times from {first.get('machine') or 'an unnamed machine'}. "
        "Torch's collectives are at their best."
    )
    places = grouped(rows, "net", "ranks", "per_node", "blocking", "forward_seconds", "sweep")
    questions = [_sharded(mine) for mine in places.values()]
    return Section(f"Simulation of {first['model']} under FSDP2", [about], questions)


def _sharded(rows: Sequence[Row]) -> Question:
    first = rows[0]
    drawn, shown = [], []
    for row in rows:
        computing = float(row["forward_seconds"] + row["backward_seconds"])
        parts = [computing, max(row["seconds"] - computing, 0.0)]
        name = f"{row['method']}, {row['algorithm']}"
        if row.get("sweep") not in (None, "rate", "latency", "ranks"):
            name += f", {row['sweep']}={row.get('value')}"
        drawn.append(Bar(name, parts, limit=row["limit_seconds"]))
        shown.append({**row, "method": name, "computing_seconds": computing})
    waits = "; the host waits for collectives" if first["blocking"] else ""
    where = f"{first['ranks']} ranks, {first['per_node']} per node, {network(first['net'])}{waits}"
    return Question(
        f"How long does a step take under FSDP2? {where}",
        (),
        Bars(drawn, parts=COMPUTING),
        "Predicted seconds of a step: forward and backward, then what they do not hide. The tick "
        "is the limit of the wire and of computing.",
        table(
            shown,
            "method | predicted = seconds | computing = computing_seconds | "
            "limit = limit_seconds | kernels = compute_seconds | weights = weights_wire_bytes | "
            "gradients = gradients_wire_bytes | ratio = times",
            times=lambda row: None if row["ratio"] is None else times(row["ratio"]),
        ),
    )


def validation(rows: Sequence[Row]) -> Section:
    """`gradwire sim --validate`: simulated against measured."""
    points = []
    for row in rows:
        method = row["method"].removeprefix("gradwire:")
        both = [("measured", row["measured_seconds"]), ("simulated", row["simulated_seconds"])]
        points.append((f"{method}, {row['algorithm']}, {row['ranks']} ranks", both))
    most = max(abs(row["error"]) for row in rows)
    noisy = sum(abs(row["error"]) <= row["spread"] for row in rows)
    answer = (
        f"Predictions are off by {digits(most * 100, 2)} % at most; {noisy} of {len(rows)} "
        "are within what the lab itself varies by."
    )
    question = Question(
        "How far are predictions from what the lab measures?",
        [answer],
        Dots(points, "seconds"),
        "The least median of the runs in the lab.",
        table(
            rows,
            "method | algorithm | ranks | network = net | measured = measured_seconds | "
            "simulated = simulated_seconds | error = off | spread of runs = varies",
            off=lambda row: percent(1 + row["error"]),
            varies=lambda row: percent(1 + row["spread"]) if row.get("runs", 1) > 1 else None,
        ),
    )
    return Section("The simulator against the lab", (), [question])
