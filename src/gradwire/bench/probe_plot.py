"""The plot of `gradwire probe --plot`: the links, a message's time by its size, and the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # no display is needed, whatever the user's settings say

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]

_VALUES = (1e4, 1e5, 1e6, 1e7)


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the rows of bench.probe."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    (alpha, beta), (send, kernels) = figure.subplots(2, 2)
    pairs = [row for row in rows if row["part"] == "pair"]
    _matrix(alpha, pairs, "alpha", 1e3, "latency (ms)")
    _matrix(beta, pairs, "bandwidth", 1e-6, "bandwidth (Mbit/s)")
    _sends(send, rows, pairs)
    _kernels(kernels, [row for row in rows if row["part"] == "curve"])
    figure.suptitle(f"{rows[0]['ranks']} ranks, net {rows[0]['net']}")
    figure.savefig(file, dpi=150)


def _matrix(axes: Axes, pairs: Sequence[Row], key: str, unit: float, title: str) -> None:
    ranks = 1 + max(row["to"] for row in pairs)
    values = [[float("nan")] * ranks for _ in range(ranks)]
    for row in pairs:
        values[row["from"]][row["to"]] = unit * row[key]
    image = axes.imshow(values, cmap="viridis")
    if ranks <= 8:
        for row in pairs:
            text = f"{unit * row[key]:.3g}"
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
            axes.text(row["to"], row["from"], text, ha="center", va="center", bbox=box)
    axes.figure.colorbar(image, ax=axes)
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(ranks))
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title(title)


def _sends(axes: Axes, rows: Sequence[Row], pairs: Sequence[Row]) -> None:
    sends = [row for row in rows if row["part"] == "send"]
    sizes = [row["bytes"] for row in sends]
    axes.loglog(sizes, [row["seconds"] for row in sends], "o", label="measured")
    link = next(row for row in pairs if (row["from"], row["to"]) == (0, 1))
    line = [link["alpha"] + size * link["beta"] for size in sizes]
    axes.loglog(sizes, line, "-", label="alpha + bytes beta")
    axes.set_xlabel("bytes from rank 0 to rank 1")
    axes.set_ylabel("seconds")
    axes.legend()
    axes.grid(alpha=0.3)


def _kernels(axes: Axes, curves: Sequence[Row]) -> None:
    shown = [row for row in curves if row["form"] in ("encode", "decode")]
    for number, name in enumerate(dict.fromkeys(row["codec"] for row in shown)):
        for row in shown:
            if row["codec"] == name:
                style = "-" if row["form"] == "encode" else "--"
                seconds = [row["call"] + values * row["value"] for values in _VALUES]
                label = f"{name}, {row['form']}"
                axes.loglog(_VALUES, seconds, style, color=f"C{number % 10}", label=label)
    axes.set_xlabel("values")
    axes.set_ylabel("seconds")
    if shown:
        axes.legend()
    axes.grid(alpha=0.3)
