"""The report on `bench train`: questions for each task, network and number of ranks, and over
networks the gain over 16 bit, as a map methods x networks.

Times are compared with torch's fp16 hook, under FSDP2 with the best of its 16-bit methods, and
losses with fp32, as docs/laboratory/benchmarks.md argues; `gain` says which differences count.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from gradwire.errors import ConfigError
from gradwire_tools.bench.quantities import DASH, network, percent, plural, rate
from gradwire_tools.bench.train.rows import Baselines, lengths_told
from gradwire_tools.report import costs, gain, learning
from gradwire_tools.report.gain import Gain, Standing
from gradwire_tools.report.parts import Chart, Question, Section, Table, TileChart, table
from gradwire_tools.report.rows import Row, grouped, run_of, split

_LARGE = 0.1  # error of a composed time
_COLUMNS = 5  # of a map
MODEL = ("task", "ranks", "per_node", "parameters", "task_options")

Runs = Sequence[Sequence[Row]]


def sections(rows: Sequence[Row]) -> list[Section]:
    """A map of gains per training that ran on two networks or more; one section per run, task,
    network, number of ranks and model, composed rows by themselves; and composed against whole
    runs."""
    whole = [row for row in rows if row["row"] != "validation"]
    compared = [row for row in rows if row["row"] == "validation"]
    runs = grouped(whole, *MODEL, "net", "sharded", "accumulate", "composed", "run").values()
    return [
        *(_gains(runs, whole) for runs in _trainings(whole)),
        *(_section(mine, whole) for mine in runs),
        *(_composed(mine, compared) for mine in grouped(compared, *MODEL, "run").values()),
    ]


def picture(rows: Sequence[Row]) -> tuple[Chart, str]:
    """The map of a training on several networks, else loss against the time of one run; of
    replicas (HSDP), the map of steps; and its heading.

    Raises:
        ConfigError: the rows are not those of one `gradwire bench train`.
    """
    rows = [row for row in rows if row["row"] != "validation"]
    if rows and all(row.get("replicas") for row in rows):
        first = rows[0]
        machines = f"{first['replicas']} machines of {first['per_node']} ranks"
        return step_map(rows), f"{first['task']}, {machines}: steps against 16 bit"
    trainings = _trainings(rows)
    if len(trainings) == 1 and sum(map(len, trainings[0])) == len(rows):
        task, ranks = (rows[0][key] for key in ("task", "ranks"))
        return gain_map(trainings[0]), f"{task}, {ranks} ranks: gain over 16 bit"
    groups = grouped(rows, *MODEL, "net", "sharded", "composed", "run").values()
    runs = [mine for mine in groups if split(mine)[1]]
    if len(runs) != 1:
        raise ConfigError(
            "--svg draws the evaluations of one `gradwire bench train`; these files have "
            f"{len(runs)} such runs"
        )
    summaries, evaluations = split(runs[0])
    first = evaluations[0]
    chart = learning.against_seconds(evaluations, summaries[0]["target"] if summaries else None)
    return chart, f"{first['task']}, {first['ranks']} ranks, {network(first['net'])}"


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
    against = [bar, *(row for row in reached if row["method"] == baselines.full)]
    key = "time_to_target"
    told = ", and ".join(gain.beside(best[key], r[key], r["method"])[1] for r in against)
    return [f"{best['method']} trains to the same loss {told}{where}."]


def _section(rows: Sequence[Row], among: Sequence[Row]) -> Section:
    summaries, evaluations = split(rows)
    first = rows[0]
    seeds = list(dict.fromkeys(row["seed"] for row in evaluations))
    machines = f" on {first['replicas']} machines" if first.get("replicas") else ""
    about = f"{first['ranks']} ranks{machines}, {network(first['net'])}"
    if isinstance(first.get("parameters"), int):
        about += f"; a model of {first['parameters']:,} parameters"
    if seeds:
        about += f"; {plural(len(seeds), 'seed')} ({', '.join(map(str, seeds))})"
    told = [about + "; every method had the same initial weights and the same batches."]
    if first.get("sharded"):
        policy = f"; every method has the policy {first['policy']}" if first.get("policy") else ""
        batches = first.get("accumulate", 1)
        told.append(
            "Under FSDP2: weights are gathered, gradients are reduce-scattered"
            + policy
            + (f"; a step has {batches} micro-batches" if batches > 1 else "")
            + ". The baseline for time is the best of torch's 16-bit methods."
        )
    told += _of_run(rows, among) + lengths_told(summaries)
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
    learned = learning.what_is_learned(trained, summaries)
    sent = costs.sent(summaries) if summaries else None
    if "device" in first:
        told.append("Ranks share this machine's GPU, so times are left out.")
        questions = [learned, sent]
    else:
        timed = learning.time_to_loss(trained, summaries), learning.at_targets(trained, summaries)
        questions = [*timed, learned, costs.steps(summaries) if summaries else None, sent]
    under = ", sharded" if first.get("sharded") else ""
    title = f"Training {first['task']}, {first['ranks']} ranks{under}, {network(first['net'])}"
    return Section(title, told, list(filter(None, questions)))


def _composed(rows: Sequence[Row], among: Sequence[Row]) -> Section:
    """Of `bench train --compose --validate`: composed times against those of whole runs."""
    known = [row for row in rows if row["error"] is not None]
    answers = ["No row has both times."]
    if known:
        between = " to ".join(percent(1 + end(row["error"] for row in known)) for end in (min, max))
        answers = [f"Composed training times differ from those of whole runs by {between}."]
    for row in known:
        if abs(row["error"]) > _LARGE:
            off = f"{percent(1 + row['error'])}, more than 10 %"
            answers.append(f"{row['method']} on {network(row['net'])} is off by {off}.")
    shown = table(
        rows,
        "method | network = net | steps | composed = composed_seconds | "
        "whole run = whole_seconds | error = off | to target, composed = composed_time_to_target | "
        "to target, whole = whole_time_to_target | last loss, composed = composed_final_loss | "
        "whole = whole_final_loss",
        off=lambda row: None if row["error"] is None else percent(1 + row["error"]),
    )
    about = (
        "A composed time lacks the start of a run: connections, and compilation of kernels. "
        "Each pair is one run of each, so errors include the noise of both."
    )
    title = f"Composed runs of {rows[0]['task']}, {rows[0]['ranks']} ranks, against whole runs"
    question = Question("Are composed times those of whole runs?", answers, table=shown)
    return Section(title, [about, *_of_run(rows, among)], [question])


def _of_run(rows: Sequence[Row], among: Sequence[Row]) -> list[str]:
    """A sentence on the run of `rows`, where `among` has more than one run and they are of one."""
    run = rows[0].get("run")
    if len(grouped(rows, "run")) > 1 or len(grouped(among, "run")) < 2 or not isinstance(run, dict):
        return []
    commit = run.get("commit") or "no git checkout"
    return [f"Rows of one run alone, of {run.get('date')}, at {commit}: {run.get('command')}"]


# ---- gains over networks


def _trainings(rows: Sequence[Row]) -> list[Runs]:
    """The runs of each training on two networks or more, from the slowest network on: rows of one
    run on one network. Runs on different networks stand together; where two were on the same
    network, each run stands alone."""
    found: list[Runs] = []
    for same in grouped(rows, *MODEL, "sharded", "accumulate").values():
        places = grouped(same, "net", "composed", "run").values()
        runs = [mine for mine in places if split(mine)[0]]
        several = len({(mine[0]["net"], mine[0].get("composed")) for mine in runs}) < len(runs)
        apart: dict[object, list[list[Row]]] = {}
        for mine in runs:
            apart.setdefault(run_of(mine[0]) if several else None, []).append(mine)
        for one in apart.values():
            if len({run[0]["net"] for run in one}) > 1:
                found.append(sorted(one, key=lambda run: rate(run[0]["net"])))
    return found


def gain_map(runs: Runs) -> TileChart:
    """Methods by networks."""
    gains = [gain.of_summaries(*split(run)) for run in runs]
    methods = dict.fromkeys(name for of_net in gains for name in of_net)
    return TileChart(
        networks(runs), [(name, [of_net.get(name) for of_net in gains]) for name in methods]
    )


def networks(runs: Runs) -> list[str]:
    """Headings of columns: the networks, with how they were measured where the rows have both."""
    ways = {(run[0]["net"], bool(run[0].get("composed"))) for run in runs}
    found = []
    for first, *_ in runs:
        told = network(first["net"])
        if {(first["net"], True), (first["net"], False)} <= ways:
            told += ", composed" if first.get("composed") else ", whole"
        found.append(told)
    return found


def step_map(rows: Sequence[Row]) -> TileChart:
    """Of median steps: columns are numbers of micro-batches and networks."""
    columns, gains = [], []
    places = grouped(split(rows)[0], "accumulate", "net")
    for (count, net), mine in sorted(places.items(), key=lambda one: (one[0][0], rate(one[0][1]))):
        columns.append(f"{plural(count, 'batch', 'es')}, {network(net)}")
        bar = Baselines.of_rows(mine).best(mine, "step_seconds")
        gains.append({row["method"]: gain.of_step(row, bar) for row in mine})
    methods = dict.fromkeys(name for of_place in gains for name in of_place)
    return TileChart(columns, [(name, [of.get(name) for of in gains]) for name in methods])


def _gains(runs: Runs, among: Sequence[Row]) -> Section:
    whole = gain_map(runs)
    questions = []
    for at in range(0, len(runs), _COLUMNS):
        part = slice(at, at + _COLUMNS)
        chart = TileChart(whole.columns[part], [(name, gains[part]) for name, gains in whole.rows])
        answers = [
            _answer(net, {method: one for method, gains in chart.rows if (one := gains[place])})
            for place, net in enumerate(chart.columns)
        ]
        questions.append(
            Question("Where does compression pay, and where does it not?", answers, chart, _CAPTION)
        )
    cells = [
        [method, *(DASH if gain is None else gain.text for gain in gains)]
        for method, gains in whole.rows
    ]
    shown = Table(["method", *whole.columns], cells)
    questions.append(Question("The same as a table", table=shown))
    first = runs[0][0]
    under = ", sharded" if first.get("sharded") else ""
    title = f"Training {first['task']}, {first['ranks']} ranks{under}: gain over 16 bit by network"
    about = (
        "Gain is the time to the target loss of the best 16-bit baseline on the same network, "
        "divided by the method's."
    )
    return Section(title, [about, *_of_run(list(itertools.chain(*runs)), among)], questions)


_CAPTION = (
    "Time to the target of the best 16-bit baseline / time of the method: ▲ above 1 it is faster, "
    "▼ below 1 slower. never: the target is not reached with every seed. Only differences "
    "that are more than noise have a colour; a loss is as strong as a gain of the same factor."
)


def _answer(name: str, gains: Mapping[str, Gain]) -> str:
    """Which methods lose on a network, and which gain."""
    bar = next((n for n, one in gains.items() if one.standing is Standing.BAR), None)
    baselines = Baselines.among(gains).names
    parts = []
    for standing, word in _CLAUSES.items():
        mine = [n for n, one in gains.items() if one.standing is standing and n not in baselines]
        if mine and word:
            parts.append(f"{word}: {', '.join(mine)}")
        else:
            parts += [f"{n} is {gains[n].text}" for n in mine]
    against = f"against {bar}" if bar else "no 16-bit baseline reached the target"
    what = "; ".join(parts) or f"no method but {plural(len(gains), 'baseline')}"
    return f"{name}, {against}: {what}."


_CLAUSES = {
    Standing.LOSS: "",  # said of each
    Standing.NEVER: "do not reach the target",
    Standing.NOISE: "within noise",
    Standing.UNJUDGED: "not judged, for want of seeds",
    Standing.GAIN: "",
    Standing.ONLY: "reach the target, unlike 16 bit",
    Standing.UNKNOWN: "not known",
}
