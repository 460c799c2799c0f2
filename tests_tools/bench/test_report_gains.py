"""What the report claims: no win within noise, losses in plain words; gains over the best 16-bit
baseline, at several targets and over networks; and that pictures are drawn whatever the numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from report_rows import METHODS, RUN, scaled, sharded_rows, train_rows

from gradwire_tools.bench.train.view import table
from gradwire_tools.report import draw, learning, page
from gradwire_tools.report.gain import (
    Gain,
    Standing,
    by_seeds,
    by_spreads,
    judged,
    of_summaries,
    paired,
)
from gradwire_tools.report.parts import (
    COLOURS,
    GAIN,
    LOSS,
    Bar,
    Bars,
    Chart,
    Dots,
    Lines,
    Section,
    TileChart,
    looks,
    series,
)

FP16, BF16 = "torch-fp16-hook", "torch-bf16-hook"


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


def test_gain_is_against_the_better_16_bit_baseline() -> None:
    times = {FP16: [11.0, 11.1, 11.0], BF16: [9.0, 9.1, 9.0], "a": [3.0, 3.0, 3.1]}
    found = judged(times, {})
    assert found[BF16] == Gain(Standing.BAR, 1.0)
    assert found["a"] == Gain(Standing.GAIN, 3.0)
    assert found[FP16].standing is Standing.LOSS
    assert found[FP16].ratio == pytest.approx(9 / 11)
    # Standings.
    for mine, standing in (
        ([20.0, 21.0, 22.0], Standing.LOSS),
        ([9.9, 10.2, 9.9], Standing.NOISE),
        ([9.0, 7.0, 2.0], Standing.UNJUDGED),
        ([5.0, None, 5.0], Standing.NEVER),
    ):
        assert judged({FP16: [10.0, 10.0, 10.0], "a": mine}, {})["a"].standing is standing
    times = {FP16: [10.0, 10.0, 10.0], "a": [9.0, 9.0, 9.0]}
    assert judged(times, {})["a"].standing is Standing.GAIN
    # Evaluations are further apart than that.
    assert judged(times, {FP16: (1.5, 0.0)})["a"].standing is Standing.NOISE
    # Without a 16-bit baseline nothing is known.
    assert judged({"a": [1.0]}, {})["a"].standing is Standing.UNKNOWN
    assert judged({FP16: [None], "a": [1.0]}, {})["a"].standing is Standing.ONLY
    assert judged({FP16: [1.0], "a": [None]}, {}, ["a"])["a"].standing is Standing.TIMING


def evaluations(losses: dict[str, list[float]], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """Of three seeds, at steps 0, 10, ..., with a step's seconds."""
    return [
        {"row": "evaluation", "method": name, "seed": seed, "step": 10 * turn, "loss": loss,
         "seconds": 10 * turn * seconds[name] * (1 + 0.001 * seed)}
        for name, curve in losses.items() for seed in range(3) for turn, loss in enumerate(curve)
    ]  # fmt: skip


def test_utility_is_at_the_target_of_each_seed() -> None:
    rows = evaluations({"torch-fp32": [9.0, 4.0], FP16: [9.0, 4.0]}, {"torch-fp32": 2.0, FP16: 1.0})
    for row in rows:
        row["loss"] += row["seed"]
    found = learning.at_targets(rows)
    assert found is not None
    assert found.table is not None
    assert found.table.headings[1] == "loss 5.000, step 10"
    assert [row[1] for row in found.table.rows][1] == "the best 16-bit baseline"
    # There is no utility without a 16-bit baseline, or a target.
    assert learning.at_targets([]) is None
    assert learning.at_targets(evaluations({"a": [2.0, 1.0]}, {"a": 1.0})) is None
    assert learning.at_targets(evaluations({FP16: [2.0]}, {FP16: 1.0})) is None


