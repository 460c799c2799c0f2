"""The command line: rows for programs, and tables for people."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from command_line import refusal, rows_of, run
from gradwire import codecs
from gradwire.aggregators import registry
from gradwire.lang import gpu
from gradwire.lang.native import jit
from gradwire_tools import doctor
from gradwire_tools.cli import main


def test_doctor_says_what_is_there_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("doctor")
    assert all(row.keys() == {"part", "available", "detail"} for row in rows)
    parts = {row["part"]: row for row in rows}
    assert parts["target eager"]["available"]
    assert parts["transport torch_p2p"]["available"]
    monkeypatch.setenv("GRADWIRE_CC", "no-such-compiler")
    parts = {row["part"]: row for row in rows_of("doctor")}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lacking = {row["part"]: row for row in doctor.examine()}
    for part, said in (
        ("report", 'jinja2 and matplotlib not installed: pip install "gradwire[report]"'),
        ("gw.keras", 'keras not installed: pip install "gradwire[keras]"'),
        ("--plot", 'matplotlib not installed: pip install "gradwire[report]"'),
        (
            "policies bayes, flexible",
            'optuna and pymoo not installed: pip install "gradwire[adapt]"',
        ),
    ):
        assert (lacking[part]["available"], lacking[part]["detail"]) == (False, said)
    for part in ("compiler", "target c"):
        assert not parts[part]["available"]
        assert "no-such-compiler" in parts[part]["detail"]
    said = parts["target c"]["detail"]
    assert "; attach sends bf16 in place of codecs on the CPU: install a C compiler (apt " in said


def test_codec_list_has_a_row_for_each(tmp_path: Path) -> None:
    found = rows_of("codec", "list")
    rows = {row["codec"]: row for row in found}
    assert {"identity", "fp16", "bf16", "qsgd", "terngrad"} <= rows.keys()
    for row in rows.values():
        assert row.keys() == {"codec", "kind", "operators", "lines", "options"}
        assert row["lines"] <= (25 if row["kind"] == "codec" else 60)
        assert len(row["operators"]) <= 6
    assert rows["qsgd"]["options"]["bits"] == 4
    assert rows["qsgd"]["kind"] == "codec"
    assert rows["powersgd"]["kind"] == rows["artopk"]["kind"] == "aggregator"
    assert rows["powersgd"]["options"] == {"rank": 2, "warm": True, "orthogonal": "cholesky"}
    # The same rows go to a file, and then a table to people.
    file = tmp_path / "rows.jsonl"
    said = run("codec", "list", "--json", str(file)).out
    assert "qsgd" in said
    assert "unbiased=false" in said, "as users write it"
    assert [json.loads(line) for line in file.read_text().splitlines()] == found


def test_codec_show_fits_on_a_screen() -> None:
    for name in [*codecs.REGISTRY, *registry.REGISTRY]:
        lines = run("codec", "show", name).out.splitlines()
        assert len(lines) <= 24, name
        assert max(map(len, lines)) < 80, name
        options = {row["codec"]: row["options"] for row in [*codecs.listing(), *registry.listing()]}
        for option, default in options[name].items():
            assert f" {option}={default}" in "\n".join(lines), name
    shown = run("codec", "show", "qsgd:bits=2").out
    for part in (
        "qsgd:bits=2: codec\n", "  bits=2 (default 4): of a code, 1 to 8 ", "  block=128: values",
        "bits per value: 2.25 of ", "bias: unbiased", "paper: CGX 2.3 and 4.3; Alistarh",
    ):  # fmt: skip
        assert part in shown
    shown = run("codec", "show", "powersgd:rank=2").out
    assert "bits per value: 0.125 of " in shown
    assert "bias: biased, and so always with error feedback\npaper: THESIS 2.2.3, UTIL" in shown


def test_codec_cache_clears_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    kept = [tmp_path / name for name in ("probe-1.json", "libmine.so", "notes")]
    for path in kept:
        path.write_text("not a kernel")
    library = jit.load("int answer(void) { return 42; }\n")
    gpu.load("answer = 42\n")
    made = set(tmp_path.rglob("*.*")) - {*kept, tmp_path / "__pycache__"}
    nbytes = sum(path.stat().st_size for path in made)
    assert {path.suffix for path in made} >= {".so", ".lock", ".py"}
    row = {"folder": str(tmp_path), "files": len(made), "bytes": nbytes}
    assert rows_of("codec", "cache") == [{**row, "removed": False}]
    assert rows_of("codec", "cache", "--clear") == [{**row, "removed": True}]
    assert {*kept} == {path for path in tmp_path.rglob("*") if path.is_file()}
    assert library.answer() == 42
    assert rows_of("codec", "cache")[0]["files"] == 0


def test_codec_show_prints_stages() -> None:
    shown = run("codec", "show", "qsgd:bits=2", "--ir").out
    assert "reduce[min]" in shown
    assert "uint2" in shown
    assert "int encode(" not in shown
    assert "int encode(" in run("codec", "show", "qsgd:bits=2", "--c").out


@pytest.mark.parametrize("module", ["gradwire", "gradwire_tools.cli"])
def test_the_program_ends_with_the_exit_code(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python -m gradwire`."""
    monkeypatch.setattr(sys, "argv", ["gradwire", "codec", "show", "qsdg"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    (said,) = told.err.splitlines()
    assert "qsdg" in said


def test_without_its_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n.startswith("gradwire_tools.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "gradwire: the command line needs typer, which is not installed: pip install "
        '"gradwire[cli]", or in a clone pip install ".[cli]"\n'
    )


def test_lab_run_passes_the_exit_code_on() -> None:
    script = "echo rank $RANK; exit 3"
    ran = run("lab", "run", "--nodes", "2", "--net", "none", "--", "sh", "-c", script)
    assert ran.code == 3
    assert "[node 1] rank 1" in ran.out


def test_a_run_that_ended_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"row": "summary"}\n')
    (tmp_path / "rows.jsonl.state").mkdir()  # of which the deletion was killed
    (tmp_path / "rows.jsonl.state" / "ended").touch()
    complaint, fault = refusal("bench", "train", "--net", "none", "--json", str(file), "--resume")
    assert not fault
    assert "a run that ended" in complaint
    assert file.read_text() == '{"row": "summary"}\n'
