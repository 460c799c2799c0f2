"""Prints a table of `gradwire bench train`'s rows in Markdown: methods x networks.

    python scripts/results_table.py                     # of bench/results/*.jsonl
    python scripts/results_table.py a.jsonl b.jsonl --task gpt
    python scripts/results_table.py a.jsonl --gains     # a line per method, a column per network
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
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradwire.bench.baselines import FULL, Baselines
from gradwire.bench.report import learning, planning
from gradwire.bench.report.gain import Gain, Standing, of_summaries
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lengths import length
from gradwire.bench.report.quantities import (
    DASH,
    digits,
    network,
    percent,
    rate,
    seconds,
    size,
    times,
)
from gradwire.bench.report.rows import grouped, read, sort
from gradwire.errors import ConfigError

RESULTS = Path(__file__).parents[1] / "bench" / "results"
GAINS_LEGEND = (
    "A number is the gain. Bold: faster than the best 16-bit baseline (*1*); plain: within noise, "
    "or too few seeds to judge."
)
NO_COMMIT = "no git checkout"
HEADINGS = ("network", "method", "step", "time to target", "gain", "last loss", "against fp32")


def tables(rows: Iterable[Row], task: str | None = None, gains: bool = False) -> str:
    """The tables of all trainings among the rows; with `gains`, those of methods x networks.

    Raises:
        ConfigError: no row is a summary of `bench train`, or none is of this task.
    """
    trained = [row for row in sort(rows)["bench train"] if task in (None, row["task"])]
    made = []
    # A method is compared with the baselines of its own run, not with those of another's seeds.
    for mine in grouped(trained, "task", "ranks", "parameters", "task_options", "run").values():
        lines = _grid(mine) if gains else _lines(mine)
        if lines:
            made.append("\n".join([_about(mine), "", *lines, "", *_commands(mine)]))
    if not made:
        which = "" if task is None else f" of the task {task!r}"
        raise ConfigError(f"there are no summary rows of `gradwire bench train`{which}")
    return "\n\n".join(made)


def steps(rows: Iterable[Row], task: str | None = None) -> str:
    """A table of medians of steps, methods x networks, in brackets over that of the best 16-bit
    baseline on the network. Unlike gains they may come from several runs of the same training.

    Raises:
        ConfigError: no row is a summary of `bench train`, or none is of this task.
    """
    trained = [row for row in sort(rows)["bench train"] if task in (None, row["task"])]
    runs = _runs(trained)
    if not runs:
        raise ConfigError("there are no summary rows of `gradwire bench train`")
    bars = [Baselines.of_rows(run).best(_summaries(run), "step_seconds") for run in runs]
    heads = ["method", "sent per step", *(network(run[0]["net"]) for run in runs)]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for first in _summaries(runs[0]):
        cells = [f"`{first['method']}`", size(first.get("wire_bytes_per_step"))]
        for run, bar in zip(runs, bars, strict=True):
            mine = next((r for r in _summaries(run) if r["method"] == first["method"]), None)
            cells.append(DASH if mine is None else _step(mine, bar))
        lines.append(_line(cells))
    return "\n".join([*lines, "", *_commands(trained)])


def _step(row: Row, bar: Row | None) -> str:
    over = "" if bar is None else f" ({row['step_seconds'] / bar['step_seconds']:.2f})"
    return seconds(row["step_seconds"]) + over


def choices(rows: Iterable[Row]) -> str:
    """A table of the rows of `bench planner`.

    Raises:
        ConfigError: there are none.
    """
    found = sort(rows)["bench planner"]
    if not found:
        raise ConfigError("there are no rows of `gradwire bench planner`")
    heads = ["network", "gradient", "choice", "took", "expected", "off by", "fastest", "ratio"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for (net,), mine in grouped(found, "net").items():
        named = network(str(net))
        for row in mine:
            off = percent(1 + row["error"])
            cells = [named, size(row["nbytes"]), f"`{row['method']}` by {row['algorithm']}"]
            cells += [seconds(row["seconds"]), seconds(row["expected_seconds"])]
            cells += [off if abs(row["error"]) <= planning.TRUE else f"**{off}**"]
            cells += [f"`{row['best_method'].removeprefix('gradwire:')}`", times(row["ratio"])]
            lines.append(_line(cells))
            named = ""
    return "\n".join([*lines, "", *_commands(found)])


def parts(rows: Iterable[Row]) -> str:
    """A table of the rows of `bench ablation`: parts x models, in the lab and in the simulator.

    Raises:
        ConfigError: there are none.
    """
    found = sort(rows)["bench ablation"]
    if not found:
        raise ConfigError("there are no rows of `gradwire bench ablation`")
    columns = grouped(found, "model", "net", "ranks", "where")
    heads = ["part", *(f"{model}, {net}, {ranks} ranks, {where}"
                       for model, net, ranks, where in columns)]  # fmt: skip
    lines = [_line(heads), _line(["---"] * len(heads))]
    for part in dict.fromkeys(row["part"] for row in found):
        mine = [next((r for r in of if r["part"] == part), None) for of in columns.values()]
        lines.append(_line([part, *(DASH if row is None else _part(row) for row in mine)]))
    return "\n".join([*lines, "", *_commands(found)])


def auto(rows: Iterable[Row], task: str | None = None) -> str:
    """Two tables of automatic mode in `bench train`. Methods x networks: means of steps after the
    first evaluation that follows its last decision, in brackets over those of the fastest of
    torch's own methods. And what it tried: what a pass took and what was expected; a star marks
    what it then used.

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
    scores = [row for row in kinds["bench train"] if row["row"] == "evaluation"]
    runs = grouped(scores, *of_run)
    columns = []
    for place, (*_, last) in grouped(decided, *of_run).items():
        columns.append((last, _settled(runs.get(place, []), last["step"])))
    heads = ["method", *(f"{row['task']}, {network(row['net'])}" for row, _ in columns)]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for method in dict.fromkeys(name for _, of in columns for name in of):
        cells = [_beside_torch(method, of) for _, of in columns]
        lines.append(_line([f"`{method}`", *cells]))
    heads = ["task", "network", "tried", "took", "expected", "off by"]
    lines += ["", _line(heads), _line(["---"] * len(heads))]
    for row in decided:
        at = [row["task"], network(row["net"])]
        for one in row["tried"]:
            cells = [*at, one["setting"] + ("\\*" if one["used"] else ""), seconds(one["seconds"])]
            lines.append(_line([*cells, *_expected(one)]))
            at = ["", ""]
    return "\n".join([*lines, "", *_commands(decided)])


