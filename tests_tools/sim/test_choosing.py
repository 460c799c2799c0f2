"""The planner's choice of a setting, on costs that are given."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from command_line import refused
from gradwire import Options, codecs
from gradwire.aggregators import registry
from gradwire.codecs import QSGD, TopK
from gradwire.lang import Codec
from gradwire_tools.sim import Curves, Net, choice
from gradwire_tools.sim.choice import FULL, HALF, Setting, Situation, choose, simulate
from gradwire_tools.sim.curves import Software
from gradwire_tools.sim.rank import Overheads
from gradwire_tools.sim.selective import decisions
from machines import priced
from rooms.decide import auto

CODEC = QSGD(bits=4)
LAYERS = ((512, 512), (512,), (2048, 512), (64, 64), (10, 512))


def curves(coded: float = 1e-9, call: float = 2e-6, codec: Codec = CODEC, **link: float) -> Curves:
    """Seconds per value and call of a codec; 0.3 and 0.15 ns per value for casts and copies."""
    seconds = {codec: coded, HALF: 3e-10, FULL: 1.5e-10}
    prices = {codec: (call, value, value / 2) for codec, value in seconds.items()}
    engine = Overheads(start=1e-4, task=5e-6, post=5e-6)
    return priced(prices, engine=engine, link=Software(**{"overhead": 2e-5, "memory": 5e9, **link}))


def situation(rate: float, latency: float = 1e-4, **given: Any) -> Situation:
    of = {"shapes": LAYERS, "ranks": 2, "curves": curves(), **given}
    return Situation(net=Net("given", rate, latency), **of)


def simulated_once(where: Situation, monkeypatch: pytest.MonkeyPatch) -> Situation:
    """The situation; from now on each of its settings is simulated once, and no other situation."""
    once = cache(lambda setting: simulate(where, setting))
    monkeypatch.setattr(choice, "simulate", lambda _, setting: once(setting))
    return where


def test_compression_pays_on_a_slow_network_alone() -> None:
    slow = choose(situation(1e8, 1e-6, shapes=LAYERS[:2]), [CODEC])
    fast = choose(situation(1e12, 1e-6, shapes=LAYERS[:2]), [CODEC])
    assert slow.compresses
    assert slow.best.setting.codec == CODEC
    assert slow.best.seconds < 0.5 * slow.uncompressed.seconds
    assert " times faster than " in slow.verdict
    assert not fast.compresses
    assert fast.best.setting.codec in (FULL, HALF)
    assert fast.verdict.startswith(f"{choice.name(fast.best.setting.codec)} is best: ")
    assert "qsgd" in fast.verdict


def test_a_codec_must_save_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is chosen just below what it saves, and not just above."""
    where = simulated_once(situation(3e9, 1e-6, shapes=LAYERS[:2]), monkeypatch)
    found = choose(where, [CODEC])
    times = {codec: found.of(codec).seconds for codec in (FULL, HALF, CODEC)}
    saved = [1 - times[HALF] / times[FULL], 1 - times[CODEC] / times[HALF]]
    assert auto.MARGIN == 0.05
    seen = set()
    for margin in (0.0, *(one + by for one in saved for by in (-0.001, 0.001)), 0.99):
        monkeypatch.setattr(auto, "MARGIN", margin)
        saves = {
            codec: all(times[codec] < (1 - margin) * times[other] for other in before)
            for codec, before in ((FULL, ()), (HALF, (FULL,)), (CODEC, (FULL, HALF)))
        }
        expected = [codec for codec in saves if saves[codec]][-1]
        best = choose(where, [CODEC]).best
        assert (best.setting.codec, best.seconds) == (expected, times[expected])
        seen.add(expected)
    assert seen >= {FULL, CODEC}


def test_it_is_the_best_of_what_was_simulated() -> None:
    where = situation(1e9, 1e-3, ranks=3, backward=0.02, shapes=LAYERS[:2])
    found = choose(where, [CODEC])
    seconds = [one.seconds for one in found.every]
    assert seconds == sorted(seconds)
    assert len({one.setting for one in found.every}) == len(seconds) > 40
    for one in found.every[::20]:
        assert simulate(where, one.setting) == one
    for codec in (FULL, HALF, CODEC):
        fastest = next(one for one in found.every if one.setting.codec == codec)
        assert fastest.seconds <= found.of(codec).seconds < 1.05 * fastest.seconds
    algorithms = {one.setting.options.algorithm for one in found.every}
    assert algorithms == {"sra", "ring", "tree", "parameter_server", "all_gather"}


