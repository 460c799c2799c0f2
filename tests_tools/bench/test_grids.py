"""`gradwire bench grid`: methods of each grid, rows of real processes, bytes, tables, mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_runs import OPTIONS, Found, trained
from rich.console import Console
from test_train_sharded import SHARDED, sent_in, simulated

from gradwire_tools.bench.paper import grids
from gradwire_tools.bench.quantities import seconds
from gradwire_tools.bench.train import sharded
from gradwire_tools.bench.train.sharded import TorchGather, TorchScatter, kept
from gradwire_tools.cli import program
from products import EXHAUSTIVE

FAKE = grids.GRIDS["fake"]


def text_of(grid: grids.Grid, rows: list[dict[str, Any]]) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(grids.table(grid, rows))
    return captured.get()


def labels(grid: str, weights: str, gradients: str) -> tuple[str, str | None]:
    """The codecs that a cell's labels mean."""
    if grid == "blocks":
        return f"randomshift:bits=8:block={weights}", f"qsgd:bits=8:block={gradients}"
    uniform, stochastic = "randomshift", "qsgd"
    if grid == "learned":
        uniform = "randomshift" if weights == "8" else "learnedlevels"
        stochastic = "learnedlevels:rounding=stochastic"
    codec = None if gradients == "32" else f"{stochastic}:bits={gradients}"
    return f"{uniform}:bits={weights}", codec


def test_grids_are_the_thesis() -> None:
    for name, grid in grids.GRIDS.items():
        for (weights, gradients), method in grid.cells.items():
            found = sharded.parse(method)
            found.check()
            if name == "fake":
                assert found.ratios == (float(weights), float(gradients))
                continue
            assert (found.weights, found.gradients) == labels(name, weights, gradients), method
            assert found.learned is (name == "learned")
        assert len(set(grid.methods)) == len(grid.methods)
    # Grids are the thesis.
    assert grids.GRIDS["bits"].rows == grids.GRIDS["bits"].columns == ["6", "5", "4"]
    assert len(grids.GRIDS["bits"].cells) == 9
    assert set(grids.GRIDS["low"].cells) == {("3", "32"), ("2", "32"), ("8", "3"), ("8", "2")}
    learned = {"64", "54", "44", "432", "332", "232", "83", "82"}
    assert set(map("".join, grids.GRIDS["learned"].cells)) == learned
    assert FAKE.rows == FAKE.columns == ["1", "2", "4", "8"]
    assert len(FAKE.cells) == 16
    quick = FAKE.quick()
    assert list(quick.cells) == [("1", "1"), ("1", "8"), ("8", "1"), ("8", "8")]
    grid, config = grids.plan("bits", net="none", nodes=2, seeds=(1,), steps=7)
    assert (config.methods, config.sharded) == (grid.methods, True)
    assert (config.nodes, config.seeds, config.steps) == (2, (1,), 7)
    grid, config = grids.plan("bits", quick=True, net="none")
    assert config.methods == ("fsdp-fp32", *(f"qsdp:w={w}:g={g}" for w in "64" for g in "64"))


@pytest.fixture(scope="module")
def fake() -> Found:
    """Of a fake grid of four cells, with a baseline beside them."""
    methods = ("fsdp-fp32", *FAKE.quick().methods, "truncate:w=3:g=2.5")
    return trained(replace(SHARDED, methods=methods))


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_only_a_part_of_each_buffer_is_sent(fake: Found) -> None:
    found = fake.summaries
    assert sent_in(fake) == {method: simulated(method) for method in found}
    for method, row in found.items():
        assert method == "fsdp-fp32" or row["time_to_target"] is None
    whole, full = found["truncate:w=1:g=1"], found["fsdp-fp32"]
    assert whole["final_loss"] == full["final_loss"]
    assert whole["wire_bytes"] == full["wire_bytes"]
    assert found["truncate:w=8:g=8"]["final_loss"] != full["final_loss"]
    of_rows = {(row["method"], row["timing_only"]) for row in fake.rows}
    assert of_rows == {(method, method != "fsdp-fp32") for method in found}
    text = text_of(FAKE.quick(), fake.rows)
    times = [seconds(found[method]["step_seconds"]) for method in FAKE.quick().methods]
    titles = ("step by ratio of fake compression", "gradients 1", "gradients 8")
    for expected in (*titles, *times, "a step without communication"):
        assert expected in text


