"""The terminal output of `bench train`: progress bars during the run, and a table at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table

from gradwire_tools.bench.quantities import DASH, digits, percent, seconds, size, times
from gradwire_tools.bench.rows import Row
from gradwire_tools.bench.train import run
from gradwire_tools.bench.train.config import TrainConfig
from gradwire_tools.bench.train.rows import Baselines, length

_BETWEEN_LINES_S = 5.0


def watch(
    config: TrainConfig, console: Console, folder: Path | None = None, resume: bool = False
) -> Iterator[Row]:
    """The rows of `run`, with the progress of each method on `console`.

    If `console` is not a terminal, it gets a line per evaluation, and every few seconds one of the
    steps where rows come only at the end (`--compose`).
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[seconds]:.1f} s"),
        TextColumn("[bold]loss {task.fields[loss]}"),
    )
    terminal = console.is_terminal
    with Progress(*columns, console=console, disable=not terminal) as bars:
        shown, last_line = "", 0.0
        bar_of: dict[str, TaskID] = {}  # of each method; a new phase has bars of its own

        def begin(phase: str) -> None:
            nonlocal shown
            for bar in bar_of.values():
                bars.remove_task(bar)
            shown, total = phase, config.steps * len(config.seeds)
            prefix = "" if phase == "training" else f"{phase}: "
            for name in config.methods:
                bar_of[name] = bars.add_task(prefix + name, total=total, seconds=0.0, loss=DASH)

        def moved(at: Row) -> None:
            nonlocal last_line
            if at["phase"] != shown:
                begin(at["phase"])
            seeds = config.seeds[: 1 if at["phase"].startswith("timing") else None]
            done = seeds.index(at["seed"]) * at["steps"] + at["step"]
            bars.update(
                bar_of[at["method"]], seconds=at["seconds"], completed=done,
                total=at["steps"] * len(seeds),
            )  # fmt: skip
            if config.nets and not terminal and time.monotonic() - last_line >= _BETWEEN_LINES_S:
                last_line = time.monotonic()
                say("{phase}: {method}, seed {seed}, step {step} of {steps}".format(**at))

        def say(text: str, style: str | None = None) -> None:
            console.print(text, style=style, highlight=False, soft_wrap=True)

        begin("training")
        announce = partial(say, style="dim")
        for row in run.run(config, moved, announce, folder, resume):
            if row["row"] == "evaluation" and not config.nets:
                done = row["step"] if len(config.seeds) == 1 else None
                loss, bar = digits(row["loss"], 4), bar_of[row["method"]]
                bars.update(bar, seconds=row["seconds"], completed=done, loss=loss)
                if not terminal:
                    at = f"{row['method']:>20}  seed {row['seed']}  step {row['step']:>4}"
                    console.print(f"{at}  {row['seconds']:7.1f} s  loss {loss}", highlight=False)
            yield row


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table of the summary rows of each network, and one of the validation rows."""
    summaries = [row for row in rows if row["row"] == "summary"]
    nets = dict.fromkeys(row["net"] for row in summaries)
    found = [table([row for row in summaries if row["net"] == net]) for net in nets]
    compared = [row for row in rows if row["row"] == "validation"]
    return found + ([_validation(compared)] if compared else [])


def _validation(rows: Sequence[Row]) -> Table:
    made = _empty("composed against whole runs", ["composed", "whole", "error"], Column("net"))
    for row in rows:
        error = DASH if row["error"] is None else f"{row['error']:+.1%}".replace("%", " %")
        times = seconds(row["composed_seconds"]), seconds(row["whole_seconds"])
        made.add_row(row["net"], row["method"], *times, error)
    return made


def _empty(title: str, headings: Sequence[str], *before: Column, caption: str = "") -> Table:
    """A table without rows, with a column of methods before those of these headings."""
    method = Column("method", style="bold", overflow="fold")
    others = (Column(one, justify="right", no_wrap=True) for one in headings)
    layout: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    return Table(*before, method, *others, title=title, caption=caption or None, **layout)


def table(summaries: Sequence[Row]) -> Table:
    """A table of summary rows.

    Its columns: median step time, time of a step without communication, how many times faster a
    step is than the 16-bit baseline's, total bytes sent by a rank, last validation loss, that loss
    relative to fp32's, and time to the target loss.
    """
    first = summaries[0]
    by_method = {row["method"]: row for row in summaries}
    baselines = Baselines.of(first.get("sharded", False))
    full = by_method.get(baselines.full)
    sixteen_bit = baselines.best(summaries, "step_seconds")
    network = "loopback" if first["net"] == "none" else first["net"]
    told = "as given"
    if " at " in (first["target_from"] or ""):
        told = f"the loss of {first['target_from']}"
    elif first["target_from"] != "given":
        told = f"the last loss of {first['target_from']}, with the tolerance"
    caption = f"target loss {digits(first['target'], 4)}: {told}"
    if "device" in first:
        caption = "ranks share the GPU: losses and bytes, no times"
    faster = f"faster\nthan\n{'16 bit' if first.get('sharded') else 'fp16'}"
    headings = ["step", "compute", faster, "sent", "loss", "against\nfp32", "time to\ntarget"]
    made = _empty(  # it fits into 80 columns
        f"{first['task']}, {first['ranks']} ranks, {network}, {length(summaries)}"
        + (", composed" if first.get("composed") else ""),
        headings,
        caption=caption,
    )
    for row in summaries:
        reached = row["time_to_target"]
        target = "not met" if reached is None else seconds(reached) if reached else "untrained"
        if row["target"] is None:
            target = DASH
        made.add_row(
            row["method"],
            seconds(row["step_seconds"]),
            seconds(row["ideal_step_seconds"]),
            _beside(row, sixteen_bit, "step_seconds", lambda mine, bar: times(bar / mine)),
            size(row["wire_bytes"]),
            digits(row["final_loss"], 4),
            _beside(row, full, "final_loss", lambda mine, bar: percent(mine / bar)),
            "timing only" if row.get("timing_only") else target,
        )
    return made


def _beside(row: Row, baseline: Row | None, key: str, said: Callable[[float, float], str]) -> str:
    """What is `said` of `key` in `row` and in `baseline`, where both have it."""
    mine, bar = row[key], baseline and baseline[key]
    return said(mine, bar) if mine and bar else DASH
