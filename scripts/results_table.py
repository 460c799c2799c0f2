"""Prints a table of `gradwire bench train`'s rows in Markdown: methods x networks.

    python scripts/results_table.py                     # of bench/results/*.jsonl
    python scripts/results_table.py a.jsonl b.jsonl --task gpt
    python scripts/results_table.py a.jsonl --gains     # a line per method, a column per network
    python scripts/results_table.py a.jsonl --best      # of all runs: the best methods by network
    python scripts/results_table.py a.jsonl --steps     # step times, of all runs at once
    python scripts/results_table.py a.jsonl --choices   # of `bench planner`, by network
    python scripts/results_table.py a.jsonl --parts     # of `bench ablation`, by model
    python scripts/results_table.py a.jsonl --auto      # automatic mode beside other methods

A table per run, task and number of ranks. Times to the target and gains are those of the
report, by the same rules: the gain is the time to the target of the best 16-bit baseline on the
same network divided by the method's, and nothing within noise is called a gain. Losses stand in the
table as gains do. The command behind the rows follows each table.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire_tools.bench.quantities import (
    DASH,
    digits,
    network,
    percent,
    rate,
    seconds,
    size,
    times,
)
from gradwire_tools.bench.train.rows import FULL, Baselines, length
from gradwire_tools.report import learning, predictions
from gradwire_tools.report.gain import Gain, Standing, of_summaries
from gradwire_tools.report.rows import Row, grouped, read, sort, split

COST = 0.01  # of fp32's metric, that is no loss
RESULTS = Path(__file__).parents[1] / "bench" / "results"
GAINS_LEGEND = (
    "A number is the gain. Bold: faster than the best 16-bit baseline (*1*); plain: within noise, "
    "or too few seeds to judge."
)


def tables(rows: Iterable[Row], task: str | None = None, gains: bool = False) -> str:
    """The tables of all trainings among the rows; with `gains`, those of methods x networks.

    Raises:
        ConfigError: no row is a summary of `bench train`, or none is of this task.
    """
    made = []
    for mine in _trainings(rows, task):
        runs = _runs(mine)
        if runs:
            lines = _grid(runs) if gains else _lines(runs)
            made.append(_with_commands([_about(mine), "", *lines], mine))
    if not made:
        which = "" if task is None else f" of the task {task!r}"
        raise ConfigError(
            f"there are no summary rows of `gradwire bench train`{which}: --choices and --parts "
            "print rows of the planner and of the ablation, `gradwire report` all others"
        )
    return "\n\n".join(made)


def best(rows: Iterable[Row], task: str | None = None) -> str:
    """A table of the three methods with the highest gains, networks x tasks, among those whose last
    metric is nowhere more than `COST` worse than fp32's; and in how many cells each leads. Of
    several runs a method's highest gain counts.

    Raises:
        ConfigError: no row is a summary of `bench train`, or none is of this task.
    """
    cells: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    lost = set()
    for run in (run for mine in _trainings(rows, task) for run in _runs(mine)):
        summaries, evaluations = split(run)
        gains, full = of_summaries(summaries, evaluations), _full(summaries)
        for row in summaries:
            ratio, cost = gains[row["method"]].ratio, _cost(row, full)
            if ratio is None or cost is None or cost > COST:
                lost.add(row["method"])
            else:
                of_cell = cells.setdefault((row["net"], row["task"]), {})
                known = of_cell.get(row["method"], (0.0, 0.0))
                of_cell[row["method"]] = max(known, (ratio, cost))
    if not cells:
        raise ConfigError("there are no summary rows of `gradwire bench train` with gains")
    tasks = list(dict.fromkeys(name for _, name in cells))
    lines, leads = [], Counter[str]()
    for net in sorted({net for net, _ in cells}, key=rate):
        line = [network(net)]
        for name in tasks:
            of_cell = cells.get((net, name), {})
            found = [method for method in of_cell if method not in lost]
            found.sort(key=lambda method: of_cell[method], reverse=True)
            leads.update(found[:1])
            told = [f"`{m}` {times(of_cell[m][0])} ({-100 * of_cell[m][1]:+.1f} %)" for m in found]
            line.append("; ".join(told[:3]) or DASH)
        lines.append(line)
    said = ", ".join(f"`{name}` {number}" for name, number in leads.most_common())
    return "\n".join([*_table(["network", *tasks], lines), "", f"Highest gains: {said}."])


def _cost(row: Row, full: Row | None) -> float | None:
    """How much worse than fp32's a last metric is; None of torch's own methods."""
    if full is None or row["method"].startswith("torch-") or row.get("timing_only"):
        return None
    better = 1 if row["metric_name"] == "accuracy" else -1
    return float(better * (1 - row["final_metric"] / full["final_metric"]))


def steps(rows: Iterable[Row], task: str | None = None) -> str:
    """A table of medians of steps, methods x networks, in brackets over that of the best 16-bit
    baseline on the network. Unlike gains they may come from several runs of the same training.

    Raises:
        ConfigError: no row is a summary of `bench train`, or none is of this task.
    """
    trained = [row for row in sort(rows)["bench train"] if task in (None, row["task"])]
    columns = [split(run)[0] for run in _runs(trained)]
    if not columns:
        raise ConfigError("there are no summary rows of `gradwire bench train`")
    heads = ["method", "sent per step", *(network(summaries[0]["net"]) for summaries in columns)]
    cells = []
    for first in columns[0]:
        line = [f"`{first['method']}`", size(first.get("wire_bytes_per_step"))]
        for summaries in columns:
            bar = Baselines.of_rows(summaries).best(summaries, "step_seconds")
            mine = next((r for r in summaries if r["method"] == first["method"]), None)
            took = mine and mine["step_seconds"]
            line.append(_beside(took, bar and bar["step_seconds"]))
        cells.append(line)
    return _with_commands(_table(heads, cells), trained)


def choices(rows: Iterable[Row]) -> str:
    """A table of the rows of `bench planner`.

    Raises:
        ConfigError: there are none.
    """
    found = _of_kind(rows, "bench planner")
    heads = ["network", "gradient", "choice", "took", "expected", "off by", "fastest", "ratio"]
    cells = []
    for (net,), mine in grouped(found, "net").items():
        for at, row in enumerate(mine):
            line = [network(net) if at == 0 else "", size(row["nbytes"])]
            line += [f"`{row['method']}` by {row['algorithm']}", seconds(row["seconds"])]
            line += [seconds(row["expected_seconds"]), _off(row["error"])]
            line += [f"`{row['best_method'].removeprefix('gradwire:')}`", times(row["ratio"])]
            cells.append(line)
    return _with_commands(_table(heads, cells), found)


def parts(rows: Iterable[Row]) -> str:
    """A table of the rows of `bench ablation`: parts x models, in the lab and in the simulator.

    Raises:
        ConfigError: there are none.
    """
    found = _of_kind(rows, "bench ablation")
    columns = grouped(found, "model", "net", "ranks", "where")
    heads = ["part", *(f"{model}, {net}, {ranks} ranks, {where}"
                       for model, net, ranks, where in columns)]  # fmt: skip
    cells = [
        [
            part,
            *(next((_part(r) for r in of if r["part"] == part), DASH) for of in columns.values()),
        ]
        for part in dict.fromkeys(row["part"] for row in found)
    ]
    return _with_commands(_table(heads, cells), found)


def auto(rows: Iterable[Row], task: str | None = None) -> str:
    """Two tables of automatic mode in `bench train`. Methods x networks: means of steps after the
    first evaluation that follows its last decision, in brackets over those of the fastest that was
    chosen by hand. And what it tried: what a pass took; a star marks what it then used.

    Raises:
        ConfigError: it decided nothing.
    """
    kinds = sort(rows)
    decided = [row for row in kinds["decisions"] if row.get("tried")]
    decided = [row for row in decided if task in (None, row["task"])]
    if not decided:
        raise ConfigError("there are no rows in which automatic mode tried settings")
    decided.sort(key=lambda row: rate(row["net"]))
    of_run = ("task", "net", "run", "seed")
    runs = grouped(split(kinds["bench train"])[1], *of_run)
    columns = []
    for place, (*_, last) in grouped(decided, *of_run).items():
        columns.append((last, _settled(runs.get(place, []), last["step"])))
    heads = ["method", *(f"{row['task']}, {network(row['net'])}" for row, _ in columns)]
    fastest = [
        min((took for name, took in of.items() if not name.startswith("auto")), default=None)
        for _, of in columns
    ]
    cells = []
    for method in dict.fromkeys(name for _, of in columns for name in of):
        mine = [of.get(method) for _, of in columns]
        cells.append([f"`{method}`", *map(_beside, mine, fastest)])
    lines = [*_table(heads, cells), ""]
    cells = []
    for row in decided:
        at = [row["task"], network(row["net"])]
        for one in row["tried"]:
            star = "\\*" if one["used"] else ""
            cells.append([*at, one["setting"] + star, seconds(one["seconds"])])
            at = ["", ""]
    lines += _table(["task", "network", "tried", "took"], cells)
    return _with_commands(lines, decided)


def _trainings(rows: Iterable[Row], task: str | None) -> Iterable[list[Row]]:
    """Rows of `bench train` by training: a method is compared with the baselines of its own run,
    not with those of another's seeds."""
    trained = [row for row in sort(rows)["bench train"] if task in (None, row["task"])]
    return grouped(trained, "task", "ranks", "parameters", "task_options", "run").values()


