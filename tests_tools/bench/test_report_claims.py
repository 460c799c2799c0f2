"""What the report claims: no win within noise, losses in plain words, curves to their own ends; and
that pictures are drawn whatever the numbers."""

from __future__ import annotations

import re

import pytest
from report_rows import COLLECTIVE, KERNEL, METHODS, RUN, train_rows

from gradwire_tools.report import draw, learning, page, training
from gradwire_tools.report.gain import Gain, Standing, by_seeds, by_spreads
from gradwire_tools.report.parts import Bar, Bars, Chart, Dots, Lines, TileChart, looks, series


def test_a_difference_counts_beyond_spreads_and_with_every_seed() -> None:
    assert by_spreads((1, 2), (3, 4)) is Standing.GAIN
    assert by_spreads((3, 4), (1, 2)) is Standing.LOSS
    assert by_spreads((1, 3), (2, 4)) is Standing.NOISE
    assert by_spreads((1, 3), None) is Standing.SPREADLESS
    less, more = [1.0, 1.1, 1.2], [2.0, 2.1, 2.3]
    assert by_seeds(less, more) is Standing.GAIN
    assert by_seeds(more, less) is Standing.LOSS
    assert by_seeds([1.0, 2.1, 1.2], [1.1, 2.0, 1.3]) is Standing.NOISE
    assert by_seeds([1.1, 1.2, 2.0], [1.0, 1.0, 1.0]) is Standing.FEW
    assert by_seeds(less, more, resolution=1.5) is Standing.NOISE
    assert by_seeds([1.0], [2.0]) is Standing.SPREADLESS
    assert by_seeds([1.0], [2.0], resolution=1.5) is Standing.SPREADLESS
    assert by_seeds([1.0, None], [2.0, 2.0]) is Standing.SPREADLESS


def test_curves_reach_their_own_ends() -> None:
    """Against time the methods end at 20, 10 and 4 s, and each has all its evaluations."""
    evaluations = [row for row in train_rows() if row["row"] == "evaluation"]
    chart = learning.against_seconds(evaluations, 3.03)
    assert {line.label: list(line.x) for line in chart.lines} == {
        METHODS[0]: [0, 10, 20], METHODS[1]: [0, 5, 10], METHODS[2]: [0, 2, 4]
    }  # fmt: skip
    assert [line.mark for line in chart.lines] == [(20, 3.0), (10, 3.0), (4, 3.0)]
    # A curve has the mean and the extremes of its seeds.
    rows = train_rows(losses=(3.0, 3.6), baseline=(3.0, 3.0))
    evaluations = [row for row in rows if row["row"] == "evaluation"]
    *_, curve = learning.curves(evaluations)
    assert [round(values[-1], 3) for values in (curve.y, curve.low, curve.high)] == [3.3, 3.0, 3.6]
    evaluations[-1]["loss"] = None  # of one seed: no mean there
    assert learning.curves(evaluations)[-1].y[-1] is None


def test_the_page_begins_with_the_result_and_ends_with_what_was_run() -> None:
    (said,) = training.headline(train_rows())
    assert said == (
        "gradwire-qsgd4 trains to the same loss 2.50 times faster than torch-fp16-hook, and 5.00 "
        "times faster than torch-fp32 on a network of 300 Mbit/s, 1 ms latency."
    )
    close = train_rows(step=0.47, losses=(2.99, 3.02, 2.995), baseline=(3.0, 3.01, 3.0))
    (noise,) = training.headline(close)
    assert noise.startswith("gradwire-qsgd4 trains to the same loss in the time of torch-fp16-hook")
    html = page.render(train_rows())
    assert html.index(said) < html.index("<h2>") < html.index("What was run")
    assert 'class="result"' not in page.render([COLLECTIVE])
    assert training.headline([*train_rows(), *train_rows("none")]) == []  # a map says where it pays


def test_a_busy_machine_is_said_in_a_sentence() -> None:
    for load, busy in ((1.5, False), (2.0, False), (14.39, True), (None, False)):
        run = {**RUN, "machine": "a processor, 2 cores, 24 GiB", "load": load}
        about = " ".join(page.sections([{**KERNEL, "run": run}])[-1].about)
        assert ("a load of 14.39 on 2" in about) is busy


VALUES = ((0.0, 0.0), (1e-100, 1e100), (3.0,), (2.0, 2.0), (0.5, None, 0.7, 4.0), (1.0, -2.0, 3.0))


def charts(values: tuple[float | None, ...], log: bool) -> list[Chart]:
    """One of each kind, of these values."""
    known = [abs(value) for value in values if value is not None]
    points = [("a <b>", note, x, y, y, 3.0, y) for note in ("", "c") for x, y in enumerate(values)]
    bars = [Bar(f"a <b> {at}", [x, x], (x, x), x) for at, x in enumerate(known)]
    return [
        Lines(series(points), "x", "y", (1.0, "a <b>"), log, log),
        Bars(bars, "per a <b>", ("c", "d"), sizes=log),
        Dots([("a <b>", [("c", x)]) for x in known], "x", (1.0, "e") if log else None),
        TileChart(["f, a <b>"], [("c", [Gain(Standing.GAIN, x or 1.0), None][:1]) for x in known]),
    ]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", VALUES, ids=repr)
def test_all_numbers_are_drawn(values: tuple[float | None, ...], log: bool) -> None:
    for chart in charts(values, log):
        drawn = draw.svg(chart, "a title <b>")
        assert not re.search(r"\b(nan|inf)\b", drawn.replace("infinity", "")), chart
        assert "a &lt;b&gt;" in drawn
        assert "<b>" not in drawn
        assert "<title>a title &lt;b&gt;</title>" in drawn
        assert not re.search(
            r"url\(|https?://(?!www.w3.org/2000/svg)|<style|#[0-9a-f]{6}[;\"]", drawn
        )


def test_pictures_are_the_same_each_time_and_their_names_are_not() -> None:
    chart = charts((1.0, 3.0), False)[2]
    drawn = [draw.svg(chart, "a", salt) for salt in ("one", "one", "two")]
    assert drawn[0] == drawn[1]
    names = [set(re.findall(r'id="(\w+)"', one)) for one in drawn]
    assert names[0]
    assert not names[0] & names[2]


def test_ticks_are_round_and_few() -> None:
    for low, high in ((0.001, 1000.0), (1.0, 3.0), (0.37, 0.41), (5e-7, 2e-6), (90.0, 130.0)):
        for log in (False, True):
            line = series(("a", "", x, x) for x in (low, high))
            drawn = draw.svg(Lines(line, "X", "Y", log_x=log, log_y=log), "a")
            ticks = re.findall(r">([\d.]+(?:e-?\d+)?[kM]?)</text>", drawn)
            assert 4 <= len(ticks) <= 18, (low, high, log, ticks)  # of two axes


def test_torchs_methods_look_alike_and_others_differ() -> None:
    found = looks(["torch-fp32", "a", "torch-fp16-hook", *map(str, range(7))])
    assert [found[name][0] for name in ("torch-fp32", "torch-fp16-hook")] == ["t0", "t1"]
    assert len(set(found.values())) == len(found) == 10
    assert len({colour for colour, _ in looks(map(str, range(9))).values()}) == 9