def summary(method: str, loss: float | None) -> dict[str, Any]:
    return {
        "row": "summary", "method": method, "task": "gpt", "ranks": 4, "net": "none",
        "final_loss": loss, "step_seconds": 0.1, "wire_bytes_per_step": 1e6,
        "ideal_step_seconds": 0.05,
    }  # fmt: skip


def test_losses_stand_by_weights_and_gradients() -> None:
    grid = grids.GRIDS["low"]
    losses = {"fsdp-fp32": 2.0, "fsdp-mixed": 2.02, "qsdp:w=8:g=3": 2.1, "qsdp:w=8:g=2": None}
    losses["gradwire:w=randomshift:bits=3"] = 2.5
    losses["gradwire:w=randomshift:bits=2"] = 1.99
    lines = text_of(grid, [summary(*one) for one in losses.items()]).splitlines()
    start = next(place for place, line in enumerate(lines) if line.split()[:1] == ["3"])
    cells = [line.split() for line in lines[start : start + 6]]
    assert cells[0] == ["3", "2.500", "–", "–"]
    assert cells[1] == ["+25.00", "%"]
    assert cells[2] == ["2", "1.990", "–", "–"]
    assert cells[3] == ["-0.50", "%"]
    assert cells[4] == ["8", "–", "2.100", "–"]
    assert cells[5] == ["+5.00", "%"]
    beside = " ".join(" ".join(lines[start + 6 :]).split())
    assert "against fsdp-fp32; fsdp-fp32 2.000, fsdp-mixed 2.020" in beside


@pytest.mark.multiprocess
def test_the_command_writes_rows_and_prints_the_grid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    small = replace(FAKE, cells={place: FAKE.cells[place] for place in (("1", "1"), ("8", "4"))})
    monkeypatch.setitem(grids.GRIDS, "fake", small)
    arguments = ["bench", "grid", "--grid", "fake", "--net", "none", "--nodes", "2", "--steps", "2"]
    options = [f"--task-option={name}={value}" for name, value in OPTIONS.items()]
    assert program.run([*arguments, *options, "--json", str(file)]) == program.OK
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    summaries = [row for row in rows if row["row"] == "summary"]
    assert [row["method"] for row in summaries] == ["truncate:w=1:g=1", "truncate:w=8:g=4"]
    assert all(row["sharded"] for row in rows)
    assert "gradients 4" in capsys.readouterr().out
    assert program.run([*arguments, *options, "--json", str(file), "--resume"]) == program.BAD_INPUT
    assert "holds the rows of a run that ended" in " ".join(capsys.readouterr().err.split())


class TwoRanks:
    """A process group of two ranks, as far as these collectives ask: the other rank sends ten times
    what this one does."""

    def size(self) -> int:
        return 2

    def all_gather(self, output: torch.Tensor, own: torch.Tensor, *_: Any) -> None:
        output.copy_(torch.cat([own, 10 * own]))

    def reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, *_: Any) -> None:
        output.copy_(whole.view(2, -1)[0] * 11 / 2)


def test_what_is_not_sent_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = TwoRanks()
    monkeypatch.setattr(dist, "all_gather_into_tensor", group.all_gather)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", group.reduce_scatter)
    own, every = torch.tensor([1.0, 2, 3, 4, 5]), torch.full((10,), 7.0)
    gather = TorchGather(ratio=2)
    gather(every, own, group)
    assert every.tolist() == [1, 2, 3, 0, 0, 10, 20, 30, 0, 0]
    assert gather.wire_bytes == 12
    mine, whole = torch.full((5,), 7.0), torch.arange(10.0)
    scatter = TorchScatter(ratio=4)
    scatter(mine, whole, group, dist.ReduceOp.AVG)
    assert mine.tolist() == [0, 5.5, 0, 0, 0]
    assert scatter.wire_bytes == 8
    assert whole.tolist() == list(range(10))
    # At least one value is kept.
    assert [kept(10, ratio) for ratio in (1, 2, 3, 8, 100)] == [10, 5, 4, 2, 1]
    assert kept(0, 8) == 0
