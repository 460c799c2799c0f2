"""The benches of the planner: which settings are measured, and what the rows say."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from command_line import run
from gradwire.codecs import QSGD
from gradwire.planner import kernel_costs
from gradwire_tools.bench.micro import curves as measuring
from gradwire_tools.bench.network import collectives
from gradwire_tools.bench.network.network import MeasuredStep
from gradwire_tools.bench.paper import ablation, planner_grid
from gradwire_tools.bench.train import methods
from gradwire_tools.lab import Network
from gradwire_tools.sim.choice import FULL, HALF, Setting, choose, simulate
from gradwire_tools.sim.curves import Software
from gradwire_tools.sim.rank import Overheads
from machines import priced
from products import EXHAUSTIVE, exhaustive

CODEC = QSGD(bits=4)


KNOWN = priced(
    {CODEC: (2e-6, 1e-9, 1e-9), HALF: (2e-6, 3e-10, 3e-10), FULL: (2e-6, 1e-10, 1e-10)},
    engine=Overheads(start=1e-4, task=5e-6),
    link=Software(overhead=2e-5, stack=2e-10, memory=5e9),
)


@pytest.fixture(autouse=True)
def _given_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measured", lambda *a, **b: KNOWN)
    slow = dict.fromkeys(kernel_costs.FORMS, (1e-4, 5e-8, 5e-8))
    monkeypatch.setattr(kernel_costs, "kernel_curves", lambda *a, **b: slow)


def test_settings_have_the_names_of_methods() -> None:
    where = planner_grid.in_lab(KNOWN, 2, Network.parse("1gbit,1ms"), ((1, 1 << 18),))
    choice = choose(where, [CODEC])
    wanted = planner_grid._wanted(choice)
    assert wanted[0].codec == choice.best.setting.codec
    assert {s.codec for s in wanted} == {FULL, HALF, CODEC}
    assert len(wanted) == len(set(wanted))
    for setting in wanted:
        codec, options = methods.parse(planner_grid.method_of(setting)).how()
        assert (codec, options) == (setting.codec, setting.options)
    hopeless = [o for o in choice.every if o.seconds > planner_grid.HOPELESS * choice.best.seconds]
    left_out = {o.setting for o in hopeless} - {o.setting for o in choice.of_codec}
    assert left_out - {choice.uncompressed.setting}
    assert not left_out & set(wanted) - {choice.uncompressed.setting}


def test_the_choice_is_compared_with_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With given times: the choice takes 3 ms, bf16 takes 2, all else 4."""
    runs: list[int] = []
    chosen: list[str] = []

    def run(ranks: int, net: str, names: list[str], **_: Any) -> list[dict[str, Any]]:
        runs.append(len(names))
        if len(runs) <= planner_grid.TURNS + 1:  # to fit costs
            return [{"seconds": 3e-3} for _ in names]
        chosen[:] = chosen or names[:1]
        times = {chosen[0]: 3e-3} | {name: 2e-3 for name in names if "bf16" in name}
        return [{"seconds": times.get(name, 4e-3)} for name in names]

    monkeypatch.setattr(collectives, "run", run)
    (row,) = planner_grid.run(ranks=2, nets=["100mbit,1ms"], sizes=[1 << 14])
    assert row["seconds"] == 3e-3
    assert row["best_seconds"] == 2e-3
    assert row["best_method"].startswith("gradwire:bf16:algorithm=")
    assert (row["ratio"], row["compress"], row["best_compresses"]) == (1.5, True, False)
    assert row["decline_ratio"] == 1
    assert row["partition_ratio"] == 0.75
    fits = planner_grid.TURNS + 1
    fitted, (all_of_them, *again) = runs[:fits], runs[fits:]
    assert fitted == [3] * fits
    assert all_of_them == row["settings"]
    assert again == [again[0]] * planner_grid.TURNS
    assert again[0] < all_of_them


