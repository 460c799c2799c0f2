"""The report on errors, aggregators, composed runs and a step's parts: what they say in words."""

from __future__ import annotations

from typing import Any

from report_rows import (
    ABLATED,
    ADAPTED,
    AGGREGATORS,
    CHOSEN,
    COMPARED,
    DECISION,
    ERRORS,
    LAYERS,
    METHODS,
    PROBED,
    RUN,
    adapted,
    aggregator_row,
    error_row,
    train_rows,
)

from gradwire_tools.report import page
from gradwire_tools.report.parts import Question


def questions(rows: list[dict[str, Any]]) -> list[Question]:
    """Of the first section."""
    return list(page.sections(rows)[0].questions)


def cells(question: Question) -> list[list[str]]:
    assert question.table is not None
    return [list(row) for row in question.table.rows]


def test_decisions_are_told_by_method_and_seed() -> None:
    later = {**DECISION, "step": 1009, "line": "qsgd:bits=4 by ring"}
    other = {**DECISION, "method": "gradwire:qsgd:bits=4:policy=lgreco", "seed": 1}
    auto, policy = questions([DECISION, other, later])
    assert auto.title == "What has auto decided, seed 0?"
    assert cells(auto) == [["9", "bf16 by sra <measured>"], ["1,009", "qsgd:bits=4 by ring"]]
    assert policy.title == "What has gradwire:qsgd:bits=4:policy=lgreco decided, seed 1?"


def test_policies_are_told_by_gain_error_and_layer() -> None:
    gain, curve, bits, more = questions(ADAPTED)
    assert gain.answers == [
        "bits around qsgd:bits=3: lgreco, 1.25 times.",
        "bits around qsgd:bits=4: lgreco, 1.25 times.",
    ]
    assert cells(gain)[1] == [
        "bits", "qsgd:bits=3", "lgreco", "13.3", "1.25", "1.00", "0.100", "20.0 ms"
    ]  # fmt: skip
    assert gain.figure is not None
    assert "accordion" not in gain.figure.svg  # it keeps to no budget
    assert curve.figure is not None
    assert "accordion" in curve.figure.svg
    assert cells(bits) == [["1", "a.weight", "3.25", "3.25"], ["2", "b.weight", "3.25", "2.60"]]
    assert cells(more)[1] == ["2", "b.weight", "4.25", "3.40", "2.83"]
    about = page.sections(ADAPTED)[0].about
    assert about[1:] == ["bayes: bayes needs optuna."]
    # Of uniform plans alone there is nothing to tell by layer, and a single reference has no curve.
    (alone,) = questions([adapted()])
    assert alone.answers == ["No policy sends less."]


def test_what_was_probed_is_told() -> None:
    pairs, sends, kernels = questions(PROBED)
    assert pairs.answers == [
        "The slowest is 0 to 1: 1Gbit/s. The longest latency is 2.00 ms, 1 to 0."
    ]
    assert cells(pairs)[1] == ["1 to 0", "2.00 ms", "2Gbit/s"]
    assert cells(sends) == [["1.00 kB", "1.00 ms"], ["1.00 MB", "9.00 ms"]]
    assert cells(kernels)[2] == ["qsgd:bits=4", "decode_add", "10.0 µs", "1.00 ns", "2.00 ns"]


def test_choices_and_parts_are_told_with_losses() -> None:
    near = {**CHOSEN, "ratio": 1.1, "error": 0.3, "best_compresses": True, "partition_ratio": 1.01}
    (choice,) = questions([CHOSEN, near, {**near, "ratio": 1.0, "error": 0.1}])
    assert choice.answers == [
        (
            "Of 3 choices, 2 took at most 15 % longer than the fastest setting that was measured, "
            "the worst 1.25 times as long."
        ),
        "It compressed, or declined to, as the fastest did in 2 of 3.",
        "Its partition was at most 5.0 % slower than another one in 2 of 2.",
        "What it expected was within 20 % of what was measured in 2 of 3.",
    ]
    worse = {**ABLATED, "part": "pipelining", "cut": -0.25, "synchronisation_seconds": 0.5}
    (parts,) = questions([ABLATED, worse])
    assert parts.answers == ["lab, pipelining: 25 % more than before."]
    assert [row[4] for row in cells(parts)] == ["–", "-25 %"]


def test_errors_are_told_with_and_without_error_feedback() -> None:
    step, whole = questions(ERRORS)
    assert step.answers[0] == (
        "In a single step farther from the mean than zero is: topk:density=0.01 with error "
        "feedback (1.30)."
    )
    assert whole.answers == [
        "qsgd:bits=4 by sra loses 0.0150 of the sum, with error feedback 0.00400: less.",
        "topk:density=0.01 by sra loses 0.800 of the sum, with error feedback 0.400: less.",
    ]
    assert cells(step)[0][:8] == [
        "qsgd:bits=4", "sra", "no", "0.0140", "–", "0.0140", "0.0150", "0.990"
    ]  # fmt: skip
    rows = [error_row(of_sum=0.1), error_row(feedback=True, of_sum=0.2)]
    assert "with error feedback 0.200: not less." in questions(rows)[1].answers[0]
    # Errors are means over points and lines over options.
    rows = [error_row(f"qsgd:bits={bits}", at=at, bits=bits, nmse=at / 1000)
            for bits in (3, 4, 5) for at in (100, 300)]  # fmt: skip
    step = questions(rows)[0]
    assert [row[3:5] for row in cells(step)] == [["0.200", "0.100 to 0.300"]] * 3
    assert step.figure is not None
    assert step.figure.svg.count("qsgd, sra") == 1
    # Many methods are spread over figures.
    rows = [error_row(f"codec{at}", bits=1 + at) for at in range(12)]
    first, second, *_ = questions(rows)
    assert first.figure is not None
    assert second.figure is not None
    assert ("codec8, sra" in first.figure.svg, "codec9, sra" in second.figure.svg) == (True, True)
    assert len(cells(first)) == 12
    assert second.table is None
    assert [row[2] for row in cells(questions(LAYERS)[0])] == ["wte.weight", "head.weight"]


