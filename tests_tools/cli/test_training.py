"""`gradwire bench train`: bad input ends in one line that says what to do, before any work."""

from __future__ import annotations

from pathlib import Path

from command_line import refusal, wrongly_refused

MISTAKES = [
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
]


def test_bad_input_is_refused() -> None:
    given = [(["bench", "train", *words], complaint) for words, complaint in MISTAKES]
    faults = wrongly_refused(given)
    assert not faults, "\n".join(faults)


def test_a_run_that_ended_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"row": "summary"}\n')
    (tmp_path / "rows.jsonl.state").mkdir()  # of which the deletion was killed
    (tmp_path / "rows.jsonl.state" / "ended").touch()
    complaint, fault = refusal("bench", "train", "--net", "none", "--json", str(file), "--resume")
    assert not fault
    assert "a run that ended" in complaint
    assert file.read_text() == '{"row": "summary"}\n'
