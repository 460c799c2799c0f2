"""Steps that do not wait for their last averages, simulated: by hand, and what bounds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradwire.aggregators import registry
from gradwire.errors import ConfigError
from gradwire_tools.sim import Net, predict
from gradwire_tools.sim.buckets import ddp_buckets
from gradwire_tools.sim.crossing import predict_crossing
from machines import FREE, IDENTITY, USUAL, scenario

LATENCY = 1e-3
WIRE = (4 * 512 * 512 + 48) * 8e-9  # of a bucket, at 1gbit,1ms
LAYERS = {"model": ",".join(["512x512"] * 4), "algorithm": "all_gather", "codec": IDENTITY}


@pytest.mark.parametrize(
    ("forward", "backward", "barrier", "crossing"),
    [
        # The last two layers' buckets go, and behind them the first layer's: forward begins when
        # these are there, and finds the second when it comes to it.
        (0.09, 0.0, 0.09 + 2 * LATENCY + 4 * WIRE, 0.09 + 2 * LATENCY + 3 * WIRE),
        # It waits for the second, too, behind the first layer alone.
        (0.003, 0.0, 0.003 + 2 * LATENCY + 4 * WIRE, 0.00225 + 2 * LATENCY + 4 * WIRE),
        # Of a step that hides all buckets but the first layer's, that is waited for at once.
        (0.09, 0.2, 0.29 + 2 * LATENCY + WIRE, 0.29 + 2 * LATENCY + WIRE),
    ],
)
def test_times_are_those_computed_by_hand(
    forward: float, backward: float, barrier: float, crossing: float
) -> None:
    of: dict[str, Any] = {**LAYERS, "backward": backward, "bucket_bytes": 1 << 20}
    row = predict_crossing(scenario(2, **of), forward, FREE)
    assert row["barrier_seconds"] == pytest.approx(barrier, rel=1e-9)
    assert row["seconds"] == pytest.approx(crossing, rel=1e-9)
    assert (row["cross_barrier"], row["forward_seconds"], row["buckets"]) == (True, forward, 4)
    assert row["limit_seconds"] == max(
        forward + backward, predict(scenario(2, **of), FREE)["limit_seconds"]
    )


def test_a_step_with_the_barrier_is_forward_and_the_step_of_ddp() -> None:
    """But for ranks that begin at different times, as after steps they do. The other keys are those
    of DDP's step."""
    low = registry.get("powersgd", rank=4)
    priced = {"powersgd(rank=4), error feedback": [(1e-3, 5e-10, 1e-11)] * 3}
    for given in ({}, {"codec": low, "feedback": True}, {"per_node": 2}, {"cores": 2.0}):
        of = scenario(4, "resnet50", backward=0.1, bucket_bytes=4 << 20, **given)
        curves = replace(USUAL, aggregators=priced)
        alone, row = predict(of, curves), predict_crossing(of, 0.05, curves)
        assert row["barrier_seconds"] == pytest.approx(0.05 + alone["seconds"], rel=0.02)
        told = {"seconds", "limit_seconds", "of_limit"}
        assert {key: row[key] for key in alone if key not in told} == {
            key: one for key, one in alone.items() if key not in told
        }


def test_what_is_hidden_gains_nothing_and_what_is_not_at_most_the_forward() -> None:
    for ranks in (2, 4):
        free = scenario(ranks, "resnet50", backward=0.2, net=Net("none"))
        row = predict_crossing(free, 0.1, FREE)
        assert row["seconds"] == pytest.approx(0.3)
        assert row["barrier_seconds"] == pytest.approx(0.3)
        for forward, size in ((0.05, 1), (0.1, 4), (0.1, 25)):
            slow = Net("100mbit,1ms", 1e8, 1e-3)
            of = scenario(ranks, "resnet50", backward=0.1, net=slow, bucket_bytes=size << 20)
            row = predict_crossing(of, forward, USUAL)
            gained = row["barrier_seconds"] - row["seconds"]
            assert forward / 8 < gained < 1.02 * forward, (ranks, forward, size)
            assert row["seconds"] > row["limit_seconds"]


def test_of_many_ranks_one_node_stands_for_all() -> None:
    given: dict[str, Any] = {"backward": 0.05, "cores": 2.0}  # of which it has its share
    one, every = (
        predict_crossing(scenario(8, "resnet50", exact=exact, **given), 0.03, USUAL)
        for exact in (False, True)
    )
    assert (one["exact"], every["exact"]) == (False, True)
    for key in ("barrier_seconds", "seconds"):
        assert one[key] == pytest.approx(every[key], rel=0.05)


def test_buckets_have_the_size_that_is_given() -> None:
    def sizes(most: int | None) -> list[int]:
        return [len(b) for b in ddp_buckets(scenario(2, ",".join(["512x512"] * 30)).plan, most)]

    assert sizes(None) == [1, 25, 4]
    assert sizes(1 << 20) == [1] * 30
    assert sizes((1 << 20) + 1) == [2] * 15
    with pytest.raises(ConfigError, match="bucket_bytes=0: give a number of at least 1"):
        scenario(2, "1e6", bucket_bytes=0)
    with pytest.raises(ConfigError, match="forward=-1"):
        predict_crossing(scenario(2, "1e6"), -1.0, FREE)