@pytest.mark.parametrize("net", ["none", *exhaustive("10gbit,100us")])
def test_costs_of_messages_and_bytes_are_fitted(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of the simulator at costs of which the search knows nothing give these back."""
    network, link = Network.parse(net), KNOWN.link
    slow = replace(link, message=4e-4, stack=3 * link.stack, memory=link.memory / 3)
    true = replace(KNOWN, link=slow)

    def run(ranks: int, net: str, names: list[str], numel: int, **_: Any) -> list[dict[str, Any]]:
        where = planner_grid.in_lab(true, ranks, network, ((1, numel),))
        settings = [Setting(*methods.parse(name).how()) for name in names]
        return [{"seconds": simulate(where, setting).seconds} for setting in settings]

    monkeypatch.setattr(collectives, "run", run)
    found = planner_grid.fitted_to_lab(KNOWN, 4, network, 1 << 22).link
    per_byte = (found.stack, slow.stack) if network.shaped else (found.memory, slow.memory)
    assert found.message == pytest.approx(slow.message, rel=0.15)
    assert per_byte[0] == pytest.approx(per_byte[1], rel=0.15)


def test_the_parts_of_the_ablation_in_the_simulator() -> None:
    model = ",".join(["512x512", "512"] * 4)
    rows = list(ablation.run(ranks=2, model=model, lab=False))
    assert [row["part"] for row in rows] == [
        "none", "kernels", "pipelining", "batching", "bulk", "selective",
    ]  # fmt: skip
    seconds = [row["synchronisation_seconds"] for row in rows]
    assert rows[0]["cut"] is None
    for row, before, after in zip(rows[1:], seconds, seconds[1:], strict=False):
        assert row["cut"] == pytest.approx(1 - after / before)
    assert rows[1]["cut"] > 0.5  # eager kernels are 50 times as slow
    assert seconds[-1] == min(seconds)
    for row in rows:
        methods.parse(row["method"]).check()


def test_the_table_of_parts_has_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the part before: unknown of the first, and where nothing is left to wait for."""
    row = {"where": "lab", "model": "gpt", "ranks": 4, "net": "1gbit,1ms", "step_seconds": 1.0}
    cuts = {"none": None, "kernels": 0.6, "bulk": -0.25, "batching": 0.0, "selective": 1.0}
    rows = [row | {"part": part, "cut": cut} for part, cut in cuts.items()]
    monkeypatch.setattr(ablation, "run", lambda *_: rows)
    said = run("bench", "ablation").out
    assert said.startswith("gpt, 4 ranks, 1 Gbit/s, 1 ms latency\n")
    gains = dict(re.findall(rf"({'|'.join(cuts)})\b.* ([\d.]+×|-) ", said))
    told = {"none": "-", "kernels": "2.50×", "bulk": "0.800×", "batching": "1.00×"}
    assert gains == told | {"selective": "-"}


def test_parts_of_the_same_setting_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(step: MeasuredStep) -> list[dict[str, Any]]:
        asked.extend(step.methods)
        steps = [
            {"method": name, "steps": [0.5 + n], "computing": [0.25]}
            for n, name in enumerate(step.methods)
        ]
        return [{"links": []}, *steps]

    monkeypatch.setattr(ablation, "fitted_to_lab", lambda known, *_: known)
    monkeypatch.setattr(MeasuredStep, "measured", measured)
    found = list(ablation.run(ranks=2, net="none", model="512x512", lab=True))
    rows = [row for row in found if row["where"] == "lab"]
    assert len(rows) == 6
    assert sorted(asked) == sorted({row["method"] for row in rows})
    for row in rows:
        assert row["step_seconds"] == 0.5 + asked.index(row["method"])
        assert row["synchronisation_seconds"] == row["step_seconds"] - 0.25


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_a_cell_that_is_measured() -> None:
    (row,) = planner_grid.run(ranks=2, nets=["none"], sizes=[1 << 16])
    assert row["ratio"] >= 1
    assert row["decline_ratio"] >= 1
    assert 0 < row["best_seconds"] <= row["seconds"] < 1
    assert row["settings"] > 3
