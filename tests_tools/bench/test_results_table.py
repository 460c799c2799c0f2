"""README's table: gains and losses by the report's rules, with the commands behind them.

What the tables of docs show of stored rows, tests_tools/docs/test_docs.py compares.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from report_rows import DECISION, KERNEL, METHODS, RUN, TRIED, train_rows

from gradwire_tools.report import learning

SCRIPT = Path(__file__).parents[2] / "scripts" / "results_table.py"


@pytest.fixture
def made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs the script on rows: (exit code, what it prints, what it complains of)."""
    main = runpy.run_path(str(SCRIPT))["main"]

    def run(rows: list[dict[str, Any]], *arguments: str) -> tuple[int, str, str]:
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        code = main([str(file), *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_what_is_not_judged_is_not_bold(made: Any) -> None:
    for rows in (train_rows(step=0.47, losses=(3.0,) * 3), train_rows(step=0.1, losses=(3.0,))):
        for form in ([], ["--gains"]):
            assert "**" not in made(rows, *form)[1]
    assert "**5.00×**" in made(train_rows(step=0.1, losses=(3.0,) * 3))[1]


def test_the_best_cost_no_accuracy_on_any_network(made: Any) -> None:
    def trained(
        net: str, method: str, metric: float, step: float, run: str = "first"
    ) -> list[dict[str, Any]]:
        found = []
        for row in train_rows(net, step=step, losses=(3.0,)):
            other = row["method"] == METHODS[2]
            renamed = {"method": method} if other else {}
            found.append({**row, **renamed, "final_metric": metric if other else 4.0})
        by = {**RUN, "command": f"{method} on {net}, {run}"}
        return [{**row, "run": by, "metric_name": "bits per byte"} for row in found]

    slow, fast = "100mbit,1ms", "10gbit,1ms"
    rows = [
        *trained(slow, "good", 4.039, 0.1), *trained(fast, "good", 3.9, 0.4),
        *trained(slow, "faster", 4.0, 0.05), *trained(fast, "faster", 4.041, 0.05),
        *trained(slow, "good", 4.02, 0.2, "again"),
    ]  # fmt: skip
    code, out, _ = made(rows, "--best")
    assert code == 0
    assert out.splitlines()[2:] == [
        "| 100 Mbit/s, 1 ms latency | `good` 5.00× (-1.0 %) |",
        "| 10 Gbit/s, 1 ms latency | `good` 1.25× (+2.5 %) |",
        "",
        "Highest gains: `good` 2.",
    ]
    accuracy = [{**row, "metric_name": "accuracy"} for row in trained(slow, "good", 3.9, 0.1)]
    assert "good" not in made(accuracy, "--best")[1]


def test_a_target_that_the_untrained_model_meets_is_named(made: Any) -> None:
    rows = train_rows()
    for row in rows:
        if row["row"] == "summary":
            row["time_to_target"], row["time_to_target_by_seed"] = 0.0, [0.0]
    assert made(rows)[1].count("| before training | – |") == len(METHODS)
    said = learning.time_to_loss([], [row for row in rows if row["row"] == "summary"]).answers[0]
    assert "which the untrained model meets, so times to it say nothing" in said


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


def test_each_command_has_its_own_table_and_baselines(made: Any) -> None:
    def told(rows: list[dict[str, Any]], command: str) -> list[dict[str, Any]]:
        return [{**row, "run": {**row["run"], "command": command}} for row in rows]

    rows = [*told(train_rows(step=0.1), "first"), *told(train_rows(step=2.0), "second")]
    first, second = (made(told(train_rows(step=step), name))[1] for step, name in
                     ((0.1, "first"), (2.0, "second")))  # fmt: skip
    assert made(rows)[1] == f"{first}\n{second}"
    later = {**RUN, "date": "2026-01-02T00:00:00+00:00"}
    rows = [*train_rows(step=0.1), *({**row, "run": later} for row in train_rows(step=2.0))]
    assert made(rows)[1].count("Task `gpt`") == 2


def test_rows_without_summaries_are_refused(made: Any) -> None:
    for form in (["--best"], ["--steps"], ["--parts"], ["--choices"], ["--auto"], []):
        code, out, err = made([KERNEL], *form)
        assert (code, out) == (2, "")
    assert "no summary rows of `gradwire bench train`" in err
    assert "of the task 'image'" in made(train_rows(), "--task", "image")[2]
    for wrong in (["--best", "--gains"], ["--choices", "--task", "gpt"]):
        with pytest.raises(SystemExit, match="2"):
            made(train_rows(), *wrong)


def test_automatic_mode_has_its_tables(made: Any) -> None:
    """Steps after its last decision; of a method that ended before, none are known."""
    rows = [
        {**row, "method": "auto"} if row["method"] == METHODS[2] else row
        for row in train_rows(step=0.1)
        if row["row"] == "evaluation" and (row["method"], row["step"]) != (METHODS[1], 20)
    ]
    decided = {**DECISION, "seed": 0, "run": RUN}
    last = {**decided, "step": 10, "tried": TRIED}
    code, out, _ = made([*rows, decided, {**last, "step": 5}, last], "--auto")
    assert code == 0
    of_net = "gpt, 300 Mbit/s, 1 ms latency"
    assert out.splitlines()[:5] == [
        f"| method | {of_net} |",
        "| --- | --- |",
        "| `torch-fp32` | 1.00 s (1.00) |",
        "| `auto` | 100 ms (0.10) |",
        "",
    ]
    assert out.splitlines()[7:9] == [
        "| gpt | 300 Mbit/s, 1 ms latency | qsgd by sra\\* | 100 ms |",
        "|  |  | bf16 by sra | 12.0 s |",
    ]
    assert made([*rows, decided], "--auto")[0] == 2
