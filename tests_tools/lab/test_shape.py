"""The links have their described rate and latency, also together and after changes, and lose no
packets.

test_settings.py checks without a clock what the links are set to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gradwire_tools.lab import Lab, Network, NodeProcess

PROBE = str(Path(__file__).with_name("network_probe.py"))
FAST, SLOW = Network.parse("400mbit,1ms"), Network.parse("50mbit,15ms")


def run(lab: Lab, folder: Path, what: str, given: str) -> list[tuple[NodeProcess, Path]]:
    """Start the probe on every node; its processes with their output files."""
    started = []
    for rank, variables in enumerate(lab.torchrun_env()):
        said = folder / f"{what}{rank}"
        with open(said, "wb") as file:
            argv = [sys.executable, PROBE, what, given]
            started.append((lab.spawn(rank, argv, {**os.environ, **variables}, stdout=file), said))
    return started


def told(started: list[tuple[NodeProcess, Path]]) -> dict[str, Any]:
    """What they print, once they have ended; with the sum of lost packets."""
    found: dict[str, Any] = {}
    for process, said in started:
        assert process.wait(30) == 0
        row = json.loads(said.read_text())
        found |= {**row, "lost": found.get("lost", 0) + row.get("lost", 0)}
    return found


def check(lab: Lab, folder: Path, seconds: float = 1.0, least: float = 0.9) -> None:
    """Round trip and rates are those of the present network.

    Other load on the machine slows a measurement, and nothing speeds one up. So the upper bounds
    hold each time, and the lower bounds hold for the better of two.
    """
    net, rate = lab.net, lab.net.rate_bits_per_s
    for attempt in (1, 2):
        seen = told(run(lab, folder, "streams", str(int(rate / 8 * seconds))))
        print(net, lab.latency_by, seen)
        assert seen["rtt_s"] >= 2 * net.latency_s
        assert seen["alone"] <= 1.05 * rate
        # Two senders share the receiver's rate; each clock starts at its own first byte.
        assert seen["shared"] <= 1.15 * rate
        # A queue that overflows loses hundreds; one or two may be counted at a stream's end.
        assert seen["lost"] <= 3
        quick = seen["rtt_s"] <= 2 * net.latency_s + 1e-3
        if quick and seen["alone"] >= least * rate and seen["shared"] >= 0.85 * rate:
            return
        assert attempt == 1, seen


@pytest.mark.timing
@pytest.mark.lab
@pytest.mark.parametrize(
    ("net", "latency_by"),
    [
        ("1gbit,1ms", "line"),
        ("200mbit,5ms", "line"),
        ("50mbit,20ms", "line"),
        ("500mbit", None),
        ("200mbit,5ms", "netem"),
    ],
)
def test_rate_and_latency(net: str, latency_by: str | None, tmp_path: Path) -> None:
    if latency_by == "netem":
        with Lab(1, Network.parse(net)) as lab:
            if lab.latency_by != "netem":
                pytest.skip("this kernel has no netem")
    with Lab(3, Network.parse(net), latency_by) as lab:
        check(lab, tmp_path)


@pytest.mark.timing
@pytest.mark.lab
def test_rate_and_latency_change(tmp_path: Path) -> None:
    with Lab(3, FAST) as lab:
        for net in (FAST, SLOW, FAST):
            lab.change(net)
            check(lab, tmp_path, 0.5, 0.85)
    with Lab(3, Network.parse("400mbit")) as lab:
        assert lab.latency_by == "bridge"
        lab.change(Network.parse("50mbit"))
        check(lab, tmp_path, 0.5, 0.85)


@pytest.mark.timing
@pytest.mark.lab
def test_packets_in_flight_arrive(tmp_path: Path) -> None:
    with Lab(2, SLOW) as lab:
        started = run(lab, tmp_path, "datagrams", "2")
        time.sleep(0.8)
        for i in range(10):
            lab.change((FAST, SLOW)[i % 2])
            time.sleep(0.1)
        found = told(started)
    assert sorted(found["got"]) == list(range(found["sent"]))
