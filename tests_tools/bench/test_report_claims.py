"""What the report claims: no win within noise, losses in plain words, curves to their own ends."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from report_rows import COLLECTIVE, METHODS, train_rows

from gradwire_tools.bench.interleaved import quartiles
from gradwire_tools.report import bars, learning, page, svg
from gradwire_tools.report.noise import Verdict, by_seeds, by_spreads


def told(rows: list[dict[str, Any]]) -> str:
    """All sentences and table cells of a page."""
    questions = [q for section in page.sections(rows) for q in section.questions]
    cells = [c for q in questions if q.table for row in q.table.rows for c in row]
    return " | ".join([answer for q in questions for answer in q.answers] + cells)


def test_a_difference_counts_beyond_spreads_and_with_every_seed() -> None:
    assert by_spreads((1, 2), (3, 4)) is Verdict.LESS
    assert by_spreads((3, 4), (1, 2)) is Verdict.MORE
    assert by_spreads((1, 3), (2, 4)) is Verdict.NOISE
    assert by_spreads((1, 3), None) is Verdict.UNKNOWN
    less, more = [1.0, 1.1, 1.2], [2.0, 2.1, 2.3]
    assert by_seeds(less, more) is Verdict.LESS
    assert by_seeds(more, less) is Verdict.MORE
    assert by_seeds([1.0, 2.1, 1.2], [1.1, 2.0, 1.3]) is Verdict.NOISE
    assert by_seeds([1.1, 1.2, 2.0], [1.0, 1.0, 1.0]) is Verdict.FEW
    assert by_seeds(less, more, resolution=1.5) is Verdict.NOISE
    assert by_seeds([1.0], [2.0]) is Verdict.UNKNOWN
    assert by_seeds([1.0], [2.0], resolution=1.5) is Verdict.UNKNOWN
    assert by_seeds([1.0, None], [2.0, 2.0]) is Verdict.UNKNOWN


def test_gains_are_told_beyond_noise() -> None:
    text = told(train_rows(losses=(3.0, 3.0, 3.0)))
    assert "gradwire-qsgd4 reaches it 2.50 times faster than torch-fp16-hook." in text
    step = "A step of gradwire-qsgd4 is 2.50 times faster than one of torch-fp16-hook."
    assert step in text
    assert " | 2.50 times faster | " in text
    # Step, time to the loss, loss and an all-reduce, each a little better than the baseline.
    rows = train_rows(step=0.47, losses=(2.99, 3.02, 2.995), baseline=(3.0, 3.01, 3.0))
    close = {**COLLECTIVE, "method": "torch-fp16-hook", "seconds": 0.21}
    text = told([*rows, close, COLLECTIVE])
    assert "faster" not in text
    assert ", lower" not in text
    assert "less time" not in text
    assert text.count("within noise") >= 4 * 2  # a sentence and a cell each
    # What has no spread is not judged.
    text = told(train_rows(losses=(2.5,)))
    assert "gradwire-qsgd4 ends with a loss 16.67 % below that of torch-fp32." in text
    assert "spread unknown" not in text
    assert "spread over seeds is unknown" not in text  # said once, above
    assert ", lower" not in text
    about = page.sections(train_rows())[0].about
    assert any("With one seed, the spread over seeds is unknown" in sentence for sentence in about)
    text = told(train_rows(spread=None))
    assert "the spread of the steps is not recorded, so this is not judged" in text


def test_losses_are_told_as_plainly() -> None:
    text = told(train_rows(step=0.8, losses=(3.5, 3.51, 3.49), baseline=(3.0, 3.0, 3.01)))
    assert "gradwire-qsgd4 did not reach the target in 20 steps" in text
    assert "is 1.60 times slower than one of torch-fp16-hook: it does not pay here" in text
    assert "above that of torch-fp32, more than noise: it costs accuracy here" in text
    for cell in ("not reached", "1.60 times slower", "+16.54 %, higher"):
        assert cell in text
    slow = {**COLLECTIVE, "method": "torch-fp16-hook", "seconds_quartiles": [0.1, 0.11]}
    slow["seconds"] = 0.1
    assert "is 2.00 times slower than torch-fp16-hook; its" in told([slow, COLLECTIVE])
    text = told(train_rows(losses=(3.1, 3.5, 3.8), baseline=(3.0, 3.0, 3.0)))
    assert "ends with a loss 15.56 % above that of torch-fp32, and so with every seed" in text
    assert "+15.56 %, too few seeds to judge" in text
    text = told(train_rows(losses=(3.0, 3.5)))
    assert "gradwire-qsgd4 did not reach the target in 20 steps with 1 of 2 seeds" in text
    rows = train_rows()
    assert "hide" not in told(rows).replace("does not hide", "")  # that was not measured
    for row in rows:
        if row["method"] == "gradwire-qsgd4" and row["row"] == "summary":
            row["final_loss"] = row["time_to_target"] = None
    assert "gradwire-qsgd4 ended with a loss that is not finite" in told(rows)


def test_curves_reach_their_own_ends() -> None:
    """Against time the methods end at 20, 10 and 4 s, and each has all its evaluations."""
    evaluations = [row for row in train_rows() if row["row"] == "evaluation"]
    drawn = learning.against_seconds(evaluations, 3.03)
    strokes = svg.strokes(METHODS)
    ends = {}
    for method in METHODS:
        line = points(drawn, strokes[method].colour)
        assert len(line) == 3
        assert all(40 <= x <= 390 for x, _ in line)
        ends[method] = line[-1][0] - line[0][0]
    assert ends["torch-fp16-hook"] == pytest.approx(ends["torch-fp32"] / 2, abs=0.2)
    assert ends["gradwire-qsgd4"] == pytest.approx(ends["torch-fp32"] / 5, abs=0.2)
    # A curve has the mean and the extremes of its seeds.
    rows = train_rows(losses=(3.0, 3.6), baseline=(3.0, 3.0))
    evaluations = [row for row in rows if row["row"] == "evaluation"]
    curve = learning.curves(evaluations)["gradwire-qsgd4"]
    assert list(curve.steps) == [0, 10, 20]
    assert curve.loss[-1] == pytest.approx(3.3)
    assert (curve.low[-1], curve.high[-1]) == (3.0, 3.6)
    assert "fill-opacity" in learning.against_seconds(evaluations, None)
    evaluations[-1]["loss"] = None  # of one seed: no mean there
    assert learning.curves(evaluations)["gradwire-qsgd4"].loss[-1] is None
    # The caption says whether start up is in the times.
    for composed in (False, True):
        evaluations = [r for r in train_rows(composed=composed) if r["row"] == "evaluation"]
        figure = learning.time_to_loss(evaluations, []).figure
        assert figure is not None
        kernels = "start-up and compilation of kernels"
        assert (f"{kernels} included" in figure.caption) != composed
        assert (f"{kernels} are not included" in figure.caption) == composed


def points(drawn: str, colour: str) -> list[tuple[float, float]]:
    """Of the longest line of a colour."""
    paths = re.findall(rf'<path d="M([^"HZ]+)" fill="none" stroke="{re.escape(colour)}"', drawn)
    longest = max(paths, key=len)
    pairs = [point.split() for point in longest.split("L")]
    return [(float(x), float(y)) for x, y in pairs]


def test_spread_limit_and_ticks_are_drawn() -> None:
    bar = bars.Bar("a <b>", [1.0, 2.0], spread=(2.5, 3.5), limit=4.0)
    drawn = bars.bars([bar], "per step", "a title", ("computing", "exposed"))
    assert "a <b>" in html.unescape(drawn)
    assert "<b>" not in drawn
    assert drawn.count('class="tick"') == 2  # in the legend, too
    assert drawn.count('class="spread"') == 2
    # Ticks are round and within.
    for low, high in ((0.001, 1000.0), (1.0, 3.0), (0.37, 0.41), (5e-7, 2e-6), (90.0, 130.0)):
        for log in (False, True):
            ticks = svg.Scale(low, high, 0.0, 100.0, log).ticks()
            assert 2 <= len(ticks) <= 9
            assert all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)
    # Quartiles are the bounds of the middle half.
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_the_page_begins_with_the_result_and_ends_with_what_was_run() -> None:
    (said,) = page.results(train_rows())
    assert said == (
        "gradwire-qsgd4 trains to the same loss 2.50 times faster than torch-fp16-hook, and 5.00 "
        "times faster than torch-fp32 on a network of 300 Mbit/s, 1 ms latency."
    )
    close = train_rows(step=0.47, losses=(2.99, 3.02, 2.995), baseline=(3.0, 3.01, 3.0))
    (noise,) = page.results(close)
    assert noise.startswith("gradwire-qsgd4 trains to the same loss in the time of torch-fp16-hook")
    html = page.render(train_rows())
    assert html.index(said) < html.index("<h2>") < html.index("What was run")
    assert page.sections(train_rows())[-1].title == "What was run"
    assert page.results([COLLECTIVE]) == []
    assert page.results([*train_rows(), *train_rows("none")]) == []  # a map says where it pays


def test_one_seed_is_no_noise() -> None:
    for rows in (train_rows(step=0.47), train_rows(losses=(3.0,))):
        assert "within noise" not in page.render(rows).replace("within noise</text>", "")