def test_a_summary_says_how_far_apart_evaluations_were() -> None:
    """Where rows of evaluations are left out, a time to the target is known as before."""
    rows = train_rows(step=0.4, losses=(3.0,) * 3)  # 8 s against 10 s; evaluations 4 and 5 s apart
    for row in rows:
        if row["row"] == "summary":
            row["evaluation_gap_seconds"] = 1.0
    thinned = [row for row in rows if row.get("step") != 10]
    summaries, left = (
        [r for r in thinned if r["row"] == kind] for kind in ("summary", "evaluation")
    )
    assert of_summaries(summaries, left)[METHODS[2]].standing is Standing.GAIN
    told = learning.time_to_loss(left, summaries).answers
    assert f"{METHODS[2]} reaches it 1.25 times faster than {FP16}." in told
    at_targets = learning.at_targets(left, summaries)
    assert at_targets is not None
    assert at_targets.answers[0] == f"{METHODS[2]} is within noise at 1 of 1 target."
    assert "Some of the runs' evaluations are not among these rows." in at_targets.answers[1]
    assert "is known to 20.0 s only, not to 1.00 s" in at_targets.answers[1]
    for row in summaries:
        row["evaluation_gap_seconds"] = row["seconds"]
    assert len(learning.at_targets(left, summaries).answers) == 1  # type: ignore[union-attr]


def test_a_composed_gain_within_the_noise_of_the_timed_steps_is_noise() -> None:
    """8 s against 10 s, with every seed, where steps vary by half: four steps tell less than 24."""
    for composed, steps, standing in (
        (False, 4, Standing.GAIN), (True, 4, Standing.NOISE), (True, None, Standing.GAIN),
    ):  # fmt: skip
        rows = train_rows(step=0.4, spread=0.1, losses=(3.0,) * 3, composed=composed)
        summaries = [row for row in rows if row["row"] == "summary"]
        for row in summaries:
            row["evaluation_gap_seconds"] = 0.1
            row["timed_steps"] = steps
        assert of_summaries(summaries, [])[METHODS[2]].standing is standing
        told = " ".join(learning.time_to_loss([], summaries).answers)
        # Half of 8 s and 0.4 of 10 s, each over the root of 4 steps.
        why = "evaluations are up to 100 ms apart, and by the timed steps this difference is known"
        assert (f"{why} to 2.83 s" in told) == (standing is Standing.NOISE)


