"""The terminal output of `bench train`: progress bars during the run, and a table at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from gradwire.bench import train
from gradwire.bench.baselines import FULL, SIXTEEN_BIT
from gradwire.bench.report.quantities import digits, seconds, size
from gradwire.bench.train_config import TrainConfig

Row = dict[str, Any]


def watch(config: TrainConfig, console: Console) -> Iterator[Row]:
    """The rows of `train.run`, with the progress of each method on `console`.

    If `console` is not a terminal, it gets a line per evaluation instead of bars.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[seconds]:.1f} s"),
        TextColumn("[bold]loss {task.fields[loss]}"),
    )
    total = config.steps * len(config.seeds)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        ids: dict[str, TaskID] = {
            name: bars.add_task(name, total=total, seconds=0.0, loss="–") for name in config.methods
        }

        def moved(at: train.Progress) -> None:
            before = config.seeds.index(at.seed) * at.steps
            bars.update(
                ids[at.method],
                completed=before + at.step,
                total=at.steps * len(config.seeds),
                seconds=at.seconds,
            )

        def announce(text: str) -> None:
            console.print(text, style="dim", highlight=False, soft_wrap=True)

        for row in train.run(config, moved, announce):
            if row["row"] == "evaluation":
                loss = digits(row["loss"], 4)
                done = config.seeds.index(row["seed"]) * config.steps + row["step"]
                if console.is_terminal:
                    bars.update(ids[row["method"]], loss=loss, seconds=row["seconds"])
                    if len(config.seeds) == 1:
                        bars.update(ids[row["method"]], completed=done)
                else:
                    console.print(
                        f"{row['method']:>20}  seed {row['seed']}  step {row['step']:>4}  "
                        f"{row['seconds']:7.1f} s  loss {loss}",
                        highlight=False,
                    )
            yield row


def table(summaries: Sequence[Row]) -> Table:
    """A table of summary rows with equal numbers of steps.

    Its columns: median step time, time of a step without communication, step time relative to the
    fp16 hook's, total bytes sent by a rank, last validation loss, that loss relative to fp32's, and
    time to the target loss.
    """
    first = summaries[0]
    by_method = {row["method"]: row for row in summaries}
    network = "loopback" if first["net"] == "none" else first["net"]
    origin = "as given"
    if first["target_from"] != "given":
        origin = f"the last loss of {first['target_from']}, with the tolerance"
    made = Table(
        title=f"{first['task']}, {first['ranks']} ranks, {network}, {first['steps']} steps",
        caption=f"target loss {digits(first['target'], 4)}: {origin}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    made.add_column("method", style="bold", overflow="fold")
    headings = ["step", "compute", "of fp16", "sent", "loss", "against\nfp32", "time to\ntarget"]
    for heading in headings:  # with "method", the table fits into 80 columns
        made.add_column(heading, justify="right", no_wrap=True)
    for row in summaries:
        reached = row["time_to_target"]
        made.add_row(
            row["method"],
            seconds(row["step_seconds"]),
            seconds(row["ideal_step_seconds"]),
            _share(row, by_method.get(SIXTEEN_BIT), "step_seconds", "{:.2f}×"),
            size(row["wire_bytes"]),
            digits(row["final_loss"], 4),
            _share(row, by_method.get(FULL), "final_loss", "{:+.2f} %"),
            "not met" if reached is None else seconds(reached),
        )
    return made


def _share(row: Row, baseline: Row | None, key: str, form: str) -> str:
    """`row` relative to `baseline`, as a factor or as a difference in percent."""
    if baseline is None or row[key] is None or not baseline[key]:
        return "–"
    ratio = row[key] / baseline[key]
    return form.format((ratio - 1) * 100 if "%" in form else ratio)
