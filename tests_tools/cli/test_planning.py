"""`gradwire plan --model --net`: the rows, the verdict, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import rows_of, run, wrongly_refused
from gradwire.codecs import QSGD, Cast, Identity
from gradwire_tools.predict import planning
from gradwire_tools.sim import Curves
from gradwire_tools.sim.curves import Software
from gradwire_tools.sim.rank import Overheads

FORMS = ("encode", "encode_ef", "decode", "decode_sum", "reduce_encode", "reduce_encode_ef")
MODEL = "256x1024,4096x512,64x64"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    costs = {
        str(codec): dict.fromkeys(FORMS, (2e-6, value, value))
        for codec, value in ((QSGD(bits=4), 1e-9), (Cast("bf16"), 3e-10), (Identity(), 1e-10))
    }
    engine, link = Overheads(start=1e-4, task=5e-6), Software(overhead=2e-5)
    Curves("given", 1, costs, engine, link).save(tmp_path / "curves.json")
    return tmp_path / "curves.json"


def test_a_slow_network_and_a_fast_one(file: Path) -> None:
    for net, pays in (("100mbit,1ms", True), ("10000gbit,1us", False)):
        given = ["--model", MODEL, "--net", net, "--curves", str(file), "--ranks", "2"]
        found = rows_of("plan", *given)
        layers, settings, (verdict,) = (
            [row for row in found if row["part"] == part]
            for part in ("layer", "setting", "verdict")
        )
        assert [row["numel"] for row in layers] == [4096, 1 << 18, 1 << 21]
        assert layers[-1]["compress"] is pays
        assert {row["method"] for row in settings} == {"none", "bf16", "qsgd"}
        times = [row["seconds"] for row in settings]
        assert times == sorted(times)
        assert verdict["compress"] is pays
        assert (verdict["method"] == "qsgd") is pays
        assert ("best:" in verdict["detail"]) is not pays
        assert all(row["ranks"] == 2 and row["net"] == net for row in found)


def test_the_table_tells_settings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"part": "setting", "method": "bf16", "algorithm": "sra", "coordinated": True}
    verdict = {"part": "verdict", "detail": "the test's"}
    monkeypatch.setattr(planning, "run", lambda *_: [row, verdict])
    assert "coordinated" in run("plan", "--model", "1e6", "--net", "1gbit").out


def test_the_shapes_of_a_saved_plan(file: Path, tmp_path: Path) -> None:
    sizes = {"a": [256, 1024], "b": [4096, 512], "c": [64, 64], "bias": [64], "none": [0, 4]}
    rows = {name: {"gradient": "qsgd", "shape": shape} for name, shape in sizes.items()}
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps({"gradwire_plan": 1, "parameters": rows}))
    given = ["--net", "100mbit,1ms", "--curves", str(file)]
    found = rows_of("plan", "--shapes", str(saved), *given)
    assert [row["numel"] for row in found if row["part"] == "layer"] == [4096, 1 << 18, 1 << 21]
    assert {row["model"] for row in found} == {str(saved)}
    saved.write_text(json.dumps({"gradwire_plan": 1, "parameters": {"a": {"gradient": "qsgd"}}}))
    assert "parameter a has no 'shape'" in run("plan", "--shapes", str(saved), *given).err
    both = run("plan", "--shapes", str(saved), "--model", "1e6", *given)
    assert "give --model or --shapes" in both.err


MISTAKES = [
    (["--model", "resnet50"], "give --model or --shapes, and --net"),
    (["--net", "1gbit"], "give --model or --shapes, and --net"),
    (["--model", "resnet50", "--net", "quick"], "network 'quick'"),
    (["--model", "resnet", "--net", "1gbit"], "neither a model nor a size"),
    (["--model", "1e6", "--net", "1gbit", "--ranks", "1"], "one rank sends nothing"),
    (["--model", "1e6", "--net", "1gbit", "--per-node", "3"], "divides the 4 ranks"),
    (["--model", "1e6", "--net", "1gbit", "--codec", "zip"], "zip"),
    (["--model", "1e6", "--net", "1gbit", "--codec", "none"], "leave it out here"),
    (["--model", "1e6", "--net", "1gbit", "--codec", "qsgd:bits=2"], "no curve for encode"),
]


def test_bad_input_is_named(file: Path) -> None:
    given = [(["plan", *words, "--curves", str(file)], said) for words, said in MISTAKES]
    faults = wrongly_refused(given)
    assert not faults, "\n".join(faults)


def test_without_arguments_it_helps() -> None:
    ran = run("plan")
    assert ran.code == 0
    assert "diff" in ran.out
