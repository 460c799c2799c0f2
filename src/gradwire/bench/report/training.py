"""The report on `bench train`: four questions for each task, network and number of ranks.

Times are compared with torch's fp16 hook, under FSDP2 with the best of its 16-bit methods, and
losses with fp32, as docs/reference/benchmarks.md argues; `noise` says which differences count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire.bench.baselines import Baselines
from gradwire.bench.report import (
    breakdown,
    composed,
    gain,
    gains,
    learning,
    lengths,
    origin,
    svg,
    utility,
)
from gradwire.bench.report.bars import Bar, bars
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lengths import per_step
from gradwire.bench.report.noise import Spread, Verdict, by_spreads
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import (
    DASH,
    digits,
    faster,
    network,
    plural,
    seconds,
    size,
    size_unit,
    than,
    time_unit,
)
from gradwire.bench.report.rows import grouped


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per run, task, network, number of ranks and model, composed rows by themselves;
    maps of gains over networks; and composed against whole runs."""
    whole = [row for row in rows if row["row"] != "validation"]
    of_model = ("task", "net", "ranks", "parameters", "task_options")
    found = grouped(whole, *of_model, "sharded", "accumulate", "composed", "run")
    compared = [row for row in rows if row["row"] == "validation"]
    made = [*gains.sections(whole), *(_section(mine, whole) for mine in found.values())]
    return [*made, *composed.sections(compared)]


def headline(rows: Sequence[Row]) -> list[str]:
    """The result in a sentence, where the rows are of one run on one network."""
    summaries = [row for row in rows if row["row"] == "summary"]
    baselines = Baselines.of_rows(summaries)
    if len(grouped(summaries, "task", "net", "ranks", "run")) != 1:
        return []
    reached = [row for row in summaries if row["time_to_target"] and not row.get("timing_only")]
    bar = baselines.best(reached, "time_to_target")
    ours = [row for row in reached if row["method"] not in baselines.names]
    if bar is None or not ours:
        return []
    best = min(ours, key=lambda row: float(row["time_to_target"]))
    where = "" if best["net"] == "none" else f" on a network of {network(best['net'])}"
    evaluations = [row for row in rows if row["row"] == "evaluation"]
    standing = gain.of_summaries(summaries, evaluations)[best["method"]].standing
    if standing is gain.Standing.NOISE:
        return [f"{best['method']} trains to the same loss in the time of {bar['method']}{where}."]
    others = [bar, *(row for row in reached if row["method"] == baselines.full)]
    told = ", and ".join(
        than(faster(best["time_to_target"], row["time_to_target"]), str(row["method"]))
        for row in others
    )
    return [f"{best['method']} trains to the same loss {told}{where}."]


def _section(rows: Sequence[Row], among: Sequence[Row]) -> Section:
    evaluations = [row for row in rows if row["row"] == "evaluation"]
    summaries = [row for row in rows if row["row"] == "summary"]
    first = rows[0]
    seeds = list(dict.fromkeys(row["seed"] for row in evaluations))
    about = f"{first['ranks']} ranks, {network(first['net'])}"
    if isinstance(first.get("parameters"), int):
        about += f"; a model of {first['parameters']:,} parameters"
    if seeds:
        about += f"; {plural(len(seeds), 'seed')} ({', '.join(map(str, seeds))})"
    told = [about + "; every method had the same initial weights and the same batches."]
    if first.get("sharded"):
        told.append(_under_fsdp2(first))
    told += origin.told(rows, among)
    told += lengths.told(summaries)
    if len(seeds) == 1 or any(map(learning.one_seed, summaries)):
        told.append(
            "With one seed, the spread over seeds is unknown: differences in loss and in time to "
            "a loss are given, and not judged."
        )
    if not summaries:
        told.append("There are no summary rows: the run did not end, or they are in another file.")
    if first.get("composed"):
        told.append(
            "Composed: methods trained once, without a network, and their steps were timed on this "
            "one."
        )
    timing_only = {row["method"] for row in rows if row.get("timing_only")}
    told += [
        f"{method} is for timing only: it does not train the model, and is in no figure of losses."
        for method in sorted(timing_only)
    ]
    trained = [row for row in evaluations if row["method"] not in timing_only]
    at_targets = utility.question(trained, summaries)
    questions = [
        learning.time_to_loss(trained, summaries),
        *([at_targets] if at_targets is not None else []),
        learning.what_is_learned(trained, summaries),
    ]
    if summaries:
        questions += [_steps(summaries), breakdown.question(summaries), _bytes(summaries)]
    title = f"Training {first['task']}, {first['ranks']} ranks"
    return Section(title + (", sharded" if first.get("sharded") else ""), told, questions)


