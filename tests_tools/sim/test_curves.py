"""Curves: the file, the fit, and the engine's overheads from two ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import refused
from gradwire import codecs
from gradwire.aggregators import ErrorFeedback, registry
from gradwire.planner import kernel_costs
from gradwire_tools.bench.micro import curves as measuring
from gradwire_tools.sim import Net, Scenario, calibrate, curves, predict
from gradwire_tools.sim.rank import Overheads
from machines import FREE, IDENTITY, QSGD, USUAL, scenario
from machines import curves as made


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    computing = {"powersgd(rank=2), error feedback": [(1e-5, 2e-10, 0.0), (0.0, 1e-10, 1e-12)]}
    for known in (USUAL, FREE, replace(USUAL, aggregators=computing)):
        known.save(tmp_path / "curves.json")
        assert curves.load(tmp_path / "curves.json") == known


def test_a_file_may_be_short(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    file.write_text(json.dumps({"codecs": {repr(QSGD): {"encode": [1, 2, 3]}}}))
    found = curves.load(file)
    assert found.seconds(QSGD, "encode", 10, 4) == 1 + 10 * (2 + 4 * 3)
    assert found.engine == Overheads()


NO_CURVES = [
    "",
    "[]",
    "{}",
    '{"codecs": {"x": {"encode": [1, 2]}}}',
    '{"codecs": {"x": {"encode": [1, 2, -3]}}}',
    '{"codecs": {"x": {"encode": ["fast", 2, 3]}}}',
    '{"codecs": {}, "aggregators": {"x": [1, 2, 3]}}',
    '{"codecs": {}, "aggregators": {"x": [[1, 2, -3]]}}',
    '{"codecs": {}, "engine": {"speed": 1}}',
    '{"codecs": {}, "engine": {"start": -1}}',
    '{"codecs": {}, "link": {"stack": "slow"}}',
    '{"codecs": {}, "threads": "many"}',
]


def test_what_is_no_such_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    for text in NO_CURVES:
        file.write_text(text)
        refused(curves.load, [(file, r"curves\.json")])
    refused(curves.load, [(tmp_path / "none here", "none here")])
    ternary = Scenario(2, Net("none"), codecs.get("terngrad"), "1e4")
    refused(lambda one: predict(one, USUAL), [(ternary, "no curve for encode of terngrad")])


def test_a_fit_finds_the_curve() -> None:
    for curve in ((1e-5, 3e-10, 1e-10), (0.0, 1e-9, 0.0), (2e-6, 0.0, 4e-10)):
        call, value, payload = curve
        points = [
            (n, p, call + n * (value + p * payload))
            for n in (1 << 12, 1 << 16, 1 << 20)
            for p in (1, 4)
        ]
        assert kernel_costs.fit(points) == pytest.approx(curve, rel=1e-6, abs=1e-15)


def test_a_fit_is_never_negative() -> None:
    """Small calls that are slow for their size would make a slope negative."""
    found = kernel_costs.fit([(10, 0, 1.0), (20, 0, 0.9), (30, 0, 0.8)])
    assert found == pytest.approx((0.885, 0.0, 0.0), rel=0.01)
    one = kernel_costs.fit([(1000, 0, 2e-3)])
    assert one[0] + 1000 * one[1] == pytest.approx(2e-3)


def test_kernels_have_curves_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_costs, "VALUES", (1 << 10, 1 << 14))
    monkeypatch.setattr(kernel_costs, "_TURNS", 3)
    monkeypatch.setattr(kernel_costs, "_ARRAY", 1 << 14)
    found = kernel_costs.kernel_curves(codecs.get("topk"), threads=1)
    assert set(found) == set(kernel_costs.FORMS)
    for form, (call, value, payload) in found.items():
        assert call + (1 << 14) * (value + 7 * payload) > 0, form


def test_aggregators_have_curves_of_their_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those matrices that rank 16 shrinks; else there is one round."""
    monkeypatch.setattr(measuring, "_SIDES", (16, 64, 128))
    monkeypatch.setattr(measuring, "_VALUES", 1 << 15)
    threads = torch.get_num_threads()
    for name, rounds in (("powersgd:rank=16", 2), ("artopk", 2), ("globaltopk", 1)):
        found = measuring.computing(ErrorFeedback(registry.get(name)), threads=1)
        assert len(found) == rounds + 1, name
        for call, value, rank in found:
            assert call + (1 << 14) * (value + 2 * rank) > 0, name
    assert torch.get_num_threads() == threads


def test_the_engines_overheads_are_found_again() -> None:
    """Calibrating with the times of a simulated pair of ranks gives its overheads back."""
    engine = Overheads(start=7e-4, task=8e-5, post=5e-6, check=4e-6, check_byte=2e-11)
    truth = replace(made(call=1e-5, value=3e-10), engine=engine)
    truth = replace(truth, link=replace(truth.link, overhead=3e-5, stack=2e-10, memory=1e10))
    found: dict[str, Any] = {
        "trip": 3e-5 + 5e-6,
        "post": 5e-6,
        "check": 4e-6,
        "check_byte": 2e-11,
        "stack": 2e-10,
        "memory": 1e10,
    }
    of = {"model": str(calibrate.VALUES), "net": Net("none"), "codec": IDENTITY}
    pairs = {f"tiny {n}": scenario(2, segments=n, **of) for n in calibrate.SEGMENTS}
    found |= {name: predict(pair, truth)["seconds"] for name, pair in pairs.items()}
    again = calibrate.engine(replace(truth, engine=Overheads(), link=FREE.link), found)
    assert again.link.overhead == pytest.approx(truth.link.overhead)
    assert again.engine.task == pytest.approx(engine.task, rel=0.25)
    assert again.engine.start == pytest.approx(engine.start, rel=0.25)
    for name, pair in pairs.items():
        assert predict(pair, again)["seconds"] == pytest.approx(found[name], rel=0.05)
