"""README's table: gains and losses by the report's rules, with the commands behind them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from report_rows import KERNEL, METHODS, train_rows

SCRIPT = Path(__file__).parents[2] / "scripts" / "results_table.py"


@pytest.fixture
def made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs the script on rows: (exit code, what it prints, what it complains of)."""
    spec = importlib.util.spec_from_file_location("results_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(rows: list[dict[str, Any]], *arguments: str) -> tuple[int, str, str]:
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        code = script.main([str(file), *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_networks_by_rate_with_gains_and_losses(made: Any) -> None:
    losses = (3.0, 3.0, 3.0)
    rows = [
        *train_rows("10gbit,1ms", step=2.0, losses=losses),
        *train_rows("100mbit,1ms", step=0.1, losses=losses),
        KERNEL,
    ]
    code, out, _ = made(rows)
    assert code == 0
    full = "`torch-fp32` | 1.00 s | 20.0 s | 0.500×, within noise | 3.000 | – |"
    half = "`torch-fp16-hook` | 500 ms | 10.0 s | 1.00×, the best 16-bit baseline | 3.000 | "
    same = "0.00 %, within noise |"
    assert out.splitlines() == [
        "Task `gpt`, 4 ranks, 10 parameters, seeds 0, 1, 2, 20 steps:",
        "",
        "| network | method | step | time to target | gain | last loss | against fp32 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| 100 Mbit/s, 1 ms latency | {full}",
        f"|  | {half}{same}",
        f"|  | `gradwire-qsgd4` | 100 ms | 2.00 s | **5.00×** | 3.000 | {same}",
        f"| 10 Gbit/s, 1 ms latency | {full}",
        f"|  | {half}{same}",
        f"|  | `gradwire-qsgd4` | 2.00 s | 40.0 s | 0.250×, loses | 3.000 | {same}",
        "",
        "- `gradwire bench train --seeds 0` at None, a machine",
    ]


def test_a_target_that_is_not_reached_loses(made: Any) -> None:
    out = made(train_rows(losses=(3.5, 3.5, 3.6)))[1]
    assert "| `gradwire-qsgd4` | 200 ms | not reached | loses | 3.533 | +17.78 %, higher |" in out


def test_nothing_within_noise_and_nothing_of_one_seed_is_bold(made: Any) -> None:
    assert "**" not in made(train_rows(step=0.47, losses=(3.0, 3.0, 3.0)))[1]
    assert "**" not in made(train_rows(step=0.1, losses=(3.0,)))[1]


def test_timing_only_and_not_finite_rows_are_named(made: Any) -> None:
    rows = train_rows()
    for row in rows:
        if row["row"] == "summary" and row["method"] == METHODS[2]:
            row["final_loss"] = row["time_to_target"] = None
            row["time_to_target_by_seed"] = [None]
        if row["row"] == "summary" and row["method"] == METHODS[0]:
            row["timing_only"] = True
    out = made(rows)[1]
    assert "| not reached | loses | not finite | – |" in out
    assert "| 1.00 s | for timing only | – | – | – |" in out


def test_rows_without_summaries_are_refused(made: Any) -> None:
    code, out, err = made([KERNEL])
    assert (code, out) == (2, "")
    assert "no summary rows of `gradwire bench train`" in err
    assert "of the task 'image'" in made(train_rows(), "--task", "image")[2]