def _under_fsdp2(row: Row) -> str:
    told = "Under FSDP2: weights are gathered, gradients are reduce-scattered"
    if row.get("policy"):
        told += f"; every method has the policy {row['policy']}"
    if row.get("accumulate", 1) > 1:
        told += f"; a step has {row['accumulate']} micro-batches"
    return f"{told}. The baseline for time is the best of torch's 16-bit methods."


def _steps(summaries: Sequence[Row]) -> Question:
    """Median step, its quartiles, and how much of it is computing."""
    baselines = Baselines.of_rows(summaries)
    baseline = baselines.best(summaries, "step_seconds")
    answers, table = [], []
    for row in summaries:
        judged = "" if row is baseline else _against(row, baseline)
        if judged and row["method"] != baselines.full:
            answers.append(f"A step of {row['method']} is {judged}.")
        middle = _quartiles(row)
        table.append(
            [
                Cell(row["method"]),
                Cell(seconds(row["step_seconds"]), True),
                Cell(" to ".join(map(seconds, middle)) if middle else "not recorded", True),
                Cell(seconds(row["ideal_step_seconds"]), True),
                Cell(seconds(_exposed(row)), True),
                Cell(_verdict_cell(row, baseline)),
            ]
        )
    known = [row for row in summaries if row["step_seconds"] is not None]
    unit, scale = time_unit(row["step_seconds"] for row in known)
    strokes = svg.strokes(row["method"] for row in summaries)
    drawn = []
    for row in known:
        exposed, middle = _exposed(row), _quartiles(row)
        whole = row["step_seconds"]
        parts = [whole] if exposed is None else [whole - exposed, exposed]
        drawn.append(
            Bar(
                row["method"],
                strokes[row["method"]].colour,
                [part / scale for part in parts],
                seconds(whole),
                (middle[0] / scale, middle[1] / scale) if middle else None,
            )
        )
    caption = (
        "Median step of rank 0. Computing is a step without communication, measured at the end of "
        "the same run; the rest is communication that computing does not hide. "
        "The spread is that of the middle half of the steps."
    )
    title = "How long does a step take, and where does it go?"
    parts_of = ("computing", "exposed communication")
    figure = Figure(caption, bars(drawn, f"{unit} per step", title, parts_of)) if drawn else None
    against = f"against {baselines.against(baseline)}"
    headings = ["method", "step", "middle half", "computing", "exposed", against]
    return Question(title, answers, figure, Table(headings, table))


def _against(row: Row, baseline: Row | None) -> str:
    """A row's step against the baseline's in a clause; "" where one is unknown."""
    if baseline is None or not baseline["step_seconds"] or row["step_seconds"] is None:
        return ""
    compared = faster(row["step_seconds"], baseline["step_seconds"])
    told = than(compared, f"one of {baseline['method']}")
    verdict = by_spreads(_quartiles(row), _quartiles(baseline))
    return {
        Verdict.LESS: told,
        Verdict.MORE: f"{told}: it does not pay here",
        Verdict.NOISE: f"about as fast as one of {baseline['method']}: the middle halves of the "
        "steps overlap",
        Verdict.UNKNOWN: f"{told}; the spread of the steps is not recorded, so this is not judged",
    }[verdict]


