"""`gradwire doctor --ranks N`: what is measured, and what it means."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
from bench_runs import keys_of

from gradwire_tools.bench.network import network
from gradwire_tools.bench.network.network_verdict import FULL, HALF, OURS, verdict


def rows(full: float, half: float, ours: float, compute: float, alone: float = 0.2) -> list[Any]:
    """Rows of steps that take so long, with no spread over turns."""
    return [
        {
            "method": method, "step_seconds": step, "compute_seconds": compute,
            "exposed_seconds": max(0.0, step - compute), "turn_seconds": [step] * 4,
            "communication_seconds": alone if method == OURS else max(0.0, step - compute),
            "ranks": 2, "machines": 2, "transport": "torch_p2p", "load": 1.5, "cores": 2,
        }
        for method, step in ((FULL, full), (HALF, half), (OURS, ours))
    ]  # fmt: skip


CLEAR, HIDDEN = rows(1.0, 0.6, 0.3, 0.1), rows(0.30, 0.31, 0.33, 0.29)
WRITE = 'Write: gw.attach(model, "qsgd:bits=4")'
LEAVE, HALVE = "leave the script as it is.", "register_comm_hook(None, fp16_compress_hook)"


def test_the_verdict_compares_with_the_faster_of_torch_and_ends_in_the_line_to_write() -> None:
    for measured, pays, said, line in (
        (CLEAR, True, "The network is the problem.", WRITE),
        (HIDDEN, False, "The network is not the problem.", LEAVE),
        (HIDDEN, False, "computing hides the communication of torch-fp32", LEAVE),
        (rows(0.3, 0.31, 0.4, 0.1, 0.3), False, "encoding and decoding cost more than", LEAVE),
        (rows(1.0, 0.5, 0.49, 0.1), False, "in 4 of 4 turns it is less than 5 % faster", HALVE),
        # faster than fp32, and slower than 16 bit
        (rows(1.0, 0.5, 0.6, 0.1), False, "with torch-fp16-hook; in 4 of 4 turns", HALVE),
    ):
        found, text = verdict(measured)
        assert found is pays
        assert said in text
        assert text.startswith("Compression pays here: " if pays else "Compression will not pay")
        assert text.endswith(line)


def test_the_verdict_says_what_was_measured() -> None:
    """Shared memory is no network, and the times of a busy machine are not those of an idle one."""
    shared = {"ranks": 2, "machines": 1, "transport": "shm"}
    busy = {"load": 10.0}
    for change, said, unsaid in (
        ({}, ["The network is"], ["share this machine", "busy"]),
        (shared, ["No network was measured: the 2 ranks share this machine", "shared memory"],
         ["The network is", "busy"]),
        (shared | {"transport": "torch_p2p"}, ["gradwire over loopback too"], ["shared memory"]),
        ({"ranks": 4, "transport": "shm+torch_p2p"}, ["4 ranks are on 2 machines"], ["No network"]),
        (busy, ["A machine is busy: a load average of 10.0 on 2 cores"], ["No network"]),
        (shared | busy, ["The machine is busy", "No network"], ["The network is"]),
        ({"load": 2.0}, [], ["busy"]),
    ):  # fmt: skip
        for measured in (CLEAR, HIDDEN):
            _, text = verdict([row | change for row in measured])
            assert [one for one in said if one not in text] == [], text
            assert [one for one in unsaid if one in text] == [], text


def test_how_many_times_as_long_is_of_the_steps_beside_it() -> None:
    measured = rows(0.09, 0.0436, 0.0328, 0.01)
    measured[1]["turn_seconds"] = [0.0401, 0.0401, 0.0436, 0.06, 0.06]
    measured[2]["turn_seconds"] = [0.0318, 0.0328, 0.0328, 0.04, 0.05]
    pays, text = verdict(measured)
    assert pays
    assert "takes 32.8 ms with gradwire-qsgd4, and 43.6 ms with torch-fp16-hook" in text
    assert f"which is {43.6 / 32.8:.2f} times as long" in text


def test_turns_that_disagree_are_not_clear() -> None:
    for turns, said in (
        ([0.3, 0.42, 0.7, 0.7], "0.93 of torch-fp16-hook's time, and 2 of 4 turns were"),
        ([0.3, 0.42, 0.7, 0.7], "turns were faster; repeat on an idle machine."),
        ([0.3, 0.3, 0.7, 0.8], "0.83 of torch-fp16-hook's time, "),
        ([0.3, 0.5, 0.7, 0.8], "1.00 of torch-fp16-hook's time, "),
    ):
        measured = rows(1.0, 0.6, 0.3, 0.1)
        measured[2] |= {"turn_seconds": turns, "step_seconds": statistics.median(turns)}
        pays, text = verdict(measured)
        assert pays is False
        assert "Not clear: the median step with gradwire-qsgd4 took " in text
        assert said in text
        assert "Compression" not in text
        assert text.endswith('gw.attach(model, "auto")')
    # Computing seems to hide all, or averaging alone is no faster, and yet the steps are.
    for measured in (rows(0.30, 0.31, 0.25, 0.29), rows(0.3, 0.31, 0.25, 0.1, 0.3)):
        measured[2] |= {"turn_seconds": [0.2, 0.24, 0.31, 0.33], "step_seconds": 0.275}
        assert "Not clear: " in verdict(measured)[1]


def test_what_is_measured_follows_from_the_environment() -> None:
    assert network.plan(environment={}) is None
    assert network.plan(environment={"RANK": "0", "WORLD_SIZE": "1"}) is None
    joined = network.plan(environment={"RANK": "1", "WORLD_SIZE": "4"})
    assert joined is not None
    assert (joined.world.count, joined.world.joins) == (4, True)
    for numel in (1, 7, 8, 1000, 5_000_000):
        started = network.plan(ranks=2, numel=numel, environment={})
        assert started is not None
        assert network.models.numel(started.shapes) == numel


@pytest.mark.multiprocess
def test_rows_of_measured_steps_and_their_verdict() -> None:
    wanted = network.plan(ranks=2, numel=20_000, quick=True, environment={})
    assert wanted is not None
    found = list(network.run(replace(wanted, turns=3)))
    *steps, last = found
    assert [row["method"] for row in steps] == [FULL, HALF, OURS]
    for row in steps:
        assert row.keys() == keys_of(row)
        assert (row["ranks"], row["net"], row["numel"]) == (2, "none", 20_000)
        assert min(row["step_seconds"], row["compute_seconds"], row["communication_seconds"]) > 0
        assert row["step_seconds"] == statistics.median(row["turn_seconds"])
        assert row["exposed_seconds"] == max(0.0, row["step_seconds"] - row["compute_seconds"])
        assert len(row["turn_seconds"]) == 3
        assert (row["machines"], row["transport"]) == (1, "shm")
        assert row["load"] >= 0 < row["cores"]
    assert last.keys() == {"part", "available", "detail", "run"}
    assert (last["part"], (last["available"], last["detail"])) == ("verdict", verdict(steps))


@pytest.mark.multiprocess
@pytest.mark.timing
def test_long_computing_hides_the_network() -> None:
    wanted = network.plan(ranks=2, numel=200_000, compute=0.5, quick=True, environment={})
    assert wanted is not None
    *steps, last = network.run(wanted)
    assert min(row["compute_seconds"] for row in steps) >= 0.5
    assert last["available"] is False
    assert "computing hides the communication" in last["detail"]


@pytest.mark.lab
@pytest.mark.multiprocess
@pytest.mark.timing
def test_on_a_slow_network_it_pays() -> None:
    options: dict[str, Any] = {"net": "20mbit,1ms", "numel": 200_000, "quick": True}
    wanted = network.plan(ranks=2, environment={}, **options)
    assert wanted is not None
    *steps, last = network.run(wanted)
    by_method = {row["method"]: row for row in steps}
    wire_seconds = 200_000 * 16 / 20e6  # of 16 bit: the ring of two sends each value once
    assert by_method[HALF]["communication_seconds"] > 0.8 * wire_seconds
    assert last["available"] is True
    assert "Compression pays here: " in last["detail"]