def _expected(tried: Row) -> list[str]:
    """What a setting was expected to take, and by how much that is off."""
    expected = tried.get("expected_seconds")
    if expected is None:
        return [DASH, DASH]
    off = percent(expected / tried["seconds"])
    true = abs(expected / tried["seconds"] - 1) <= planning.TRUE
    return [seconds(expected), off if true else f"**{off}**"]


def _beside_torch(method: str, steps: dict[str, float]) -> str:
    if method not in steps:
        return DASH
    torch = [took for name, took in steps.items() if name.startswith("torch-")]
    over = f" ({steps[method] / min(torch):.2f})" if torch else ""
    return seconds(steps[method]) + over


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
    first = next(row for row in rows if row["row"] == "summary")
    said = f"Task `{first['task']}`, {first['ranks']} ranks"
    if first.get("parameters"):
        said += f", {first['parameters']:,} parameters"
    seeds = first.get("seeds") or ()
    if seeds:
        said += f", seeds {', '.join(map(str, seeds))}"
    return f"{said}, {length(_summaries(rows))}:"


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each network, slow ones first; those without summaries are left out."""
    runs = [mine for mine in grouped(rows, "net", "composed").values() if _summaries(mine)]
    return sorted(runs, key=lambda mine: rate(mine[0]["net"]))


def _gains(run: Sequence[Row]) -> dict[str, Gain]:
    return of_summaries(_summaries(run), [row for row in run if row["row"] == "evaluation"])


def _full(run: Sequence[Row]) -> Row | None:
    return next((row for row in _summaries(run) if row["method"] == FULL), None)


def _grid(rows: Sequence[Row]) -> list[str]:
    """A line per method: its gain on each network, then what it learned, on the slowest."""
    runs = _runs(rows)
    if not runs:
        return []
    gains = [_gains(run) for run in runs]
    heads = ["method", *(network(run[0]["net"]) for run in runs)]
    heads += ["last loss", "against fp32", "last metric"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in _summaries(runs[0]):
        if not row.get("timing_only"):
            mine = [_short(found.get(row["method"])) for found in gains]
            known = row["final_metric"] is not None
            metric = digits(row["final_metric"], 4) if known else DASH
            lines.append(
                _line([f"`{row['method']}`", *mine, *_learned(row, _full(runs[0])), metric])
            )
    return [*lines, "", GAINS_LEGEND]


def _short(gain: Gain | None) -> str:
    if gain is None:
        return DASH
    if gain.standing is Standing.BAR:
        return "*1*"
    if gain.standing in (Standing.NOISE, Standing.UNJUDGED) and gain.ratio is not None:
        return times(gain.ratio)
    return _gain(gain)


def _lines(rows: Sequence[Row]) -> list[str]:
    """Of Markdown, of one table; none without summaries."""
    runs = _runs(rows)
    if not runs:
        return []
    lines = [_line(HEADINGS), _line(["---"] * len(HEADINGS))]
    for run in runs:
        summaries, gains, full = _summaries(run), _gains(run), _full(run)
        net = network(run[0]["net"]) + (", composed" if run[0].get("composed") else "")
        for row in summaries:
            lines.append(_line(_cells(net, row, gains[row["method"]], full)))
            net = ""
    return lines


def _summaries(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["row"] == "summary"]


def _cells(net: str, row: Row, gain: Gain, full: Row | None) -> list[str]:
    cells = [net, f"`{row['method']}`", seconds(row["step_seconds"])]
    if row.get("timing_only"):
        return [*cells, "for timing only", *[DASH] * 3]
    reached = row["time_to_target"] is not None
    missed = "not reached" if row["target"] is not None else DASH
    time = seconds(row["time_to_target"]) if reached else missed
    return [*cells, time, _gain(gain), *_learned(row, full)]


def _learned(row: Row, full: Row | None) -> list[str]:
    """The last loss, and how it compares with fp32's."""
    if row["final_loss"] is None:
        return ["not finite", DASH]
    return [digits(row["final_loss"], 4), learning.loss_verdict(row, full)[0]]