def test_a_default_is_left_for_what_can_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is expected to save very little would often be slower in truth."""
    where = simulated_once(situation(1e8, 1e-3, shapes=((1, 1 << 16),)), monkeypatch)
    monkeypatch.setattr(choice, "_WORTH", 0.0)
    fastest = choose(where, [CODEC]).of(CODEC)
    assert fastest.setting.options.segments is not None
    monkeypatch.setattr(choice, "_WORTH", 0.5)
    default = choose(where, [CODEC]).of(CODEC)
    assert default.setting.options.segments is None
    assert 0.5 * default.seconds < fastest.seconds < default.seconds


def test_the_default_algorithm_is_left_for_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    where = simulated_once(situation(1e9, 1e-4, shapes=((1, 1 << 21),), ranks=3), monkeypatch)
    monkeypatch.setattr(choice, "_WORTH", 0.0)
    fastest, default = choose(where, [CODEC]).of(CODEC), Options().algorithm
    assert fastest.setting.options.algorithm != default
    monkeypatch.setattr(choice, "_WORTH", 0.1)
    found = choose(where, [CODEC]).of(CODEC)
    assert found.setting.options.algorithm == default
    assert found.seconds < fastest.seconds / 0.9


def test_coordinated_rounds_are_chosen_for_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    where = simulated_once(situation(1e9, ranks=3, shapes=LAYERS[:3]), monkeypatch)
    found = choose(where, [CODEC]).of(CODEC)
    assert not found.setting.options.coordinated
    options = replace(found.setting.options, coordinated=True)
    rounds = choice.simulate(where, replace(found.setting, options=options))
    assert 0.9 * found.seconds < rounds.seconds < found.seconds
    monkeypatch.setattr(choice, "_WORTH", 0.0)
    assert choose(where, [CODEC]).of(CODEC).setting.options.coordinated


def test_buckets_travel_together_where_latency_costs_most() -> None:
    many = ((512, 1024),) * 16
    late = choose(situation(1e11, 2e-2, shapes=many, ranks=2), [CODEC]).of(CODEC)
    assert late.setting.coalesce_bytes > 25 << 20
    assert "one bucket" in str(late.setting)
    alone = choose(replace(situation(1e11, 2e-2, shapes=many), coalesces=False), [CODEC])
    assert {one.setting.coalesce_bytes for one in alone.every} == {0}
    # Backward hides what is sent early.
    few = ((1024, 1024),) * 7
    early = choose(situation(1e9, 1e-5, shapes=few, ranks=2, backward=0.5), [CODEC]).of(CODEC)
    assert early.setting.coalesce_bytes < 1 << 40


def test_small_matrices_are_left_uncompressed_where_they_cost_kernels() -> None:
    """Of a large matrix the link is the limit, and of many small ones calls of kernels."""
    where = situation(2e8, 1e-6, shapes=((2048, 1024), (64, 64)), ranks=2)
    every, large = (simulate(where, Setting(CODEC, Options(), 1 << 40, n)) for n in (0, 1 << 14))
    assert every.wire_bytes < large.wire_bytes
    found = choose(where, [CODEC])
    assert {one.setting.least for one in found.every} == {0, 1 << 18}
    assert found.best.seconds <= min(every.seconds, large.seconds)


def test_machines_of_several_ranks_use_two_levels() -> None:
    found = choose(situation(1e9, 1e-3, ranks=4, per_node=2, shapes=((2048, 512),)), [CODEC])
    assert found.best.setting.options.algorithm == "hierarchical"


def test_a_sparse_codec_sends_less_than_a_dense_one() -> None:
    codec = TopK(density=0.01)
    given = Curves("both", 1, curves().codecs | curves(codec=codec).codecs)
    found = choose(situation(1e8, curves=given, shapes=LAYERS[:2]), [CODEC, codec])
    assert found.best.setting.codec == codec
    assert found.of(codec).wire_bytes < found.of(CODEC).wire_bytes < found.of(HALF).wire_bytes


def test_an_aggregator_competes_with_codecs() -> None:
    """It sends least; what it computes decides."""
    low = registry.get("powersgd:rank=4")
    for value, best in ((1e-9, low), (1e-5, CODEC)):
        stages = {"powersgd(rank=4), error feedback": [(0.0, value, 0.0)] * 3}
        given = replace(curves(), aggregators=stages)
        found = choose(situation(1e8, curves=given, shapes=LAYERS), [CODEC, low])
        assert found.best.setting.codec == best
        assert found.of(low).wire_bytes < found.of(CODEC).wire_bytes
        settings = [one.setting for one in found.every if one.setting.codec == low]
        assert {one.least for one in settings} == {0}
        assert len({one.options.algorithm for one in settings}) == 5
        assert choice.name(low) in str(found.of(low).setting)


def test_single_gradients_by_the_formulas() -> None:
    for algorithm in ("sra", "ring", "tree", "all_gather", "parameter_server"):
        slow = decisions(situation(1e8, ranks=4), CODEC, algorithm)
        assert [one.numel for one in slow] == [4096, 5120, 1 << 18, 1 << 20]
        assert [one.count for one in slow] == [1, 1, 1, 1]
        assert all(one.decision.compress for one in slow)
        quick = situation(1e13, 1e-7, ranks=4, curves=curves(overhead=0.0))
        fast = decisions(quick, CODEC, algorithm)
        assert not any(one.decision.compress for one in fast)
        for one in slow + fast:
            seconds = one.decision.uncompressed_seconds, one.decision.compressed_seconds
            assert one.decision.seconds == min(seconds)


def test_full_precision_is_called_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "MARGIN", 0.99)
    found = choose(situation(1e9, shapes=LAYERS[:2]), [CODEC])
    assert found.verdict.startswith("none is best: none by ")
    assert [choice.name(codec) for codec in (FULL, HALF, CODEC)] == ["none", "bf16", "qsgd:bits=4"]


def test_a_search_can_be_ended() -> None:
    left, told = iter(range(3)), []

    def progress(*what: object) -> None:
        next(left)
        told.append(what)

    with pytest.raises(StopIteration):
        choose(situation(1e9, shapes=LAYERS[:2]), [CODEC], progress)
    assert told[:2] == [(f"simulating none by {name}; codec", 1, 3) for name in ("sra", "ring")]


def test_impossible_situations_are_refused() -> None:
    cases = [
        (partial(situation, 1e9, ranks=1), "one rank sends nothing"),
        (partial(situation, 1e9, ranks=4, per_node=3), "divides the 4 ranks"),
        (partial(choose, situation(1e9), [QSGD(bits=2)]), "no curve for encode"),
        (
            partial(choose, situation(1e9), [registry.get("powersgd:rank=1000")]),
            "defined in no algorithm: no parameter can be compressed; parameter 0: rank",
        ),
        (partial(codecs.get, "none"), '"none" is no codec but its absence: leave it out here'),
    ]
    refused(lambda call: call(), cases)