def of_run(rows: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """The rows as of another run, whose `run` has these fields."""
    return [{**row, "run": {**RUN, **fields}} for row in rows]


def test_each_run_has_its_own_section_and_map() -> None:
    """Two runs on the same networks: a method is compared within its run."""
    for field in ("command", "commit", "date"):
        other = [scaled(row, 2) for row in of_run(networks(), **{field: "another"})]
        made = page.sections([*networks(), *other])
        answers = [a for section in made for q in section.questions for a in q.answers]
        of_half = [a for a in answers if a.startswith(f"{FP16} ")]
        assert not any(f"than {FP16}" in answer for answer in of_half)
        titles = [one.title for one in made[:-1]]
        assert all(one.startswith("Training gpt, 4 ranks") for one in titles)
        assert len(titles) == 6
        tables = [one.questions[1].table for one in made[:2]]
        assert [table and len(table.headings) for table in tables] == [3, 3]
        assert sum("another" in line for one in made[:-1] for line in one.about) == 3
    # On different networks, they share a map.
    rows = [*train_rows("1gbit,1ms"), *of_run(train_rows("2gbit,1ms"), command="another")]
    table = section_of(rows).questions[1].table
    assert table is not None
    assert len(table.headings) == 3


def test_times_are_paired_by_seed() -> None:
    """The method is a tenth faster with each seed, though the order of seeds differs."""
    rows = train_rows(losses=(3.0,) * 3)
    summaries = [row for row in rows if row["row"] == "summary"]
    by_method = {row["method"]: row for row in summaries}
    by_method[FP16] |= {"seeds": [0, 1, 2], "time_to_target_by_seed": [10.0, 20.0, 30.0]}
    by_method[METHODS[2]] |= {"seeds": [2, 0, 1], "time_to_target_by_seed": [27.0, 9.0, 18.0]}
    assert of_summaries(summaries, [])[METHODS[2]].standing is Standing.UNJUDGED
    assert paired(summaries[1:], "time_to_target") == [[10.0, 20.0, 30.0], [9.0, 18.0, 27.0]]
    by_method[METHODS[2]] |= {"seeds": [7, 8, 9]}
    assert of_summaries(summaries, [])[METHODS[2]].standing is Standing.UNKNOWN


def networks(**fields: Any) -> list[dict[str, Any]]:
    """Three seeds on a slow network, where gradwire gains, and a fast one, where it loses."""
    slow = train_rows("100mbit,1ms", step=0.1, losses=(3.0,) * 3, **fields)
    return slow + train_rows("10gbit,1ms", step=2.0, losses=(3.0,) * 3, **fields)


def section_of(rows: list[dict[str, Any]]) -> Section:
    return next(one for one in page.sections(rows) if "gain over 16 bit" in one.title)


def test_more_networks_than_columns_make_several_charts() -> None:
    rows = [row for rate in range(1, 8) for row in train_rows(f"{rate}gbit,1ms")]
    charts = [question.chart for question in section_of(rows).questions]
    assert [isinstance(one, TileChart) and len(one.columns) for one in charts] == [5, 2, False]
    # Networks are columns, with how they were measured.
    shown = section_of([*networks(), *networks(composed=True)]).questions[1]
    assert shown.table is not None
    headings = [heading.rpartition(", ")[2] for heading in shown.table.headings[1:]]
    assert headings == ["whole", "composed", "whole", "composed"]


def test_the_terminals_table_has_the_same_bar() -> None:
    summaries = [row for row in sharded_rows() if row["row"] == "summary"]
    assert of_summaries(summaries, [])["fsdp-mixed"].standing is Standing.BAR
    for mixed, bf16, of_mixed in ((0.25, "0.500×", "1.00×"), (1.0, "1.00×", "0.500×")):
        made = table([row for row in sharded_rows(mixed) if row["row"] == "summary"])
        names, ratios = ([str(cell) for cell in made.columns[place].cells] for place in (0, 3))
        assert made.columns[3].header == "faster\nthan\n16 bit"
        found = dict(zip(names, ratios, strict=True))
        assert (found["fsdp-bf16"], found["fsdp-mixed"]) == (bf16, of_mixed)


def test_only_what_was_judged_has_a_colour() -> None:
    for standing in (Standing.NOISE, Standing.UNJUDGED, Standing.BAR):
        assert not draw.tile(Gain(standing, 2.0))["fill"]
    assert not draw.tile(None)["fill"]
    for never in (Standing.NEVER, Standing.LOSS):
        assert draw.tile(Gain(never, 0.5))["facecolor"][0] == COLOURS[LOSS][0]
    # A loss is as strong as a gain of the same factor.
    for ratio in (1.1, 2.0, 4.0, 100.0):
        gain, loss = (
            draw.tile(Gain(Standing.GAIN, ratio)),
            draw.tile(Gain(Standing.LOSS, 1 / ratio)),
        )
        assert gain["facecolor"][1] == pytest.approx(loss["facecolor"][1])
    assert draw.tile(Gain(Standing.GAIN, 4.0))["facecolor"] == (COLOURS[GAIN][0], draw.STRONGEST)


Colour = tuple[float, ...]  # each channel 0 to 1


def luminance(colour: Colour) -> float:
    """As WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Colour, other: Colour) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_reads_on_tiles_and_a_loss_is_as_visible_as_a_gain(scheme: int) -> None:
    colours = {name: to_rgb(pair[scheme]) for name, pair in COLOURS.items()}
    tiles = [
        tuple(
            draw.STRONGEST * top + (1 - draw.STRONGEST) * below
            for top, below in zip(colours[side], colours["card"], strict=True)
        )
        for side in (GAIN, LOSS)
    ]
    assert all(contrast(tile, colours["ink"]) >= 4.5 for tile in tiles)  # WCAG 2, level AA
    visible = [contrast(tile, colours["card"]) for tile in tiles]
    assert max(visible) / min(visible) < 1.25


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