def _gain(gain: Gain) -> str:
    """A gain bold, a loss named, all else with its verdict."""
    if gain.standing is Standing.GAIN and gain.ratio is not None:
        return f"**{times(gain.ratio)}**"
    if gain.standing is Standing.NEVER:
        return "loses"
    if gain.standing is Standing.LOSS and gain.ratio is not None:
        return f"{times(gain.ratio)}, loses"
    return gain.text if gain.ratio is None else f"{times(gain.ratio)}, {gain.standing.value}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _commands(rows: Sequence[Row]) -> list[str]:
    runs = [row["run"] for row in rows if isinstance(row.get("run"), dict)]
    made = [
        f"- `{run.get('command')}` at {run.get('commit') or NO_COMMIT}, {run.get('machine')}"
        for run in runs
    ]
    return list(dict.fromkeys(made))


def main(arguments: Sequence[str]) -> int:
    """Print the tables; 2 for bad input."""
    parser = argparse.ArgumentParser(description="README's table, from rows of benchmarks")
    parser.add_argument("files", nargs="*", type=Path, help="default: bench/results/*.jsonl")
    parser.add_argument("--task", help="only this task")
    parser.add_argument("--gains", action="store_true", help="methods x networks, gains alone")
    parser.add_argument("--steps", action="store_true", help="methods x networks, step times")
    parser.add_argument("--choices", action="store_true", help="of the planner, by network")
    parser.add_argument("--parts", action="store_true", help="of the ablation, by model")
    parser.add_argument("--auto", action="store_true", help="of automatic mode, by network")
    told = parser.parse_args(arguments)
    try:
        files = told.files or sorted(RESULTS.glob("*.jsonl"))
        rows = [row for file in files for row in read(file)]
        if told.choices or told.parts:
            print(choices(rows) if told.choices else parts(rows))
        elif told.steps or told.auto:
            print((steps if told.steps else auto)(rows, told.task))
        else:
            print(tables(rows, told.task, told.gains))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
