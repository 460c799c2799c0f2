"""`gradwire plan --model --net`: the rows, the verdict, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwire.cli.program import run
from gradwire.codecs import QSGD, Cast, Identity
from gradwire.sim import Curves
from gradwire.sim.curves import Software
from gradwire.sim.rank import Overheads

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


def rows(net: str, file: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict]:
    given = ["plan", "--model", MODEL, "--net", net, "--curves", str(file), "--json", "-", *more]
    assert run(given) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_slow_network_and_a_fast_one(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for net, pays in (("100mbit,1ms", True), ("10000gbit,1us", False)):
        found = rows(net, file, capsys, "--ranks", "3")
        layers, settings, (verdict,) = (
            [row for row in found if row["part"] == part]
            for part in ("layer", "setting", "verdict")
        )
        assert [row["numel"] for row in layers] == [4096, 1 << 18, 1 << 21]
        assert layers[-1]["compress"] is pays
        assert {row["method"] for row in settings} == {"identity", "bf16", "qsgd"}
        times = [row["seconds"] for row in settings]
        assert times == sorted(times)
        assert verdict["compress"] is pays
        assert (verdict["method"] == "qsgd") is pays
        assert ("best:" in verdict["detail"]) is not pays
        assert all(row["ranks"] == 3 and row["net"] == net for row in found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "resnet50"], "give --model and --net"),
        (["--net", "1gbit"], "give --model and --net"),
        (["--model", "resnet50", "--net", "quick"], "network 'quick'"),
        (["--model", "resnet", "--net", "1gbit"], "neither a model nor a size"),
        (["--model", "1e6", "--net", "1gbit", "--ranks", "1"], "one rank sends nothing"),
        (["--model", "1e6", "--net", "1gbit", "--per-node", "3"], "divides the 4 ranks"),
        (["--model", "1e6", "--net", "1gbit", "--codec", "zip"], "zip"),
        (["--model", "1e6", "--net", "1gbit", "--codec", "qsgd:bits=2"], "no curve for encode"),
    ],
)
def test_bad_input_is_named(
    given: list[str], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *given, "--curves", str(file)]) != 0
    assert message in capsys.readouterr().err


def test_without_arguments_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan"]) == 0
    assert "diff" in capsys.readouterr().out
