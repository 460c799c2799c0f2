"""`gradwire report --table`: gains and losses by the report's rules, with the commands behind them.

What the tables of docs show of stored rows, tests_tools/docs/test_docs.py compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_rows import DECISION, KERNEL, METHODS, RUN, TRIED, scaled, sharded_rows, train_rows

from command_line import refusal, run
from gradwire_tools.report import learning, training

Rows = list[dict[str, Any]]
Made = Callable[..., str]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """What the command prints of rows; or its complaint."""

    def of(rows: Rows, *options: str, refused: bool = False) -> str:
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        words = ["report", str(file), "--table", *options]
        if refused:
            complaint, fault = refusal(*words)
            assert not fault
            return complaint
        ran = run(*words)
        assert (ran.code, ran.err) == (0, "")
        return ran.out

    return of


def test_what_is_not_judged_is_not_bold(made: Made) -> None:
    for rows in (train_rows(step=0.47, losses=(3.0,) * 3), train_rows(step=0.1, losses=(3.0,))):
        for form in ([], ["--gains"]):
            assert "**" not in made(rows, *form)
    assert "**5.00×**" in made(train_rows(step=0.1, losses=(3.0,) * 3))


def test_bold_is_what_gains_at_two_targets(made: Made) -> None:
    rows = train_rows(step=0.1, losses=(3.0,) * 3)
    summaries = [row for row in rows if row["row"] == "summary"]
    for row in summaries:
        times = row["time_to_target_by_seed"]
        row["times_to_by_seed"] = {"0.6": times, "0.8": [2 * time for time in times], "last": times}
    ours = summaries[2]["times_to_by_seed"]

    def cell() -> str:
        return made(rows, "--gains").split(f"| `{METHODS[2]}` | ")[1].partition(" | ")[0]

    ours["last"] = [None, 2.0, 2.0]
    assert cell() == "**5.00 / 5.00** / never"
    ours["0.8"] = [20.0, 20.0, 20.0]  # as the baseline
    assert cell() == "5.00 / 1.00 / never"
    ours["0.8"] = [40.0, 40.0, None]
    assert cell() == "5.00 / never / never"
    del summaries[1]["times_to_by_seed"]
    assert cell() == "**5.00×**"


def test_a_difference_of_losses_has_its_interval(made: Made) -> None:
    """Half the width of 95 %: by Student's t of two degrees of freedom, 4.30 s / sqrt(3)."""
    rows = train_rows(losses=(3.0, 3.03, 3.06), baseline=(3.0,) * 3)
    assert "| +1.00 % ±2.5 % |" in made(rows)
    rows = train_rows(losses=(3.029, 3.03, 3.031), baseline=(3.0,) * 3)
    assert "| +1.00 % ±0.083 %, higher |" in made(rows)


def test_the_best_cost_no_accuracy_on_any_network(made: Made) -> None:
    def trained(net: str, method: str, metric: float, step: float, run: str = "first") -> Rows:
        found = []
        for row in train_rows(net, step=step, losses=(3.0,)):
            other = row["method"] == METHODS[2]
            renamed = {"method": method} if other else {}
            found.append({**row, **renamed, "final_metric": metric if other else 4.0})
        by = {**RUN, "command": f"{method} on {net}, {run}"}
        by["date"] = "2026-02-01T00:00:00+00:00" if run == "again" else RUN["date"]
        return [{**row, "run": by, "metric_name": "bits per byte"} for row in found]

    slow, fast = "100mbit,1ms", "10gbit,1ms"
    rows = [
        *trained(slow, "good", 4.039, 0.1, "again"), *trained(fast, "good", 3.9, 0.4),
        *trained(slow, "faster", 4.0, 0.05), *trained(fast, "faster", 4.041, 0.05),
        *trained(slow, "good", 4.02, 0.05),
    ]  # fmt: skip
    assert made(rows, "--best").splitlines()[2:] == [
        "| 100 Mbit/s, 1 ms latency | `good` 5.00× (-1.0 %) |",
        "| 10 Gbit/s, 1 ms latency | `good` 1.25× (+2.5 %) |",
        "",
        "Highest gains: `good` 2.",
    ]
    accuracy = [{**row, "metric_name": "accuracy"} for row in trained(slow, "good", 3.9, 0.1)]
    assert "with gains" in made(accuracy, "--best", refused=True)


