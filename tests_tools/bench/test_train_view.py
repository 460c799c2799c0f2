"""The terminal output of a run: the table, and lines without a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from gradwire_tools.bench.train import run, view
from gradwire_tools.bench.train.config import TrainConfig


def rows() -> list[dict[str, Any]]:
    common = {"task": "gpt", "net": "none", "ranks": 2, "method": "torch-fp32"}
    at = {"seed": 0, "step": 10, "seconds": 1.5, "loss": 3.14159}
    summary = {
        **common, "row": "summary", "steps": 10, "target": 3.17, "target_from": "torch-fp32",
        "time_to_target": None, "final_loss": 3.14159, "step_seconds": 0.15,
        "ideal_step_seconds": 0.1, "wire_bytes": 1000,
    }  # fmt: skip
    return [{**common, "row": "evaluation", **at}, summary]


def test_watching_passes_every_row_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(
        config: TrainConfig, progress: Any, announce: Any, state: Any, resume: bool
    ) -> Iterator[dict[str, Any]]:
        announce("two nodes")
        at = {"phase": "training", "method": "torch-fp32", "seed": 0, "step": 5, "steps": 10}
        progress({**at, "seconds": 0.7})
        yield from rows()

    monkeypatch.setattr(run, "run", made_up)
    config = TrainConfig(methods=("torch-fp32",), steps=10)
    for terminal in (False, True):
        screen = io.StringIO()
        console = Console(file=screen, width=120, force_terminal=terminal)
        assert list(view.watch(config, console)) == rows()
        assert "two nodes" in screen.getvalue()
        assert "3.142" in screen.getvalue()
        assert ("step   10" in screen.getvalue()) == (not terminal)


def test_the_table_has_what_matters() -> None:
    screen = io.StringIO()
    summary = rows()[1]
    faster = {**summary, "method": "torch-fp16-hook", "step_seconds": 0.1, "time_to_target": 1.0}
    ours = {**summary, "method": "gradwire-qsgd4", "step_seconds": 0.04, "final_loss": 3.173}
    made = view.table([summary, faster, ours])
    Console(file=screen, width=80).print(made)
    text = screen.getvalue()
    for expected in ("150 ms", "0.40×", "+1.00 %", "not met", "target loss 3.170", "loopback"):
        assert expected in text
    for method in ("torch-fp32", "torch-fp16-hook", "gradwire-qsgd4"):
        assert method in text  # the table fits into 80 columns
