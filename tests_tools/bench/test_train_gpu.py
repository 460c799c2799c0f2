"""`bench train --device cuda` where there is no GPU: the commands that `make gpu-check` names, with
a tiny model on the CPU, paused and continued; and what rows of ranks that share a GPU lack."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_runs import OPTIONS, TINY, keys_of, trained, without_times

from command_line import run
from gradwire_tools.bench.train import view
from gradwire_tools.bench.train.rows import summaries
from gradwire_tools.cli.program import FAILED, OK
from gradwire_tools.report import page

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
NEXT = runpy.run_path(str(ROOT / "scripts" / "gpu_check.py"))["NEXT"]
PAGE = (ROOT / "docs" / "laboratory" / "benchmarks.md").read_text()
# Of an option that is given twice the last one counts.
SMALL = ["--task", "gpt", "--device", "cpu", "--nodes", "2", "--steps", "20"]
SMALL += [f"--task-option={name}={value}" for name, value in OPTIONS.items()]


@pytest.mark.parametrize("words", NEXT, ids=["DDP", "sharded"])
def test_a_paused_command_ends_with_the_same_rows(tmp_path: Path, words: str) -> None:
    def train(name: str, pause: str) -> tuple[int, str, list[dict[str, Any]]]:
        file = tmp_path / name
        more = [*SMALL, "--pause", pause, "--json", str(file)]
        ran = run("bench", "train", *words.split(), *more)
        return ran.code, ran.err, [json.loads(line) for line in file.read_text().splitlines()]

    assert f"gradwire bench train {words}\n" in PAGE
    code, said, expected = train("whole", "1000")
    assert code == OK, said
    for step in (10, 20):
        code, said, rows = train("paused", "0")
        assert code == FAILED
        assert re.search(r"paused after \d+ s; the same command with --resume goes on\n$", said)
        assert rows[-1]["step"] == step
    code, said, rows = train("paused", "1000")  # how long is no part of what a run is
    assert code == OK, said
    assert without_times(rows) == without_times(expected)


def test_rows_of_a_shared_gpu_have_no_times() -> None:
    """Made of rows of the CPU: nothing else of a row depends on where its run was."""
    config = replace(TINY, methods=("torch-fp32", "torch-fp16-hook"), steps=4)
    found, shared = trained(config), replace(config, device="cuda")
    told = [{**row, **shared.keys()} for row in found.evaluations]
    numbers = [key for key in next(iter(found.summaries.values())) if "step_seconds" in key]
    numbers += ["timed_steps", "timed_bytes", "kernel_seconds", "exposed_seconds"]
    ended = {**dict.fromkeys(numbers, 1.0), "step_seconds_quartiles": [1.0, 2.0]}
    ended |= {"mean_ratio": None, "plan_changes": None, "seed": 0}
    rows = list(summaries(shared, told, [{**ended, "method": name} for name in config.methods]))
    for row in rows:
        before = found.summaries[row["method"]]
        assert keys_of(row) >= row.keys() == (before.keys() - {"run"}) | {"device"}
        of_time = {k for k in row if "seconds" in k or k.startswith(("t", "utility"))}
        of_time -= {"task", "task_options", "timing_only"}
        assert {key: row[key] for key in of_time} == dict.fromkeys(of_time)
        others = row.keys() - of_time - {"device"}
        assert {key: row[key] for key in others} == {key: before[key] for key in others}
    assert "no times" in str(view.table(rows).caption)
    shown = page.render([{**row, "run": found.rows[0]["run"]} for row in (*told, *rows)])
    assert "times are left out" in shown
    assert "Does compression change what is learned?" in shown
    assert "How long" not in shown
