"""README's table: gains and losses by the report's rules, with the commands behind them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from report_rows import ABLATED, CHOSEN, DECISION, KERNEL, METHODS, RUN, TRIED, train_rows

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
        "- `gradwire bench train --seeds 0` at no git checkout, a machine",
    ]


def test_gains_have_a_line_per_method_and_a_column_per_network(made: Any) -> None:
    rows = [
        *train_rows("10gbit,1ms", step=2.0, losses=(3.0, 3.0, 3.0)),
        *train_rows("100mbit,1ms", step=0.1, losses=(3.0, 3.0, 3.0)),
    ]
    lines = made(rows, "--gains")[1].splitlines()
    head, _, full, half, ours = lines[2:7]
    assert head.startswith("| method | 100 Mbit/s, 1 ms latency | 10 Gbit/s, 1 ms latency | last")
    assert full.startswith("| `torch-fp32` | 0.500× | 0.500× | 3.000 | – | ")
    assert half.startswith("| `torch-fp16-hook` | *1* | *1* | 3.000 | 0.00 %, within noise | ")
    assert ours.startswith("| `gradwire-qsgd4` | **5.00×** | 0.250×, loses | 3.000 | 0.00 %")
    never = made(train_rows(losses=(3.5, 3.5, 3.6)), "--gains")[1]
    assert "| `gradwire-qsgd4` | loses | 3.533 | +17.78 %, higher |" in never
    out = made(train_rows(losses=(3.5, 3.5, 3.6)))[1]
    assert "| `gradwire-qsgd4` | 200 ms | not reached | loses | 3.533 | +17.78 %, higher |" in out
    # Nothing within noise and nothing of one seed is bold.
    assert "**" not in made(train_rows(step=0.47, losses=(3.0, 3.0, 3.0)))[1]
    assert "**" not in made(train_rows(step=0.1, losses=(3.0,)))[1]


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
    assert made([KERNEL], "--best")[0] == 2


def test_steps_of_several_runs_are_one_table(made: Any) -> None:
    def told(net: str, step: float) -> list[dict[str, Any]]:
        run = {**RUN, "command": f"gradwire bench train --net {net}"}
        return [{**row, "run": run} for row in train_rows(net, step=step, losses=(3.0,))]

    code, out, _ = made([*told("10gbit,1ms", 2.0), *told("100mbit,1ms", 0.1)], "--steps")
    assert code == 0
    head, _, full, half, ours, *rest = out.splitlines()
    slow, fast = "100 Mbit/s, 1 ms latency", "10 Gbit/s, 1 ms latency"
    assert head == f"| method | sent per step | {slow} | {fast} |"
    assert full.endswith("| 1.00 s (2.00) | 1.00 s (2.00) |")
    assert half.endswith("| 500 ms (1.00) | 500 ms (1.00) |")
    assert ours.endswith("| 100 ms (0.20) | 2.00 s (4.00) |")
    assert sum("gradwire bench train --net" in line for line in rest) == 2
    assert made([KERNEL], "--steps")[0] == 2


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
    code, out, err = made([KERNEL])
    assert (code, out) == (2, "")
    assert "no summary rows of `gradwire bench train`" in err
    assert "of the task 'image'" in made(train_rows(), "--task", "image")[2]
    for wrong in (["--best", "--gains"], ["--choices", "--task", "gpt"]):
        with pytest.raises(SystemExit, match="2"):
            made(train_rows(), *wrong)


def test_choices_and_parts_have_tables(made: Any) -> None:
    far = {**CHOSEN, "nbytes": 1 << 20, "error": 0.3, "run": RUN}
    code, out, _ = made([{**CHOSEN, "run": RUN}, far], "--choices")
    assert code == 0
    first, second = out.splitlines()[2:4]
    assert first == (
        "| 1 Gbit/s, 1 ms latency | 65.5 kB | `qsgd:bits=4` by sra | 10.0 ms | 9.00 ms | -10.00 % "
        "| `bf16` | 1.25× |"
    )
    assert second.startswith("|  | 1.05 MB |")
    assert "**+30.00 %**" in second
    parts = [{**ABLATED, "run": RUN}, {**ABLATED, "part": "kernels", "cut": 0.5, "run": RUN}]
    code, out, _ = made([*parts, {**parts[0], "where": "simulator"}], "--parts")
    assert code == 0
    assert out.splitlines()[2:4] == [
        "| none | 400 ms | 400 ms |",
        "| kernels | 400 ms (-50.00 %) | – |",
    ]
    assert made([KERNEL], "--parts")[0] == made([KERNEL], "--choices")[0] == 2


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
        "| gpt | 300 Mbit/s, 1 ms latency | qsgd by sra\\* | 100 ms | 110 ms | +10.00 % |",
        "|  |  | bf16 by sra | 12.0 s | – | – |",
    ]
    assert made([*rows, decided], "--auto")[0] == 2