def _of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    found = sort(rows)[kind]
    if not found:
        raise ConfigError(f"there are no rows of `gradwire {kind}`")
    return found


def _off(error: float) -> str:
    """By how much an expectation is off, bold if that is much."""
    told = percent(1 + error)
    return told if abs(error) <= predictions.TRUE else f"**{told}**"


def _beside(took: float | None, other: float | None) -> str:
    """Seconds, in brackets over another's."""
    if took is None:
        return DASH
    return seconds(took) + (f" ({took / other:.2f})" if other else "")


def _settled(run: Sequence[Row], decided: int) -> dict[str, float]:
    """Seconds of a step by method, of those with two evaluations since. Methods take turns: they
    share what else the machine did."""
    found = {}
    for (method,), mine in grouped([r for r in run if r["step"] >= decided], "method").items():
        steps = sorted(mine, key=lambda row: int(row["step"]))
        first, last = steps[0], steps[-1]
        if last["step"] > first["step"]:
            took = last["seconds"] - first["seconds"]
            found[str(method)] = took / (last["step"] - first["step"])
    return found


def _part(row: Row) -> str:
    cut = "" if row["cut"] is None else f" ({percent(1 - row['cut'])})"
    return seconds(row["synchronisation_seconds"]) + cut


def _about(rows: Sequence[Row]) -> str:
    summaries, _ = split(rows)
    first = summaries[0]
    said = f"Task `{first['task']}`, {first['ranks']} ranks"
    if first.get("parameters"):
        said += f", {first['parameters']:,} parameters"
    seeds = first.get("seeds") or ()
    if seeds:
        said += f", seeds {', '.join(map(str, seeds))}"
    return f"{said}, {length(summaries)}:"


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each network, slow ones first; those without summaries are left out."""
    runs = [mine for mine in grouped(rows, "net", "composed").values() if split(mine)[0]]
    return sorted(runs, key=lambda mine: rate(mine[0]["net"]))


def _full(summaries: Sequence[Row]) -> Row | None:
    return next((row for row in summaries if row["method"] == FULL), None)


def _grid(runs: Sequence[Sequence[Row]]) -> list[str]:
    """A line per method: its gain on each network, then what it learned, on the slowest."""
    gains = [of_summaries(*split(run)) for run in runs]
    heads = ["method", *(network(run[0]["net"]) for run in runs)]
    heads += ["last loss", "against fp32", "last metric"]
    summaries, _ = split(runs[0])
    cells = [
        [
            f"`{row['method']}`",
            *(_short(found.get(row["method"])) for found in gains),
            *_learned(row, _full(summaries)),
            digits(row["final_metric"], 4),
        ]
        for row in summaries
        if not row.get("timing_only")
    ]
    return [*_table(heads, cells), "", GAINS_LEGEND]


def _short(gain: Gain | None) -> str:
    if gain is None:
        return DASH
    if gain.standing is Standing.BAR:
        return "*1*"
    if gain.standing in (Standing.NOISE, Standing.UNJUDGED) and gain.ratio is not None:
        return times(gain.ratio)
    return _gain(gain)


def _lines(runs: Sequence[Sequence[Row]]) -> list[str]:
    """A line per network and method."""
    cells = []
    for run in runs:
        summaries, evaluations = split(run)
        gains = of_summaries(summaries, evaluations)
        net = network(run[0]["net"]) + (", composed" if run[0].get("composed") else "")
        for row in summaries:
            gain = gains[row["method"]]
            cells.append([net, f"`{row['method']}`", *_cells(row, gain, _full(summaries))])
            net = ""
    heads = ("network", "method", "step", "time to target", "gain", "last loss", "against fp32")
    return _table(heads, cells)


def _cells(row: Row, gain: Gain, full: Row | None) -> list[str]:
    step = seconds(row["step_seconds"])
    if row.get("timing_only"):
        return [step, "for timing only", *[DASH] * 3]
    return [step, learning.time_reached(row), _gain(gain), *_learned(row, full)]


def _learned(row: Row, full: Row | None) -> list[str]:
    """The last loss, and how it compares with fp32's."""
    if row["final_loss"] is None:
        return ["not finite", DASH]
    return [digits(row["final_loss"], 4), learning.loss_verdict(row, full)[1]]


