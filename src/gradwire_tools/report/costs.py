"""The report on benchmarks of single parts: `bench aggregators`, `bench collectives`, `bench
kernels`, `bench transports` and `bench profile`."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_tools.bench.quantities import DASH, digits, faster, network, plural, seconds, than
from gradwire_tools.bench.train.baselines import FULL, SIXTEEN_BIT
from gradwire_tools.report.gain import Verdict, by_spreads
from gradwire_tools.report.parts import Bar, Bars, Dots, Lines, Question, Section, series, table
from gradwire_tools.report.rows import Row, grouped
from gradwire_tools.report.steps import middle_half

# ---- bench aggregators


def aggregators(rows: Sequence[Row]) -> Section:
    """Of one task, number of ranks and size."""
    first = rows[0]
    drawn = []
    for row in rows:
        cost, share = max(0.0, row["ms_per_million"]) / 1e3, min(1.0, row["orthogonal_share"] or 0)
        limit = row["limit_seconds"] * 1e6 / row["numel"]
        drawn.append(Bar(row["method"], [cost * (1 - share), cost * share], limit=limit))
    question = Question(
        "What does a method cost in CPU time?",
        [
            *_beside_torch(rows),
            "These rows have no spread, so differences are given, and not judged.",
        ],
        Bars(drawn, "per million values", ("other work", "orthogonalisation")),
        "CPU time of the process per backward and million values, beyond that of a hook that does "
        "nothing: median over turns, mean over ranks. The limit is a copy of the gradients in the "
        "same turns.",
        table(
            rows,
            "method | CPU per million values = cost | CPU per backward = seconds | "
            "limit / time = of_limit | orthogonalisation = orthogonal_share | rounds | "
            "sent per rank = wire_bytes | state = state_bytes | memory = peak_extra_bytes | "
            "on the clock = wall_seconds",
            cost=lambda row: f"{digits(row['ms_per_million'])} ms",
        ),
    )
    about = f"Gradients of {first['task']}, {first['numel']:,} values; {first['ranks']} ranks."
    return Section(f"Cost of averaging the gradients of {first['task']}", [about], [question])


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
    half = "seconds_quartiles"
    drawn = [
        Bar(row["method"], [row["seconds"]], row.get(half), row["limit_seconds"]) for row in rows
    ]
    shown, answers = [], []
    for row in rows:
        told, cell = _against(row, baseline)
        if told and row["method"] != FULL:
            error = digits(row["nmse"], 2)
            answers.append(f"{row['method']} is {told}; its average has an NMSE of {error}.")
        shown.append({**row, "against": cell})
    if any((row["nmse"] or 0.0) > 1 for row in rows):
        answers.append(
            "An NMSE above 1 is an error larger than the average itself. The gradients of this "
            "benchmark are random and have no low rank: they suit no low-rank method, and such a "
            "method's NMSE says nothing about training."
        )
    question = Question(
        "How long does an all-reduce take, against the limit of the wire?",
        answers,
        Bars(drawn, "per all-reduce"),
        "Median over rounds of the slowest rank; the spread is that of the middle half. The limit "
        "is what the bytes take at the network's rate, plus its latency for each round. NMSE: "
        "squared error of the average, relative to its square.",
        table(
            shown,
            "method | algorithm, transport = by | time = seconds | middle half = half | "
            f"against {SIXTEEN_BIT} = against | limit = limit_seconds | limit / time = of_limit | "
            "sent per rank = wire_bytes | NMSE = nmse",
            by=lambda row: f"{row['algorithm']}, {row.get('transport', DASH)}",
            half=lambda row: middle_half(row, half),
        ),
    )
    per_node = first.get("per_node") or 1
    machines = "" if per_node == 1 else f", {per_node} on each machine"
    about = f"{first['ranks']} ranks{machines}, {network(first['net'])}."
    return Section(f"All-reduce of {digits(first['numel'] / 1e6)} M values", [about], [question])


def _against(row: Row, baseline: Row | None) -> tuple[str, str]:
    """A row against the baseline, in a sentence and in the table."""
    if baseline is None or row is baseline or not baseline["seconds"]:
        return "", DASH
    verdict = by_spreads(*(one.get("seconds_quartiles") for one in (row, baseline)))
    compared = faster(row["seconds"], baseline["seconds"])
    told = than(compared, baseline["method"])
    if verdict is Verdict.NOISE:
        return f"about as fast as {baseline['method']}, within noise", verdict.value
    if verdict is Verdict.UNKNOWN:
        return f"{told} ({verdict.value})", f"{compared}, {verdict.value}"
    return told, compared


# ---- bench kernels


def kernels(rows: Sequence[Row]) -> list[Section]:
    """One section, with a chart per device, target, number of threads and size."""
    runs = grouped(rows, "device", "target", "threads", "numel")
    return [Section("Kernels", (), [_kernels(mine, len(runs) > 1) for mine in runs.values()])]


def _kernels(rows: Sequence[Row], several: bool) -> Question:
    first = rows[0]
    where = f"target {first['target']}, {first.get('device', 'cpu')}"
    where += f", {plural(int(first['threads']), 'thread')}, {first['numel']:,} values"
    answers = [f"{where[0].upper()}{where[1:]}."]
    copies = [row["copy_gbps"] for row in rows if row.get("copy_gbps")]
    if copies:
        answers.append(
            f"A copy in the same run moves {digits(min(copies))} to {digits(max(copies))} GB/s, "
            "read and written."
        )
    slow = sum(row["of_limit"] < 0.1 for row in rows)
    if slow:
        answers.append(f"{slow} of {len(rows)} take more than ten times what memory alone would.")
    points = [
        (codec, [(row["op"], row["of_limit"]) for row in mine])
        for (codec, _), mine in grouped(rows, "codec", "options").items()
    ]
    question = "How fast are the kernels, against memory"
    return Question(
        f"{question} ({where})?" if several else f"{question}?",
        answers,
        Dots(points, "limit of memory / time", (1.0, "speed of a copy")),
        "1 is what a copy of as many bytes takes; further left is slower. Values are medians. "
        "Where a codec needs a number of the whole row first, its values count twice.",
        table(
            rows,
            "codec | options = given | op | time = seconds | uncompressed bytes = speed | "
            "limit = limit_seconds | limit / time = of_limit",
            given=lambda row: (
                ", ".join(f"{k}={v}" for k, v in (row.get("options") or {}).items()) or DASH
            ),
            speed=lambda row: f"{digits(row['gbps'])} GB/s",
        ),
    )


# ---- bench transports


def transports(rows: Sequence[Row]) -> list[Section]:
    """Latency against size, and throughput."""
    drawn = series((row["transport"], "", row["bytes"], row["latency_us"]) for row in rows)
    sizes = sorted({row["bytes"] for row in rows})
    question = Question(
        "How long does a message take between two processes?",
        (),
        Lines(drawn, "bytes of a message", "latency, µs", log_x=True, log_y=True, x_ticks=sizes),
        "Half the time there and back; medians over messages and turns.",
        table(
            rows,
            "transport | message = bytes | latency | several in flight = flight",
            latency=lambda row: seconds(1e-6 * row["latency_us"]),
            flight=lambda row: f"{digits(row['gbps'])} GB/s",
        ),
    )
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
    about = f"{first['method']}, {first['ranks']} ranks, {network(first['net'])}; "
    about += f"a gradient of {first['numel']:,} values."
    question = Question(
        "Where does the time of a step's communication go?",
        (),
        Bars([Bar(row["part"], [row["seconds"]], colour="g0") for row in rows]),
        "Medians over steps on rank 0. Parts overlap and do not add up: the first five are CPU "
        "time of their threads, the others pass on the clock.",
        table(
            rows,
            "part | what it is = about | time = seconds | of steps = steps",
            about=lambda row: _PARTS.get(row["part"]),
        ),
    )
    return Section("Profile of a bucket", [about], [question])
