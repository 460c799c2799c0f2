"""The report on benchmarks of single parts: `bench aggregators`, `bench collectives`, `bench
kernels`, `bench transports` and `bench profile`."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_tools.bench.quantities import (
    DASH,
    digits,
    faster,
    network,
    plural,
    reach,
    seconds,
    than,
)
from gradwire_tools.bench.train.baselines import FULL, SIXTEEN_BIT
from gradwire_tools.report import svg
from gradwire_tools.report.bars import Bar, bars, dots
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.lines import Axes, Line, lines
from gradwire_tools.report.noise import Verdict, by_spreads, spread_of
from gradwire_tools.report.parts import Figure, Question, Section, table
from gradwire_tools.report.rows import grouped

_AVERAGING = "What does a method cost in CPU time?"
_ALL_REDUCE = "How long does an all-reduce take, against the limit of the wire?"
_KERNELS = "How fast are the kernels, against memory?"
_LATENCY = "How long does a message take between two processes?"
_BUCKET = "Where does the time of a step's communication go?"


# ---- bench aggregators


def aggregators(rows: Sequence[Row]) -> Section:
    """Of one task, number of ranks and size."""
    first = rows[0]
    drawn, shown = [], []
    for row in rows:
        shown.append({**row, "cost": f"{digits(row['ms_per_million'])} ms"})
        cost, share = max(0.0, row["ms_per_million"]) / 1e3, min(1.0, row["orthogonal_share"] or 0)
        limit = row["limit_seconds"] * 1e6 / row["numel"]
        drawn.append(Bar(row["method"], [cost * (1 - share), cost * share], limit=limit))
    caption = (
        "CPU time of the process per backward and million values, beyond that of a hook that does "
        "nothing: median over turns, mean over ranks. The limit is a copy of the gradients in the "
        "same turns."
    )
    names = ("other work", "orthogonalisation")
    figure = Figure(caption, bars(drawn, "per million values", _AVERAGING, names))
    answers = _beside_torch(rows)
    answers.append("These rows have no spread, so differences are given, and not judged.")
    columns = (
        "method | CPU per million values = cost | CPU per backward = seconds | "
        "limit / time = of_limit | orthogonalisation = orthogonal_share | rounds | "
        "sent per rank = wire_bytes | state = state_bytes | memory = peak_extra_bytes | "
        "on the clock = wall_seconds"
    )
    about = f"Gradients of {first['task']}, {first['numel']:,} values; {first['ranks']} ranks."
    title = f"Cost of averaging the gradients of {first['task']}"
    question = Question(_AVERAGING, answers, figure, table(shown, columns))
    return Section(title, [about], [question])


def _beside_torch(rows: Sequence[Row]) -> list[str]:
    """PowerSGD's methods against torch's hook of the same rank."""
    by_method = {row["method"]: row for row in rows}
    answers = []
    for row in rows:
        name, *options = row["method"].split(":")
        rank = next((one for one in options if one.startswith("rank=")), None)
        torch = by_method.get(f"torch-powersgd:{rank}")
        if name == "powersgd" and torch is not None and torch["seconds"] > 0:
            ratio = digits(row["seconds"] / torch["seconds"])
            answers.append(f"{row['method']} takes {ratio} of the CPU time of torch's hook.")
    return answers


# ---- bench collectives


def collectives(rows: Sequence[Row]) -> Section:
    """Of one number of ranks, network and size."""
    first = rows[0]
    baseline = next((row for row in rows if row["method"] == SIXTEEN_BIT), None)
    drawn, shown, answers = [], [], list[str]()
    for row in rows:
        middle = spread_of(row, "seconds_quartiles")
        drawn.append(Bar(row["method"], [row["seconds"]], middle, row["limit_seconds"]))
        told, cell = _against(row, baseline)
        if told and row["method"] != FULL:
            error = digits(row["nmse"], 2)
            answers.append(f"{row['method']} is {told}; its average has an NMSE of {error}.")
        by = f"{row['algorithm']}, {row.get('transport', DASH)}"
        half = reach(middle or (), seconds, "not recorded")
        shown.append({**row, "by": by, "middle half": half, "against": cell})
    if any((row["nmse"] or 0.0) > 1 for row in rows):
        answers.append(
            "An NMSE above 1 is an error larger than the average itself. The gradients of this "
            "benchmark are random and have no low rank: they suit no low-rank method, and such a "
            "method's NMSE says nothing about training."
        )
    caption = (
        "Median over rounds of the slowest rank; the spread is that of the middle half. The limit "
        "is what the bytes take at the network's rate, plus its latency for each round. NMSE: "
        "squared error of the average, relative to its square."
    )
    columns = (
        "method | algorithm, transport = by | time = seconds | middle half | "
        f"against {SIXTEEN_BIT} = against | limit = limit_seconds | limit / time = of_limit | "
        "sent per rank = wire_bytes | NMSE = nmse"
    )
    figure = Figure(caption, bars(drawn, "per all-reduce", _ALL_REDUCE))
    per_node = first.get("per_node") or 1
    machines = "" if per_node == 1 else f", {per_node} on each machine"
    about = f"{first['ranks']} ranks{machines}, {network(first['net'])}."
    title = f"All-reduce of {digits(first['numel'] / 1e6)} M values"
    question = Question(_ALL_REDUCE, answers, figure, table(shown, columns))
    return Section(title, [about], [question])


def _against(row: Row, baseline: Row | None) -> tuple[str, str]:
    """A row against the baseline, in a sentence and in the table."""
    if baseline is None or row is baseline or not baseline["seconds"]:
        return "", DASH
    mine, theirs = (spread_of(one, "seconds_quartiles") for one in (row, baseline))
    verdict = by_spreads(mine, theirs)
    compared = faster(row["seconds"], baseline["seconds"])
    told = than(compared, str(baseline["method"]))
    if verdict is Verdict.NOISE:
        return f"about as fast as {baseline['method']}, within noise", verdict.value
    if verdict is Verdict.UNKNOWN:
        return f"{told} ({verdict.value})", f"{compared}, {verdict.value}"
    return told, compared


# ---- bench kernels


def kernels(rows: Sequence[Row]) -> list[Section]:
    """One section, with a figure per device, target, number of threads and size."""
    runs = grouped(rows, "device", "target", "threads", "numel")
    return [Section("Kernels", (), [_kernels(mine, len(runs) > 1) for mine in runs.values()])]


def _kernels(rows: Sequence[Row], several: bool) -> Question:
    first = rows[0]
    where = f"target {first['target']}, {first.get('device', 'cpu')}"
    where += f", {plural(int(first['threads']), 'thread')}, {first['numel']:,} values"
    points = [
        (str(codec), [(str(row["op"]), float(row["of_limit"])) for row in mine])
        for (codec, _), mine in grouped(rows, "codec", "options").items()
    ]
    copies = [row["copy_gbps"] for row in rows if row.get("copy_gbps")]
    answers = [f"{where[0].upper()}{where[1:]}."]
    if copies:
        answers.append(
            f"A copy in the same run moves {digits(min(copies))} to {digits(max(copies))} GB/s, "
            "read and written."
        )
    slow = sum(row["of_limit"] < 0.1 for row in rows)
    if slow:
        text = f"{slow} of {len(rows)} take more than ten times what memory alone would."
        answers.append(text)
    caption = (
        "1 is what a copy of as many bytes takes; further left is slower. Values are medians. "
        "Where a codec needs a number of the whole row first, its values count twice."
    )
    figure = dots(points, "limit of memory / time", _KERNELS, (1.0, "speed of a copy"))
    shown = [
        {
            **row,
            "options": ", ".join(f"{k}={v}" for k, v in (row.get("options") or {}).items()) or DASH,
            "speed": f"{digits(row['gbps'])} GB/s",
        }
        for row in rows
    ]
    columns = "codec | options | op | time = seconds | uncompressed bytes = speed | "
    columns += "limit = limit_seconds | limit / time = of_limit"
    title = f"{_KERNELS[:-1]} ({where})?" if several else _KERNELS
    return Question(title, answers, Figure(caption, figure), table(shown, columns))


# ---- bench transports


def transports(rows: Sequence[Row]) -> list[Section]:
    """Latency against size, and throughput."""
    strokes = svg.plain(row["transport"] for row in rows)
    drawn = []
    for (name,), mine in grouped(rows, "transport").items():
        ordered = sorted(mine, key=lambda row: int(row["bytes"]))
        latencies = [row["latency_us"] for row in ordered]
        drawn.append(Line(name, strokes[name], [row["bytes"] for row in ordered], latencies))
    axes = Axes(
        "bytes of a message", "latency, µs", _LATENCY, log_x=True, log_y=True,
        x_ticks=sorted({row["bytes"] for row in rows}),
    )  # fmt: skip
    shown = [
        {
            **row,
            "latency": seconds(row["latency_us"] * 1e-6),
            "several in flight": f"{digits(row['gbps'])} GB/s",
        }
        for row in rows
    ]
    columns = "transport | message = bytes | latency | several in flight"
    caption = "Half the time there and back; medians over messages and turns."
    figure = Figure(caption, lines(drawn, axes))
    question = Question(_LATENCY, (), figure, table(shown, columns))
    return [Section("Transports", ["Two processes of one machine, in turns."], [question])]


# ---- bench profile

_PARTS = {
    "hook": "DDP's thread, until the bucket is handed over",
    "compute": "Python of the compute lane",
    "inbound": "Python of the inbound lanes, and checksums of what came",
    "outbound": "Python of the outbound lanes",
    "python": "hook, compute, inbound and outbound together",
    "queueing": "steps that were ready and waited for their thread",
    "wire": "posting messages and waiting for them",
    "kernels": "kernels, and checksums of what is sent",
    "bucket": "from the hook's call to the average in place",
    "overhead": "the bucket less its kernels",
    "backward": "the whole backward pass",
    "compile_1024": "compiling such a bucket for 1024 ranks, once",
}


def profile(rows: Sequence[Row]) -> Section:
    """Parts of a step, of one method, network and number of ranks."""
    first = rows[0]
    drawn = [Bar(row["part"], [row["seconds"]], colour="var(--g0)") for row in rows]
    shown = [{**row, "what it is": _PARTS.get(row["part"])} for row in rows]
    about = f"{first['method']}, {first['ranks']} ranks, {network(first['net'])}; "
    about += f"a gradient of {first['numel']:,} values."
    caption = (
        "Medians over steps on rank 0. Parts overlap and do not add up: the first five are CPU "
        "time of their threads, the others pass on the clock."
    )
    figure = Figure(caption, bars(drawn, "per step", _BUCKET))
    columns = "part | what it is | time = seconds | of steps = steps"
    question = Question(_BUCKET, (), figure, table(shown, columns))
    return Section("Profile of a bucket", [about], [question])
