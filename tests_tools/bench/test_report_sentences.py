"""Remarks of the report: on the machine's load, on axes, on random gradients, on doctor's rows."""

from __future__ import annotations

from typing import Any

from report_rows import COLLECTIVE, DOCTOR, KERNEL, RUN, SWEPT, TRANSPORT, VALIDATED, train_rows

from gradwire_tools.report import page


def all_text(rows: list[dict[str, Any]]) -> str:
    """Sentences, captions and figures of a page."""
    made = page.sections(rows)
    questions = [q for section in made for q in section.questions]
    found = [sentence for section in made for sentence in section.about]
    found += [sentence for q in questions for sentence in q.answers]
    return " | ".join(found + [q.figure.caption + q.figure.svg for q in questions if q.figure])


def test_doctors_rows_have_a_verdict_and_bars() -> None:
    section = page.sections(DOCTOR)[0]
    steps, parts = section.questions
    assert steps.title == "Does compression pay here?"
    assert steps.answers == ["Compression pays here: <so>."]
    assert steps.figure is not None
    assert "exposed communication" in steps.figure.svg
    assert "2 ranks, 100 Mbit/s, 1 ms latency" in steps.figure.caption
    assert steps.figure.svg.count('fill-opacity="0.4"') == 3 + 1  # computing, and in the legend
    assert steps.table is not None
    assert list(steps.table.rows[2]) == [
        "gradwire-qsgd4", "300 ms", "100 ms", "200 ms", "300 ms", "285 ms to 315 ms", "3"
    ]  # fmt: skip
    assert parts.table is not None
    assert list(parts.table.rows[0]) == ["gradwire", "yes", "0.1.0"]
    # Every examination has its section.
    joined = [{**row, "net": "as it is"} if "net" in row else row for row in DOCTOR]
    made = page.sections([*DOCTOR, *joined, DOCTOR[0], DOCTOR[0], DOCTOR[-1]])
    assert [len(section.questions) for section in made[:-1]] == [2, 2, 1, 2]
    figure = made[1].questions[0].figure
    assert figure is not None
    assert "the network between torchrun's ranks" in figure.caption


def test_a_busy_machine_is_said_in_a_sentence() -> None:
    for load, busy in ((1.5, False), (2.0, False), (14.39, True), (None, False)):
        run = {**RUN, "machine": "a processor, 2 cores, 24 GiB", "load": load}
        about = " ".join(page.sections([{**KERNEL, "run": run}])[-1].about)
        assert ("a load of 14.39 on 2" in about) is busy
        assert ("1 of 1 run" in about) is busy


def test_sentences_are_grammatical_and_axes_say_what_they_are() -> None:
    assert "1 row of 1 is without command" in all_text([KERNEL])
    assert "2 rows of 2 are without command" in all_text([KERNEL, KERNEL])
    assert "from 1 row." in page.render([KERNEL])
    assert "from 2 rows." in page.render([KERNEL, KERNEL])
    assert all_text(train_rows()).count("the spread over seeds is unknown") == 1
    powersgd = {**COLLECTIVE, "method": "torch-powersgd", "nmse": 1.2}
    assert "random and have no low rank" in all_text([powersgd])
    assert "random and have no low rank" not in all_text([COLLECTIVE])
    # Logarithmic axes say so.
    text = all_text(TRANSPORT)
    assert "latency, µs (logarithmic)" in text
    assert "bytes of a message (logarithmic)" in text
    text = all_text(SWEPT)
    assert "ranks (logarithmic)" in text
    assert "seconds (logarithmic)" in text
    assert "limit of memory / time (logarithmic)" in all_text([KERNEL])
    assert "seconds (logarithmic)" in all_text([VALIDATED])
    text = all_text(train_rows())
    assert "utility (logarithmic)" in text
    assert text.count("logarithmic") == 1
