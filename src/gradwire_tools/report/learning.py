"""The report on what training reaches: time to a loss, and loss after the same steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gradwire_tools.bench.lengths import length
from gradwire_tools.bench.quantities import (
    DASH,
    digits,
    faster,
    percent,
    plural,
    reach,
    seconds,
    than,
)
from gradwire_tools.bench.train.baselines import Baselines
from gradwire_tools.report import gain
from gradwire_tools.report.gain import (
    Gain,
    Standing,
    Verdict,
    by_seeds,
    judged,
    left_out,
    paired,
    resolutions,
)
from gradwire_tools.report.parts import Line, Lines, Question, Table, series, table
from gradwire_tools.report.rows import Row, grouped

MISSED = "not reached"
_WHOLE = "Time is rank 0's, evaluations excluded, start-up and compilation of kernels included."
_COMPOSED = (
    "Composed: times are those of mean timed steps; start-up and compilation of kernels are not "
    "included."
)
_BAND = "Mean over seeds; the band reaches from the least to the greatest."
_TIMING = "for timing only"
_UNSURE = {
    Verdict.FEW: ", and so with every seed; these are too few to judge",
    Verdict.UNKNOWN: "; the spread over seeds is unknown",
}


def curves(evaluations: Sequence[Row], x: str = "seconds") -> list[Line]:
    """Each method's means over its seeds, to its own end, and the extremes of its losses. A step
    that a seed lacks, or where its loss was not finite, has no mean."""
    points = []
    for (method,), mine in grouped(evaluations, "method").items():
        seeds = len({row["seed"] for row in mine})
        for at in grouped(mine, "step").values():
            losses = [row["loss"] for row in at]
            whole = None not in losses and len(losses) == seeds
            of_seeds = [of(losses) if whole else None for of in (statistics.mean, min, max)]
            points.append((method, "", statistics.mean(row[x] for row in at), *of_seeds))
    return series(points)


def against_seconds(evaluations: Sequence[Row], target: float | None) -> Lines:
    """Loss against training time; a point where a mean first meets the target."""
    drawn = []
    for line in curves(evaluations):
        points = zip(line.x, line.y, strict=True)
        met = [(x, y) for x, y in points if target is not None and y is not None and y <= target]
        drawn.append(replace(line, mark=met[0] if met else None))
    rule = None if target is None else (target, f"target {digits(target, 4)}")
    return Lines(drawn, "training time, s", "validation loss, nats", rule)


def time_to_loss(evaluations: Sequence[Row], summaries: Sequence[Row]) -> Question:
    """Time to the target loss, against the 16-bit baseline."""
    target = summaries[0]["target"] if summaries else None
    baselines = Baselines.of_rows(summaries)
    baseline = baselines.best(summaries, "time_to_target")
    resolved = gain.resolutions(summaries, evaluations)
    answers = [_target(summaries)] if summaries else []
    shown = []
    for row in summaries:
        if row.get("timing_only"):
            shown.append({"method": row["method"], "against": _TIMING})
            continue
        time, (word, clause) = time_reached(row), _time_verdict(row, baseline, resolved)
        if time == MISSED:
            lacking = f"{length([row])}{_some(row)}"
            answers.append(f"{row['method']} did not reach the target in {lacking}.")
        elif clause and row["method"] != baselines.full:
            answers.append(f"{row['method']} {clause}.")
        seeds = _over_seeds(row, "time_to_target", seconds)
        shown.append({"method": row["method"], "time": time, "seeds": seeds, "against": word})
    return Question(
        "How long until the model reaches the baseline's loss?",
        answers,
        against_seconds(evaluations, target) if evaluations else None,
        f"{_BAND} Points: the first evaluation at or below the target. "
        + (_COMPOSED if evaluations and evaluations[0].get("composed") else _WHOLE),
        table(
            shown,
            "method | time to target = time | over seeds = seeds | against {name} = against",
            name=baselines.against(baseline),
        ),
    )


def time_reached(row: Row) -> str:
    """The time to the target, in words if there is none to tell."""
    time = row["time_to_target"]
    if time is None:
        return MISSED if row["target"] is not None else DASH
    return seconds(time) if time else "before training"


def _over_seeds(row: Row, key: str, form: Callable[[float], str]) -> str:
    return reach([one for one in row.get(f"{key}_by_seed") or () if one is not None], form)


def _target(summaries: Sequence[Row]) -> str:
    target, origin = summaries[0]["target"], summaries[0].get("target_from", "given")
    if target is None:
        return f"There is no target loss: it was to come from {origin}."
    whose = "as given" if origin == "given" else f"the last loss of {origin}, plus the tolerance"
    if " at " in origin:
        whose = f"that of {origin}"
    elif any(0 in (row.get("time_to_target_by_seed") or ()) for row in summaries):
        whose += ", which the untrained model meets, so times to it say nothing"
    return f"The target is a validation loss of {digits(target, 4)}: {whose}."


def _some(row: Row) -> str:
    times = row.get("time_to_target_by_seed") or ()
    reached = sum(time is not None for time in times)
    return f" with {len(times) - reached} of {plural(len(times), 'seed')}" if reached else ""


def _time_verdict(
    row: Row, baseline: Row | None, resolved: Mapping[str, gain.Resolution]
) -> tuple[str, str]:
    """For the table and for the answer; empty where there is nothing to compare."""
    if baseline is None or row is baseline or not baseline["time_to_target"]:
        return DASH, ""
    if row["time_to_target"] is None:
        return MISSED, ""
    mine, theirs = paired((row, baseline), "time_to_target")
    ours, its = (resolved[one["method"]] for one in (row, baseline))
    gap, timing = gain.known_to(ours, row["time_to_target"], its, baseline["time_to_target"])
    verdict = by_seeds(mine, theirs, gap + timing)
    compared = faster(row["time_to_target"], baseline["time_to_target"])
    told = f"reaches it {than(compared, baseline['method'])}"
    if one_seed(row) or verdict in (Verdict.LESS, Verdict.MORE):
        return compared, told
    if verdict is not Verdict.NOISE:
        return f"{compared}, {verdict.value}", told + _UNSURE[verdict]
    told = f"reaches it in about the time of {baseline['method']}, within noise"
    if by_seeds(mine, theirs) is not Verdict.NOISE:
        told += f": evaluations are up to {seconds(gap)} apart"
        if timing:
            told += f", and by the timed steps this difference is known to {seconds(timing)}"
    return verdict.value, told


def what_is_learned(evaluations: Sequence[Row], summaries: Sequence[Row]) -> Question:
    """Loss after the same number of steps, against fp32."""
    full = Baselines.of_rows(summaries).full
    baseline = {row["method"]: row for row in summaries}.get(full)
    answers, shown = [], []
    for row in summaries:
        if row.get("timing_only"):
            shown.append({"method": row["method"], "against": _TIMING})
            continue
        word, clause = loss_verdict(row, baseline)
        if clause:
            answers.append(f"{row['method']} {clause}.")
        seeds = _over_seeds(row, "final_loss", lambda loss: digits(loss, 4))
        shown.append({**row, "seeds": seeds, "against": word})
    baselines = Baselines.of_rows(evaluations)
    drawn = [  # the others lie on a wide one
        replace(line, wide=line.label == baselines.full) for line in curves(evaluations, "step")
    ]
    chart = Lines(drawn, "step", "validation loss, nats") if drawn else None
    metric = str(summaries[0].get("metric_name") or "metric") if summaries else ""
    columns = "method | last loss = final_loss | over seeds = seeds | against {full} = against | "
    columns += "{metric} = final_metric"
    made = table(shown, columns, full=full, metric=metric)
    return Question("Does compression change what is learned?", answers, chart, _BAND, made)


def one_seed(row: Row) -> bool:
    """Whether a summary is of one seed, so that its section says that nothing is judged."""
    return len(row.get("seeds") or ()) == 1


def loss_verdict(row: Row, baseline: Row | None) -> tuple[str, str]:
    """A summary's last loss against fp32's: for a table, and as a clause."""
    if row["final_loss"] is None:
        return "not finite", "ended with a loss that is not finite, with one seed or more"
    if baseline is None or row is baseline or not baseline["final_loss"]:
        return DASH, ""
    ratio = row["final_loss"] / baseline["final_loss"]
    change, side = percent(ratio), "below" if ratio < 1 else "above"
    told = f"ends with a loss {change.lstrip('+-')} {side} that of {baseline['method']}"
    if change == "0.00 %":
        told = f"ends with the loss of {baseline['method']}, to 0.01 %"
    if one_seed(row):
        return change, told
    mine, theirs = paired((row, baseline), "final_loss")
    verdict = by_seeds(mine, theirs)
    if row["final_loss"] == baseline["final_loss"]:
        verdict = Verdict.NOISE
    word, said = {
        Verdict.LESS: ("lower", ", more than noise"),
        Verdict.MORE: ("higher", ", more than noise: it costs accuracy here"),
        Verdict.NOISE: (verdict.value, ", which is within noise"),
    }.get(verdict) or (verdict.value, _UNSURE[verdict])
    return f"{change}, {word}", told + said


_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)

Run = dict[int, list[Row]]  # a method's evaluations by seed, in the order of steps
Targets = dict[int, dict[int, float]]  # by step, the reference's loss with each seed


def at_targets(evaluations: Sequence[Row], summaries: Sequence[Row] = ()) -> Question | None:
    """Of methods that train the model. None where the rows have no 16-bit baseline or no target."""
    runs: dict[str, Run] = {}
    for (method, seed), mine in grouped(evaluations, "method", "seed").items():
        runs.setdefault(method, {})[seed] = sorted(mine, key=lambda row: int(row["step"]))
    baselines = Baselines.of_rows(evaluations)
    if not any(name in runs for name in baselines.sixteen_bits):
        return None
    reference = baselines.full if baselines.full in runs else next(iter(runs))
    targets = _targets(runs[reference])
    if not targets:
        return None
    whole = {name: mine for name, mine in runs.items() if mine.keys() >= runs[reference].keys()}
    resolved = resolutions(summaries, evaluations, at_target=False)
    by_target = [
        judged({name: _times(mine, losses) for name, mine in whole.items()}, resolved)
        for losses in targets.values()
    ]
    gains = {name: [at[name] for at in by_target] for name in whole}
    answers = [
        f"{name}: {_told(mine)}." for name, mine in gains.items() if name not in baselines.names
    ]
    missing = left_out(summaries, evaluations)
    if missing is not None:
        answers.append(
            "Some of the runs' evaluations are not among these rows. So a time to one of these "
            f"targets is known to {seconds(missing[0])} only, not to {seconds(missing[1])} as the "
            "time to the run's own target, and more differences are within noise."
        )
    lacking = sorted(runs.keys() - whole)
    answers += [f"{name} is not here: it lacks seeds of {reference}." for name in lacking]
    headings = [
        f"loss {digits(statistics.mean(losses.values()), 4)}, step {step}"
        for step, losses in targets.items()
    ]
    drawn = series(
        (name, "", step, gain.ratio)
        for name, mine in gains.items()
        for step, gain in zip(targets, mine, strict=True)
    )
    return Question(
        "How much time does a method save, at which target?",
        answers,
        Lines(
            [line for line in drawn if any(line.y)],
            f"target: loss of {reference} at this step",
            "utility",
            (1.0, "best 16-bit baseline"),
            log_y=True,
        ),
        f"The targets are the losses of {reference} at these steps, with each seed. Utility is the "
        "time to a target of the best 16-bit baseline, divided by the method's: how many times "
        "faster it is, if above 1. A line ends where a method does not reach the target.",
        Table(
            ["method", *headings],
            [[name, *(gain.text for gain in mine)] for name, mine in gains.items()],
        ),
    )


def _targets(reference: Run) -> Targets:
    """Of different steps, without those where a seed's loss is not known."""
    found: Targets = {}
    for share in _SHARES:
        at = {
            seed: next(r for r in reversed(mine) if r["step"] <= max(share * last, mine[0]["step"]))
            for seed, mine in reference.items()
            for last in (mine[-1]["step"],)
        }
        step = max(row["step"] for row in at.values())
        losses = {seed: row["loss"] for seed, row in at.items()}
        if step > 0 and None not in losses.values():
            found.setdefault(step, losses)
    return found


