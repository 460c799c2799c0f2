"""Which ranks a benchmark has, and what it refuses."""

from __future__ import annotations

import pytest
from bench_runs import refused

from gradwire.errors import ConfigError
from gradwire_tools.bench.network import world
from gradwire_tools.bench.network.world import World
from gradwire_tools.lab import Network

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3"}


def test_ranks_are_those_of_torchrun_else_as_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "available", lambda: None)
    assert World.of(None, "none", TORCHRUN) == World.of(3, "none", TORCHRUN)
    assert World.of(3, "none", TORCHRUN) == World(3, Network.parse("none"), joins=True)
    assert World.of(None, "none", TORCHRUN).net == "as it is"
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    assert World.of(None, "1gbit,1ms", alone) == World(2, Network.parse("1gbit,1ms"), joins=False)
    assert World.of(5, "1000mbit,1ms", {"WORLD_SIZE": "3"}).net == "1gbit,1ms"
    refused(
        lambda given: World.of(**{"wanted": None, "net": "none", "environment": {}, **given}),
        [
            ({"wanted": 1}, "--ranks 1: one rank sends nothing"),
            ({"net": "1gbit,1parsec"}, "parsec"),
            ({"wanted": 2, "environment": TORCHRUN}, "has started 3 ranks"),
            ({"net": "1gbit", "environment": TORCHRUN}, "under torchrun .* leave it out"),
            ({"environment": {"RANK": "0", "WORLD_SIZE": "two"}}, "WORLD_SIZE='two'"),
        ],
    )


def test_a_network_that_cannot_be_emulated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "available", lambda: "no namespaces")
    assert not World.of(2, "none", {}).network.shaped
    with pytest.raises(ConfigError, match=r"cannot emulate .*no namespaces.*; use --net none"):
        World.of(2, "1gbit,1ms", {})
    with pytest.raises(ConfigError, match="give --no-lab"):
        world.emulable(Network.parse("1gbit"), instead="give --no-lab")
