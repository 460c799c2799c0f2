"""Prints a table of `gradwire bench train`'s rows in Markdown: methods x networks.

    python scripts/results_table.py                     # of bench/results/*.jsonl
    python scripts/results_table.py a.jsonl b.jsonl --task gpt

A table per task and number of ranks. Times to the target and gains are those of the report, by the
same rules: the gain is the time to the target of the best 16-bit baseline on the same network
divided by the method's, and nothing within noise is called a gain. Losses stand in the table as
gains do. The commands behind the rows follow each table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradwire.bench.baselines import FULL
from gradwire.bench.report import learning
from gradwire.bench.report.gain import Gain, Standing, of_summaries, times
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.quantities import DASH, digits, network, rate, seconds
from gradwire.bench.report.rows import grouped, read, sort
from gradwire.errors import ConfigError

RESULTS = Path(__file__).parents[1] / "bench" / "results"
HEADINGS = ("network", "method", "step", "time to target", "gain", "last loss", "against fp32")


def tables(rows: Iterable[Row], task: str | None = None) -> str:
    """The tables of all trainings among the rows.

    Raises:
        ConfigError: no row is a summary of `bench train`, or none is of this task.
    """
    trained = [row for row in sort(rows)["bench train"] if task in (None, row["task"])]
    made = []
    for mine in grouped(trained, "task", "ranks", "parameters", "task_options").values():
        lines = _lines(mine)
        if lines:
            made.append("\n".join([_about(mine), "", *lines, "", *_commands(mine)]))
    if not made:
        which = "" if task is None else f" of the task {task!r}"
        raise ConfigError(f"there are no summary rows of `gradwire bench train`{which}")
    return "\n\n".join(made)


def _about(rows: Sequence[Row]) -> str:
    first = next(row for row in rows if row["row"] == "summary")
    said = f"Task `{first['task']}`, {first['ranks']} ranks"
    if first.get("parameters"):
        said += f", {first['parameters']:,} parameters"
    seeds = first.get("seeds") or ()
    if seeds:
        said += f", seeds {', '.join(map(str, seeds))}"
    return f"{said}, {first['steps']} steps:"


def _lines(rows: Sequence[Row]) -> list[str]:
    """Of Markdown, of one table; none without summaries."""
    runs = [mine for mine in grouped(rows, "net", "composed").values() if _summaries(mine)]
    if not runs:
        return []
    lines = [_line(HEADINGS), _line(["---"] * len(HEADINGS))]
    for run in sorted(runs, key=lambda mine: rate(mine[0]["net"])):
        summaries = _summaries(run)
        gains = of_summaries(summaries, [row for row in run if row["row"] == "evaluation"])
        full = next((row for row in summaries if row["method"] == FULL), None)
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
    loss = "not finite" if row["final_loss"] is None else digits(row["final_loss"], 4)
    against = learning.loss_verdict(row, full)[0] if row["final_loss"] is not None else DASH
    return [*cells, seconds(row["time_to_target"]) if reached else missed, _gain(gain), loss,
            against]  # fmt: skip


def _gain(gain: Gain) -> str:
    """A gain bold, a loss named, all else with its verdict."""
    if gain.standing is Standing.GAIN and gain.ratio is not None:
        return f"**{times(gain.ratio)}**"
    if gain.standing is Standing.NEVER:
        return "loses"
    if gain.standing is Standing.LOSS and gain.ratio is not None:
        return f"{times(gain.ratio)}, loses"
    return gain.text


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _commands(rows: Sequence[Row]) -> list[str]:
    runs = [row["run"] for row in rows if isinstance(row.get("run"), dict)]
    made = [f"- `{run.get('command')}` at {run.get('commit')}, {run.get('machine')}"
            for run in runs]  # fmt: skip
    return list(dict.fromkeys(made))


def main(arguments: Sequence[str]) -> int:
    """Print the tables; 2 for bad input."""
    parser = argparse.ArgumentParser(description="README's table, from rows of benchmarks")
    parser.add_argument("files", nargs="*", type=Path, help="default: bench/results/*.jsonl")
    parser.add_argument("--task", help="only this task")
    told = parser.parse_args(arguments)
    try:
        files = told.files or sorted(RESULTS.glob("*.jsonl"))
        print(tables([row for file in files for row in read(file)], told.task))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
