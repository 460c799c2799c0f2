"""The report on `bench train --sharded`: the best 16-bit method is the bar, bytes are by kind."""

from __future__ import annotations

import re

import pytest
from report_rows import METHODS, SIMULATED_SHARDED, sharded_rows, train_rows

from gradwire_tools.bench.train.view import table
from gradwire_tools.report import gain
from gradwire_tools.report.kinds import check
from gradwire_tools.report.page import sections
from gradwire_tools.report.parts import Question, Section


def training(rows: list[dict[str, object]]) -> Section:
    return next(one for one in sections(rows) if one.title == "Training gpt, 4 ranks, sharded")


def question(section: Section, start: str) -> Question:
    return next(one for one in section.questions if one.title.startswith(start))


def cells(found: Question) -> dict[str, dict[str, str]]:
    """The table's cells by method and heading."""
    assert found.table is not None
    return {row[0]: dict(zip(found.table.headings, row, strict=True)) for row in found.table.rows}


BEST = ((0.4, "fsdp-mixed"), (0.6, "fsdp-bf16"))


@pytest.mark.parametrize(("mixed", "best"), BEST)
def test_the_best_of_both_is_the_16_bit_baseline(mixed: float, best: str) -> None:
    step = {"fsdp-mixed": mixed, "fsdp-bf16": 0.5}
    section = training(sharded_rows(mixed, step=0.2))
    ratio = f"{step[best] / 0.2:.2f} times faster"
    for start in ("How long until", "How long does a step"):
        found = cells(question(section, start))
        assert found["qsdp:w=8:g=8"][f"against {best}"].startswith(ratio), start
        assert found[best][f"against {best}"] == "–"
    told = question(section, "How long does a step").answers
    assert any(f"{ratio} than one of {best}" in answer for answer in told)
    assert not any(answer.startswith("A step of fsdp-fp32") for answer in told)
    utility = question(section, "How much time does a method save")
    assert [answer.split(": ")[0] for answer in utility.answers] == ["qsdp:w=8:g=8"]
    saved = cells(utility)
    (last,) = (text for heading, text in saved[best].items() if heading.endswith("step 20"))
    assert last.startswith("the best 16-bit baseline"), last
    learned = cells(question(section, "Does compression change"))
    assert "against fsdp-fp32" in learned["qsdp:w=8:g=8"]


def test_bytes_are_by_kind() -> None:
    found = cells(question(training(sharded_rows(0.4)), "How many bytes"))
    assert found["fsdp-bf16"]["weights, per step"] == "40.0 MB"
    assert found["fsdp-bf16"]["gradients, per step"] == "20.0 MB"
    assert found["fsdp-mixed"]["weights, per step"] == "80.0 MB"
    assert found["qsdp:w=8:g=8"]["against fsdp-mixed"] == "3.33 times fewer"
    (_, *headings) = found["fsdp-bf16"]
    assert headings[2:4] == ["weights, per step", "gradients, per step"]
    # Rows of ddp are as before and apart.
    made = sections([*train_rows(), *sharded_rows()])
    titles = [one.title for one in made]
    assert {"Training gpt, 4 ranks", "Training gpt, 4 ranks, sharded"} <= set(titles)
    ddp = made[titles.index("Training gpt, 4 ranks")]
    found = cells(question(ddp, "How many bytes"))
    assert set(found) == set(METHODS)
    assert "against torch-fp16-hook" in found[METHODS[2]]
    assert not any("weights" in heading for heading in found[METHODS[2]])
    assert any("policy param fp32" in line for line in training(sharded_rows()).about)


def test_maps_and_the_terminals_table_have_the_same_bar() -> None:
    rows = [*sharded_rows(), *sharded_rows(net="1gbit,1ms")]
    (found,) = (one for one in sections(rows) if one.title.endswith("gain over 16 bit by network"))
    assert "sharded" in found.title
    assert all("against fsdp-mixed" in answer for answer in found.questions[0].answers)
    assert "fsdp-fp32" not in re.sub("against .*?:", "", " ".join(found.questions[0].answers))
    summaries = [row for row in sharded_rows() if row["row"] == "summary"]
    assert gain.of_summaries(summaries, [])["fsdp-mixed"].standing is gain.Standing.BAR
    # Rows are checked by their keys.
    for row in sharded_rows():
        check(row, "here")
        with pytest.raises(Exception, match="'weights_wire_bytes' is \"many\""):
            check({**row, "weights_wire_bytes": "many"}, "here")
    # The terminals table has the same baseline.
    for mixed, bf16, of_mixed in ((0.25, "2.00×", "1.00×"), (1.0, "1.00×", "2.00×")):
        made = table([row for row in sharded_rows(mixed) if row["row"] == "summary"])
        names, ratios = ([str(cell) for cell in made.columns[place].cells] for place in (0, 3))
        assert made.columns[3].header == "of 16 bit"
        found = dict(zip(names, ratios, strict=True))
        assert (found["fsdp-bf16"], found["fsdp-mixed"]) == (bf16, of_mixed)


def test_predicted_steps_stand_by_network_and_method() -> None:
    torchs = {"method": "fsdp-bf16", "seconds": 4.0, "ratio": 2.0, "compute_seconds": 0.0}
    slow = {"net": "100mbit,1ms", "seconds": 21.0, "sweep": "rate", "value": "100mbit"}
    rows = [SIMULATED_SHARDED, {**SIMULATED_SHARDED, **torchs}, {**SIMULATED_SHARDED, **slow}]
    for row in rows:
        check(row, "here")
    made = sections(rows)
    assert [one.title for one in made] == ["Simulation of gpt2 under FSDP2", "What was run"]
    first, second = made[0].questions
    assert "1 Gbit/s" in first.title
    assert "100 Mbit/s" in second.title
    found = cells(first)
    ours = found["qsdp:w=8:g=8, sra"]
    assert (ours["predicted"], ours["computing"], ours["limit"]) == ("2.30 s", "300 ms", "2.00 s")
    assert (ours["weights"], ours["gradients"], ours["ratio"]) == ("160 MB", "90.0 MB", "4.00×")
    assert found["fsdp-bf16, sra"]["predicted"] == "4.00 s"
    assert cells(second)["qsdp:w=8:g=8, sra"]["predicted"] == "21.0 s"
    assert first.figure is not None
    assert "fsdp-bf16" in first.figure.svg
    with pytest.raises(Exception, match="'blocking' is null"):
        check({**SIMULATED_SHARDED, "blocking": None}, "here")
