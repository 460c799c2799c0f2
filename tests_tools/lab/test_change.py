"""A running lab takes another rate and latency, and loses no packet on the way.

test_settings.py checks without a clock what the links are set to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from gradwire_tools.lab import Lab, Network, NodeProcess

HERE = Path(__file__).parent
FAST, SLOW = Network.parse("400mbit,1ms"), Network.parse("50mbit,15ms")


def run(lab: Lab, folder: Path, program: str, *arguments: str) -> list[tuple[NodeProcess, Path]]:
    """Start a program of this folder on every node; its processes with their output files."""
    started = []
    for rank, variables in enumerate(lab.torchrun_env()):
        said = folder / f"{program}{rank}"
        with open(said, "wb") as file:
            argv = [sys.executable, str(HERE / f"{program}.py"), *arguments]
            started.append((lab.spawn(rank, argv, {**os.environ, **variables}, stdout=file), said))
    return started


def told(started: list[tuple[NodeProcess, Path]]) -> dict[str, object]:
    """What they print, once they have ended."""
    found: dict[str, object] = {}
    for process, said in started:
        assert process.wait(30) == 0
        found |= json.loads(said.read_text())
    return found


def check(lab: Lab, folder: Path) -> None:
    """Round trip and rate are those of the present network; other load may slow one attempt."""
    net = lab.net
    for attempt in (1, 2):
        payload = str(int(net.rate_bits_per_s / 8 / 2))  # half a second's worth
        seen = told(run(lab, folder, "network_probe", payload))
        rtt, share = float(str(seen["rtt_s"])), float(str(seen["alone"])) / net.rate_bits_per_s
        print(net, rtt, share)
        assert rtt >= 2 * net.latency_s
        assert share <= 1.05
        if rtt <= 2 * net.latency_s + 1e-3 and share >= 0.85:
            return
        assert attempt == 1, (str(net), rtt, share)


@pytest.mark.timing
@pytest.mark.lab
def test_rate_and_latency_change(tmp_path: Path) -> None:
    with Lab(3, FAST) as lab:
        check(lab, tmp_path)
        for net in (SLOW, FAST):
            lab.change(net)
            check(lab, tmp_path)


@pytest.mark.timing
@pytest.mark.lab
def test_a_rate_changes_without_latency(tmp_path: Path) -> None:
    with Lab(3, Network.parse("400mbit")) as lab:
        assert lab.latency_by == "bridge"
        lab.change(Network.parse("50mbit"))
        check(lab, tmp_path)


@pytest.mark.timing
@pytest.mark.lab
def test_packets_in_flight_arrive(tmp_path: Path) -> None:
    with Lab(2, SLOW) as lab:
        started = run(lab, tmp_path, "datagram_probe", "2")
        time.sleep(0.8)
        for i in range(10):
            lab.change((FAST, SLOW)[i % 2])
            time.sleep(0.1)
        found = told(started)
    got, sent = found["got"], found["sent"]
    assert isinstance(got, list)
    assert isinstance(sent, int)
    assert sorted(got) == list(range(sent))
