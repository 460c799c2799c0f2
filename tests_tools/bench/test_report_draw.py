"""Pictures of charts: whatever the numbers, they are drawn; words are text, and names differ."""

from __future__ import annotations

import re

import pytest

from gradwire_tools.report import draw
from gradwire_tools.report.gain import Gain, Standing
from gradwire_tools.report.parts import Bar, Bars, Chart, Dots, Lines, Tiles, looks, series

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
        Tiles(["f, a <b>"], [("c", [Gain(Standing.GAIN, x or 1.0), None][:1]) for x in known]),
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
