"""The report on `bench train`: questions for each task, network and number of ranks.

Times are compared with torch's fp16 hook, under FSDP2 with the best of its 16-bit methods, and
losses with fp32, as docs/reference/benchmarks.md argues; `noise` says which differences count.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_tools.bench import lengths
from gradwire_tools.bench.quantities import faster, network, percent, plural, than
from gradwire_tools.bench.train.baselines import Baselines
from gradwire_tools.report import gain, gains, learning, origin, steps, utility
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.parts import Question, Section, table
from gradwire_tools.report.rows import grouped, split

_COMPOSED = "Are composed times those of whole runs?"
_LARGE = 0.1  # error of a composed time


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per run, task, network, number of ranks and model, composed rows by themselves;
    maps of gains over networks; and composed against whole runs."""
    whole = [row for row in rows if row["row"] != "validation"]
    compared = [row for row in rows if row["row"] == "validation"]
    of_model = ("parameters", "task_options")
    keys = ("task", "net", "ranks", *of_model, "sharded", "accumulate", "composed", "run")
    made = [*gains.sections(whole)]
    made += [_section(mine, whole) for mine in grouped(whole, *keys).values()]
    found = grouped(compared, "task", "ranks", *of_model, "run")
    return made + [_composed(mine, compared) for mine in found.values()]


def headline(rows: Sequence[Row]) -> list[str]:
    """The result in a sentence, where the rows are of one run on one network."""
    summaries, evaluations = split(rows)
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
    summaries, evaluations = split(rows)
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
    questions: list[Question] = [
        learning.time_to_loss(trained, summaries),
        *([at_targets] if at_targets is not None else []),
        learning.what_is_learned(trained, summaries),
    ]
    if summaries:
        questions += [steps.times(summaries), steps.sent(summaries)]
    title = f"Training {first['task']}, {first['ranks']} ranks"
    return Section(title + (", sharded" if first.get("sharded") else ""), told, questions)


def _under_fsdp2(row: Row) -> str:
    told = "Under FSDP2: weights are gathered, gradients are reduce-scattered"
    if row.get("policy"):
        told += f"; every method has the policy {row['policy']}"
    if row.get("accumulate", 1) > 1:
        told += f"; a step has {row['accumulate']} micro-batches"
    return f"{told}. The baseline for time is the best of torch's 16-bit methods."


def _composed(rows: Sequence[Row], among: Sequence[Row]) -> Section:
    """Of `bench train --compose --validate`: composed times against those of whole runs."""
    errors = [(row["error"], row) for row in rows if row["error"] is not None]
    answers = ["No row has both times."]
    if errors:
        between = " to ".join(percent(1 + end(error for error, _ in errors)) for end in (min, max))
        answers = [f"Composed training times differ from those of whole runs by {between}."]
    answers += [
        f"{row['method']} on {network(row['net'])} is off by {percent(1 + error)}, more than 10 %."
        for error, row in errors
        if abs(error) > _LARGE
    ]
    columns = (
        "method | network = net | steps | composed = composed_seconds | "
        "whole run = whole_seconds | error | to target, composed = composed_time_to_target | "
        "to target, whole = whole_time_to_target | last loss, composed = composed_final_loss | "
        "whole = whole_final_loss"
    )
    shown = [
        {**row, "error": None if row["error"] is None else percent(1 + row["error"])}
        for row in rows
    ]
    first = rows[0]
    about = (
        "A composed time lacks the start of a run: connections, and compilation of kernels. "
        "Each pair is one run of each, so errors include the noise of both."
    )
    title = f"Composed runs of {first['task']}, {first['ranks']} ranks, against whole runs"
    question = Question(_COMPOSED, answers, table=table(shown, columns))
    return Section(title, [about, *origin.told(rows, among)], [question])