def test_a_method_without_a_metric_to_compare_is_lost(made: Made) -> None:
    """Of a run that diverged; and where fp32 did, or its metric is 0, all methods are."""

    def ended(net: str, method: str, told: Any) -> Rows:
        lost = {"final_metric": told, "final_loss": told, "metric_name": "accuracy"}
        return [{**row, **lost} if row["row"] == "summary" and row["method"] == method else row
                for row in train_rows(net, step=0.1)]  # fmt: skip

    slow, fast = "100mbit,1ms", "10gbit,1ms"
    told = [f"| {name} latency | – |" for name in ("100 Mbit/s, 1 ms", "10 Gbit/s, 1 ms")]
    for method, metric in ((METHODS[2], None), (METHODS[0], None), (METHODS[0], 0)):
        rows = ended(fast, method, metric)
        assert "with gains" in made(rows, "--best", refused=True)
        rows += ended(slow, METHODS[2], 1.0)
        assert made(rows, "--best").splitlines()[2:] == [*told, "", "Highest gains: none."]
    lacking = [
        {key: value for key, value in row.items() if key != "final_metric"} for row in train_rows()
    ]
    assert "with gains" in made(lacking, "--best", refused=True)
    for rows in (lacking, ended(slow, METHODS[2], None)):
        assert f"`{METHODS[2]}`" in made(rows, "--gains")


def test_steps_of_each_task_have_their_own_table_and_baselines(made: Made) -> None:
    gpt = train_rows()
    image = [
        {**scaled(row, 0.5), "task": "image", "net": net}
        for row in train_rows()
        for net in ("100mbit,1ms", "1gbit,1ms")
        if (row["method"], net) != (METHODS[2], "100mbit,1ms")
    ]
    alone = [made(rows, "--steps") for rows in (gpt, image)]
    assert f"| `{METHODS[0]}` | – | 1.00 s (0.500×) |" in alone[0]
    assert f"| `{METHODS[2]}` | – | – | 100 ms (2.50×) |" in alone[1]
    first, second = made([*gpt, *image], "--steps").split("\n\nTask `image`")
    assert first == "Task `gpt`, 4 ranks, 10 parameters, seeds 0, 20 steps:\n\n" + alone[0].rstrip()
    assert second.endswith(f":\n\n{alone[1]}")
    slower = [{**scaled(row, 2), "run": {**RUN, "command": "again"}} for row in gpt]
    again = made([*gpt, *slower], "--steps")
    assert again.splitlines()[:5] == alone[0].splitlines()[:5]
    assert again.count(f"`{METHODS[0]}`") == 1