def _gain(gain: Gain) -> str:
    """A gain bold, a loss named, all else with its verdict."""
    if gain.standing is Standing.GAIN and gain.ratio is not None:
        return f"**{times(gain.ratio)}**"
    if gain.standing is Standing.NEVER:
        return "loses"
    if gain.standing is Standing.LOSS and gain.ratio is not None:
        return f"{times(gain.ratio)}, loses"
    return gain.text if gain.ratio is None else f"{times(gain.ratio)}, {gain.standing.value}"


def _table(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *cells]
    return [f"| {' | '.join(one.replace('|', chr(92) + '|') for one in line)} |" for line in lines]


def _with_commands(lines: Iterable[str], rows: Sequence[Row]) -> str:
    """A table, and the commands behind its rows."""
    runs = [row["run"] for row in rows if isinstance(row.get("run"), dict)]
    made = [
        f"- `{run.get('command')}` at {run.get('commit') or 'no git checkout'}, "
        f"{run.get('machine')}"
        for run in runs
    ]
    return "\n".join([*lines, "", *dict.fromkeys(made)])


# (what it prints, from the rows, of which task)
_KINDS: dict[str, tuple[str, Callable[[Iterable[Row], str | None], str]]] = {
    "gains": ("methods x networks, gains alone", partial(tables, gains=True)),
    "best": ("the best methods by network", best),
    "steps": ("methods x networks, step times", steps),
    "choices": ("of the planner, by network", lambda rows, _: choices(rows)),
    "parts": ("of the ablation, by model", lambda rows, _: parts(rows)),
    "auto": ("of automatic mode, by network", auto),
}


def main(arguments: Sequence[str]) -> int:
    """Print the tables; 2 for bad input."""
    parser = argparse.ArgumentParser(description="README's table, from rows of benchmarks")
    parser.add_argument("files", nargs="*", type=Path, help="default: bench/results/*.jsonl")
    parser.add_argument("--task", help="only this task")
    kinds = parser.add_mutually_exclusive_group()
    for name, (about, _) in _KINDS.items():
        kinds.add_argument(f"--{name}", action="store_const", dest="kind", const=name, help=about)
    told = parser.parse_args(arguments)
    if told.task and told.kind in ("choices", "parts"):
        parser.error(f"--{told.kind} has rows of no task: leave --task out")
    made = _KINDS[told.kind][1] if told.kind else tables
    try:
        files = told.files or sorted(RESULTS.glob("*.jsonl"))
        print(made([row for file in files for row in read(file)], told.task))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