def _times(mine: Run, losses: Mapping[int, float]) -> list[float | None]:
    """With each seed of the target, the time of the first evaluation that meets it."""
    return [
        next(
            (r["seconds"] for r in mine[seed] if r["loss"] is not None and r["loss"] <= loss), None
        )
        for seed, loss in losses.items()
    ]


_WORDS = {
    Standing.GAIN: ("saves time at", "faster"),
    Standing.LOSS: ("costs time at", "slower"),
    Standing.NOISE: ("is within noise at", ""),
    Standing.UNJUDGED: ("is not judged, for want of seeds, at", ""),
    Standing.NEVER: ("does not reach", ""),
    Standing.ONLY: ("alone, without the 16-bit baselines, reaches", ""),
    Standing.UNKNOWN: ("cannot be compared at", ""),
}


def _told(gains: Sequence[Gain]) -> str:
    """Gains and losses of a method over the targets, in a clause."""
    parts = []
    for standing, (word, compared) in _WORDS.items():
        ratios = [gain.ratio for gain in gains if gain.standing is standing]
        if not ratios:
            continue
        part = f"{word} {len(ratios)} of {plural(len(gains), 'target')}"
        if compared:
            known = [max(ratio or 1.0, 1 / (ratio or 1.0)) for ratio in ratios]
            low, high = digits(min(known)), digits(max(known))
            part += f" ({low if low == high else f'{low} to {high}'} times {compared})"
        parts.append(part)
    return "; ".join(parts)
