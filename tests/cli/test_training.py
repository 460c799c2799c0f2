"""`gradwire bench train`: bad input ends in one line that says what to do, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.cli import program


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--task-option", "layers"], "--task-option layers: write NAME=VALUE"),
        (["--task-option", "depth=3"], "no option 'depth'"),
        (["--task-option", "layers=1", "--task-option", "layers=2"], "layers is given twice"),
        (["--split", "by-class"], "have no classes"),
        (["--task", "image", "--split", "by-name"], "use one of iid, by-class"),
        (["--compose"], "--nets is missing"),
        (["--nets", "1gbit,1ms"], "--compose is missing"),
        (["--compose", "--nets", " ; "], "--nets is empty"),
        (["--compose", "--nets", "1gbit,1ms", "--net", "none"], "--net none"),
        (["--validate"], "give nets to compose"),
        (["--target-at", "0.6", "--target", "2"], "exclude each other"),
        (["--target-at", "60"], "above 0 and up to 1"),
        (["--patience", "0"], "patience is 0"),
        (["--resume"], "give its --json FILE"),
        (["--resume", "--json", "-"], "give its --json FILE"),
        (["--methods", "truncate:ratio=0"], "truncate:ratio=N"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.run(["bench", "train", *arguments]) == program.BAD_INPUT
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_a_run_that_ended_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"row": "summary"}\n')
    (tmp_path / "rows.jsonl.state").mkdir()  # of which the deletion was killed
    (tmp_path / "rows.jsonl.state" / "ended").touch()
    arguments = ["bench", "train", "--net", "none", "--json", str(file), "--resume"]
    assert program.run(arguments) == program.BAD_INPUT
    assert "a run that ended" in " ".join(capsys.readouterr().err.split())
    assert file.read_text() == '{"row": "summary"}\n'