def test_aggregators_stand_beside_torchs_hook() -> None:
    (question,) = questions(AGGREGATORS)
    assert question.answers == [
        "powersgd:rank=4 takes 0.400 of the CPU time of torch's hook.",
        "These rows have no spread, so differences are given, and not judged.",
    ]
    assert cells(question)[1][:5] == ["powersgd:rank=4", "4.00 ms", "20.0 ms", "20 %", "25 %"]
    (question,) = questions([aggregator_row(seconds=-0.001)])
    assert cells(question)[0][1] == "-0.200 ms"


def test_runs_that_ended_at_different_steps_are_told() -> None:
    rows = [
        {**row, "timing_only": True} if row["method"] == METHODS[2] else row
        for row in train_rows(losses=(9.0, 9.0))
    ]
    section = page.sections(rows)[0]
    assert any(f"{METHODS[2]} is for timing only" in sentence for sentence in section.about)
    answers = [answer for one in section.questions[:3] for answer in one.answers]
    assert not any(METHODS[2] in answer for answer in answers)
    # A target within the run is named.
    rows = train_rows()
    for row in rows:
        if row["row"] == "summary":
            row["target_from"] = "torch-fp32 at 0.6 of its run"
    answers = page.sections(rows)[0].questions[0].answers
    told = "The target is a validation loss of 3.030: that of torch-fp32 at 0.6 of its run."
    assert told in answers
    # With patience: bytes are those of a step of each run, not of the first seed's length.
    rows = train_rows(losses=(3.0, 3.5))
    for row in rows:
        if row["row"] == "summary":
            row |= {"steps_by_seed": [20, 40], "wire_bytes_per_step": 3_750_000}
    section = page.sections(rows)[0]
    each = ", ".join(f"{method} after 20 to 40 steps" for method in METHODS)
    assert any(line.startswith(f"Runs ended at different steps: {each}.") for line in section.about)
    parts, sent = section.questions[-2:]
    assert cells(parts)[2][7] == "100 ms"  # 3.75 MB at 300 Mbit/s
    assert cells(sent)[2][1] == "3.75 MB"
    assert "did not reach the target in 20 to 40 steps" in " ".join(section.questions[0].answers)
    assert not any("Runs ended" in line for line in page.sections(train_rows())[0].about)


def test_composed_times_are_compared_by_run() -> None:
    off = {**COMPARED, "method": "torch-fp32", "error": 0.25, "composed_seconds": 12.5}
    (question,) = questions([COMPARED, off])
    assert question.answers == [
        "Composed training times differ from those of whole runs by -2.00 % to +25.00 %.",
        "torch-fp32 on 300 Mbit/s, 1 ms latency is off by +25.00 %, more than 10 %.",
    ]
    assert cells(question)[0][:6] == [
        "gradwire-qsgd4", "300 Mbit/s, 1 ms latency", "60", "9.80 s", "10.0 s", "-2.00 %"
    ]  # fmt: skip
    # Composed times of two runs, and errors on two recordings of the same shape, or at two
    # commits, do not mix; errors that two commands measured on one recording stand together.
    later = {**RUN, "date": "2026-01-02T00:00:00+00:00"}
    assert len(page.sections([{**COMPARED, "run": RUN}, {**COMPARED, "run": later}])) == 3
    assert len(page.sections([*ERRORS, {**ERRORS[0], "run": later}])) == 2
    made = page.sections([*ERRORS, {**ERRORS[0], "recorded": later}])
    assert len(made) == 3
    assert "2026-01-02" in made[1].about[1]
    assert len(page.sections([*ERRORS, {**ERRORS[0], "run": {**RUN, "commit": "a"}}])) == 3


def test_a_steps_parts_are_told_as_far_as_they_are_known() -> None:
    title = "How long does a step take, and where does it go?"
    (found,) = [one for one in questions(train_rows()) if one.title == title]
    wire = "3.13 s"  # 2.35 GB in 20 steps at 300 Mbit/s
    assert cells(found)[2][3:8] == ["100 ms", "100 ms", "80.0 ms", "30.0 ms", wire]
    assert cells(found)[1][5] == cells(found)[1][6] == "not known"
    assert found.answers[1] == (
        "gradwire-qsgd4 spends 30.0 ms of a step in its kernels, 15 % of the step's time."
    )