def _verdict_cell(row: Row, baseline: Row | None) -> str:
    if row is baseline or not _against(row, baseline):
        return DASH
    assert baseline is not None
    verdict = by_spreads(_quartiles(row), _quartiles(baseline))
    told = faster(row["step_seconds"], baseline["step_seconds"])
    more = {Verdict.LESS: told, Verdict.MORE: told, Verdict.NOISE: "about as fast"}
    return more.get(verdict, f"{told}, {verdict.value}")


def _quartiles(row: Row) -> Spread | None:
    found: Any = row.get("step_seconds_quartiles")
    return (float(found[0]), float(found[1])) if found else None


def _exposed(row: Row) -> float | None:
    """Seconds of a step that are not computing."""
    if row["step_seconds"] is None or row["ideal_step_seconds"] is None:
        return None
    return max(0.0, float(row["step_seconds"]) - float(row["ideal_step_seconds"]))


def _fewer(ratio: float, what: str | None = None) -> str:
    """Of bytes against a baseline's; with `what`, up to the baseline's name."""
    if f"{ratio:.2f}" == "1.00":
        return "as many" if what is None else f"as many{what} as"
    told = f"{digits(max(ratio, 1 / ratio))} times {'more' if ratio > 1 else 'fewer'}"
    return told if what is None else f"{told}{what} than"


# Of FSDP2's rows.
_KINDS = {
    "weights_wire_bytes": "weights, per step",
    "gradients_wire_bytes": "gradients, per step",
}


def _bytes(summaries: Sequence[Row]) -> Question:
    """Bytes per rank and step, by the method's own count and by the kernel's."""
    by_method = {row["method"]: row for row in summaries}
    baselines = Baselines.of_rows(summaries)
    baseline = baselines.best(summaries, "step_seconds")
    kinds = _KINDS if any(key in row for row in summaries for key in _KINDS) else {}
    strokes = svg.strokes(by_method)
    known = [row for row in summaries if per_step(row, "wire_bytes") is not None]
    unit, scale = size_unit(per_step(row, "wire_bytes") or 0.0 for row in known)
    drawn, table, answers = [], [], []
    for row in summaries:
        sent = per_step(row, "wire_bytes")
        base = per_step(baseline, "wire_bytes") if baseline is not None else None
        ratio = sent / base if sent and base else None
        if sent is not None:
            colour = strokes[row["method"]].colour
            drawn.append(Bar(row["method"], colour, [sent / scale], size(sent)))
        if ratio is not None and row is not baseline and row["method"] != baselines.full:
            against = baselines.against(baseline)
            answers.append(f"{row['method']} sends {_fewer(ratio, ' bytes')} {against}.")
        table.append(
            [
                Cell(row["method"]),
                Cell(size(sent), True),
                Cell(DASH if ratio is None or row is baseline else _fewer(ratio), True),
                *(Cell(size(per_step(row, key)), True) for key in kinds),
                Cell(size(per_step(row, "link_bytes")), True),
                Cell(size(row["wire_bytes"]), True),
                Cell(size(row.get("peak_extra_bytes")), True),
            ]
        )
    caption = (
        "Sent by rank 0: torch's methods by formula, gradwire as counted, headers included. The "
        "link is what the network interface counted, TCP and IP included. Memory is what a method "
        f"holds beyond plain {'FSDP2' if kinds else 'DDP'}, where it counts it."
    )
    title = "How many bytes are sent?"
    figure = Figure(caption, bars(drawn, f"{unit} per rank and step", title)) if drawn else None
    headings = [
        "method", "per step", f"against {baselines.against(baseline)}", *kinds.values(),
        "on the link, per step", "in all", "memory",
    ]  # fmt: skip
    return Question(title, answers, figure, Table(headings, table))