def test_steps_of_machines_say_what_crosses(made: Made) -> None:
    """A table for each number of micro-batches; the picture has all of them."""
    hsdp: dict[str, Any] = {"replicas": 2, "per_node": 2}
    rows = [
        {**scaled(row, factor), **hsdp, "accumulate": count, "net": net,
         "replicas_wire_bytes": row["gradients_wire_bytes"] // 4}
        for count, net, factor in ((1, "1gbit,1ms", 1), (4, "1gbit,1ms", 2), (4, "300mbit,1ms", 3))
        for row in sharded_rows(0.6)
    ]  # fmt: skip
    one, four = made(rows, "--steps").split("\n\nTask")
    assert one.startswith(
        "Task `gpt`, 4 ranks on 2 machines, 1 micro-batch per step, 10 parameters"
    )
    assert "ranks on 2 machines, 4 micro-batches per step" in four
    assert (
        "| method | sent per step | to other machines | 1 Gbit/s, 1 ms latency | last loss |" in one
    )
    assert "| `fsdp-bf16` | – | 5.00 MB | 500 ms (1.00×) | " in one
    assert "| `fsdp-bf16` | – | 5.00 MB | 1.50 s (1.00×) | 1.00 s (1.00×) | " in four
    others = [{**row, "per_node": 4, "replicas": 1} for row in rows]
    assert made([*rows, *others], "--steps").count("\n\nTask") == 3
    chart, heading = training.picture(rows)
    assert heading == "gpt, 2 machines of 2 ranks: steps against 16 bit"
    assert chart.columns == [
        "1 batch, 1 Gbit/s, 1 ms latency", "4 batches, 300 Mbit/s, 1 ms latency",
        "4 batches, 1 Gbit/s, 1 ms latency",
    ]  # fmt: skip
    gains = dict(chart.rows)
    assert [gain.standing.name for gain in gains["fsdp-bf16"]] == ["BAR"] * 3
    assert [gain.ratio for gain in gains["fsdp-mixed"]] == pytest.approx([5 / 6] * 3)


def test_a_target_that_the_untrained_model_meets_is_named(made: Made) -> None:
    rows = train_rows()
    for row in rows:
        if row["row"] == "summary":
            row["time_to_target"], row["time_to_target_by_seed"] = 0.0, [0.0]
    assert made(rows).count("| before training | – |") == len(METHODS)
    said = learning.time_to_loss([], [row for row in rows if row["row"] == "summary"]).answers[0]
    assert "which the untrained model meets, so times to it say nothing" in said


def test_timing_only_and_not_finite_rows_are_named(made: Made) -> None:
    rows = train_rows()
    for row in rows:
        if row["row"] == "summary" and row["method"] == METHODS[2]:
            row["final_loss"] = row["time_to_target"] = None
            row["time_to_target_by_seed"] = [None]
        if row["row"] == "summary" and row["method"] == METHODS[0]:
            row["timing_only"] = True
    out = made(rows)
    assert "| not reached | loses | not finite | – |" in out
    assert "| 1.00 s | for timing only | – | – | – |" in out


def test_each_command_has_its_own_table_and_baselines(made: Made) -> None:
    def told(rows: Rows, command: str) -> Rows:
        return [{**row, "run": {**row["run"], "command": command}} for row in rows]

    rows = [*told(train_rows(step=0.1), "first"), *told(train_rows(step=2.0), "second")]
    first, second = (made(told(train_rows(step=step), name)) for step, name in
                     ((0.1, "first"), (2.0, "second")))  # fmt: skip
    assert made(rows) == f"{first}\n{second}"
    later = {**RUN, "date": "2026-01-02T00:00:00+00:00"}
    rows = [*train_rows(step=0.1), *({**row, "run": later} for row in train_rows(step=2.0))]
    assert made(rows).count("Task `gpt`") == 2


def test_rows_without_summaries_are_refused(made: Made) -> None:
    trained = "no summary rows of `gradwire bench train`"
    for rows, options, said in (
        ([KERNEL], "", trained),
        ([KERNEL], "--gains", trained),
        ([KERNEL], "--best", f"{trained} with gains"),
        ([KERNEL], "--steps", trained),
        ([KERNEL], "--parts", "no rows of `gradwire bench ablation`"),
        ([KERNEL], "--choices", "no rows of `gradwire bench planner`"),
        ([KERNEL], "--auto", "no rows in which automatic mode tried settings"),
        (train_rows(), "--task image", "of the task 'image': --choices and --parts"),
        (train_rows(), "--gains --best", "--gains and --best are both given"),
        (train_rows(), "--choices --task gpt", "--choices has rows of no task: leave --task out"),
    ):
        assert said in made(rows, *options.split(), refused=True)
    for option, file in (("--svg", "losses.svg"), ("--output", "report.html")):
        complaint = refusal("report", "any", "--table", option, file)[0]
        assert f"--table and {option} are both given: leave one of them out" in complaint
    for option in ("--gains", "--task=gpt"):
        assert "is for a table: give --table" in refusal("report", "any", option)[0]


def test_automatic_mode_has_its_tables(made: Made) -> None:
    """Steps after its last decision; of a method that ended before, none are known."""
    rows = [
        {**row, "method": "auto"} if row["method"] == METHODS[2] else row
        for row in train_rows(step=0.1)
        if row["row"] == "evaluation" and (row["method"], row["step"]) != (METHODS[1], 20)
    ]
    decided = {**DECISION, "seed": 0, "run": RUN}
    last = {**decided, "step": 10, "tried": TRIED}
    out = made([*rows, decided, {**last, "step": 5}, last], "--auto")
    of_net = "gpt, 300 Mbit/s, 1 ms latency"
    assert out.splitlines()[:5] == [
        f"| method | {of_net} |",
        "| --- | --- |",
        "| `torch-fp32` | 1.00 s (1.00×) |",
        "| `auto` | 100 ms (10.0×) |",
        "",
    ]
    assert out.splitlines()[7:9] == [
        "| gpt | 300 Mbit/s, 1 ms latency | qsgd by sra\\* | 100 ms |",
        "|  |  | bf16 by sra | 12.0 s |",
    ]
    assert "tried settings" in made([*rows, decided], "--auto", refused=True)
