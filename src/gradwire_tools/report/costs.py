"""The report on what a training step costs, in time and in bytes, and on benchmarks of single
parts: `bench aggregators`, `bench collectives`, `bench kernels`, `bench transports` and `bench
profile`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradwire_tools.bench.quantities import (
    DASH,
    digits,
    network,
    percent_of,
    plural,
    rate,
    reach,
    seconds,
)
from gradwire_tools.bench.train.rows import FULL, SIXTEEN_BIT, Baselines, per_step
from gradwire_tools.report.gain import Standing, against
from gradwire_tools.report.parts import COMPUTING, Bar, Bars, Dots, Question, Section, lines, table
from gradwire_tools.report.rows import Row, grouped

# ---- the step of a training

_UNRECORDED = "; the spread of the steps is not recorded, so this is not judged"
_STEPS = {
    Standing.LOSS: (": it does not pay here", ""),
    Standing.NOISE: (": the middle halves of the steps overlap", "about as fast"),
    Standing.SPREADLESS: (_UNRECORDED, Standing.SPREADLESS.value),
}


def steps(summaries: Sequence[Row]) -> Question:
    """Median step, its quartiles, and its parts; what no row carries is said to be not known."""
    baselines = Baselines.of_rows(summaries)
    baseline = baselines.best(summaries, "step_seconds")
    drawn, shown, answers, spent = [], [], [], []
    for row in summaries:
        whole, kernels = row["step_seconds"], row.get("kernel_seconds")
        exposed, computing = None, row["ideal_step_seconds"]
        if whole is not None and computing is not None:
            exposed = max(0.0, whole - computing)
        if whole is not None:
            parts = [whole] if exposed is None else [whole - exposed, exposed]
            drawn.append(Bar(row["method"], parts, row.get("step_seconds_quartiles")))
        told, cell = against(row, baseline, "step_seconds", _STEPS, "one of ")
        if told and row["method"] != baselines.full:
            answers.append(f"A step of {row['method']} is {told}.")
        if kernels is not None and whole:
            spent.append(
                f"{row['method']} spends {seconds(kernels)} of a step in its kernels, "
                f"{percent_of(kernels / whole)} of the step's time."
            )
        shown.append({**row, "against": cell, "exposed": seconds(exposed)})
    spent.append(
        "Parts overlap and do not add up. Kernels are encoding, merging and decoding together, "
        "with checksums; no benchmark times encoding and decoding apart. The wire is what the "
        "bytes take at the network's rate, by calculation; all else is measured."
    )
    return Question(
        "How long does a step take, and where does it go?",
        [*answers, *spent],
        Bars(drawn, parts=COMPUTING) if drawn else None,
        "Median step of rank 0. Computing is a step without communication, measured at the end of "
        "the same run; the rest is communication that computing does not hide. "
        "The spread is that of the middle half of the steps.",
        table(
            shown,
            "method | step = step_seconds | middle half = half | computing = ideal_step_seconds | "
            "exposed | waiting after backward = waiting | kernels | wire at full rate = wire | "
            "against {name} = against",
            name=baselines.against(baseline),
            half=lambda row: _middle_half(row, "step_seconds"),
            waiting=lambda row: _known(row.get("exposed_seconds")),
            kernels=lambda row: _known(row.get("kernel_seconds")),
            wire=_wire,
        ),
    )


def _middle_half(row: Row, key: str) -> str:
    return reach(row.get(f"{key}_quartiles") or (), seconds, "not recorded")


def _known(time: float | None) -> str:
    return "not known" if time is None else seconds(time)


def _wire(row: Row) -> str:
    bits, sent = rate(row["net"]), per_step(row, "wire_bytes")
    if sent is None:
        return _known(None)
    return seconds(8 * sent / bits) if bits and math.isfinite(bits) else "no network"


_SENT = ("wire_bytes", "link_bytes", "weights_wire_bytes", "gradients_wire_bytes")


def sent(summaries: Sequence[Row]) -> Question:
    """Bytes per rank and step, by the method's own count and by the kernel's."""
    baselines = Baselines.of_rows(summaries)
    baseline = baselines.best(summaries, "step_seconds")
    name = baselines.against(baseline)
    base = None if baseline is None else per_step(baseline, "wire_bytes")
    drawn, shown, answers = [], [], []
    for row in summaries:
        mine, cell = per_step(row, "wire_bytes"), DASH
        if mine is not None:
            drawn.append(Bar(row["method"], [mine]))
        if mine and base and row is not baseline:
            ratio, cell, word = mine / base, "as many", "as"
            if f"{ratio:.2f}" != "1.00":
                fewer, word = "more" if ratio > 1 else "fewer", "than"
                cell = f"{digits(max(ratio, 1 / ratio))} times {fewer}"
            if row["method"] != baselines.full:
                answers.append(f"{row['method']} sends {cell} bytes {word} {name}.")
        sent_per_step = {key: per_step(row, key) for key in _SENT}
        shown.append({**row, "all_bytes": row["wire_bytes"], "against": cell, **sent_per_step})
    sharded = any("weights_wire_bytes" in row for row in summaries)
    by_kind = "weights, per step = weights_wire_bytes | gradients, per step = gradients_wire_bytes"
    by_kind = f"{by_kind} | " if sharded else ""
    return Question(
        "How many bytes are sent?",
        answers,
        Bars(drawn, "per rank and step", sizes=True) if drawn else None,
        "Sent by rank 0: torch's methods by formula, gradwire as counted, headers included. The "
        "link is what the network interface counted, TCP and IP included. Memory is what a method "
        f"holds beyond plain {'FSDP2' if sharded else 'DDP'}, where it counts it.",
        table(
            shown,
            f"method | per step = wire_bytes | against {{name}} = against | {by_kind}"
            "on the link, per step = link_bytes | in all = all_bytes | memory = peak_extra_bytes",
            name=name,
        ),
    )


# ---- bench aggregators


def aggregators(rows: Sequence[Row]) -> Section:
    """Of one task, number of ranks and size."""
    first, by_method = rows[0], {row["method"]: row for row in rows}
    drawn, answers = [], []
    for row in rows:
        cost, share = max(0.0, row["ms_per_million"]) / 1e3, min(1.0, row["orthogonal_share"] or 0)
        limit = row["limit_seconds"] * 1e6 / row["numel"]
        drawn.append(Bar(row["method"], [cost * (1 - share), cost * share], limit=limit))
        name, *options = row["method"].split(":")
        rank = next((one for one in options if one.startswith("rank=")), None)
        torch = by_method.get(f"torch-powersgd:{rank}")
        if name == "powersgd" and torch is not None and torch["seconds"] > 0:
            ratio = digits(row["seconds"] / torch["seconds"])
            answers.append(f"{row['method']} takes {ratio} of the CPU time of torch's hook.")
    question = Question(
        "What does a method cost in CPU time?",
        [*answers, "These rows have no spread, so differences are given, and not judged."],
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


# ---- bench collectives


_ALL_REDUCES = {
    Standing.NOISE: (", within noise", Standing.NOISE.value),
    Standing.SPREADLESS: (" (spread unknown)", Standing.SPREADLESS.value),
}


def collectives(rows: Sequence[Row]) -> Section:
    """Of one number of ranks, network and size."""
    first = rows[0]
    baseline = next((row for row in rows if row["method"] == SIXTEEN_BIT), None)
    drawn, shown, answers = [], [], []
    for row in rows:
        spread = row.get("seconds_quartiles")
        drawn.append(Bar(row["method"], [row["seconds"]], spread, row["limit_seconds"]))
        told, cell = against(row, baseline, "seconds", _ALL_REDUCES)
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
            half=lambda row: _middle_half(row, "seconds"),
        ),
    )
    per_node = first.get("per_node") or 1
    machines = "" if per_node == 1 else f", {per_node} on each machine"
    about = f"{first['ranks']} ranks{machines}, {network(first['net'])}."
    return Section(f"All-reduce of {digits(first['numel'] / 1e6)} M values", [about], [question])


# ---- bench kernels


def kernels(rows: Sequence[Row]) -> Section:
    """One section, with a chart per device, target, number of threads and size."""
    runs = grouped(rows, "device", "target", "threads", "numel").values()
    return Section("Kernels", (), [_kernels(mine, len(runs) > 1) for mine in runs])


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


def transports(rows: Sequence[Row]) -> Section:
    """Latency against size, and throughput."""
    points = [(row["transport"], "", row["bytes"], row["latency_us"]) for row in rows]
    sizes = sorted({row["bytes"] for row in rows})
    question = Question(
        "How long does a message take between two processes?",
        (),
        lines(points, "bytes of a message", "latency, µs", log_x=True, log_y=True, x_ticks=sizes),
        "Half the time there and back; medians over messages and turns.",
        table(
            rows,
            "transport | message = bytes | latency | several in flight = flight",
            latency=lambda row: seconds(1e-6 * row["latency_us"]),
            flight=lambda row: f"{digits(row['gbps'])} GB/s",
        ),
    )
    return Section("Transports", ["Two processes of one machine, in turns."], [question])


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
