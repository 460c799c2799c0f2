"""What the links of a running lab are set to, by its network, after a change and by a schedule.

No speed is measured: the kernel tells the rates, the delay line's arguments its latency, and no
round trip is shorter than two latencies. test_shape.py measures.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradwire.errors import ConfigError
from gradwire_tools.lab import Lab, Network, Schedule, launch
from gradwire_tools.lab import run as running

FAST, SLOW = Network.parse("400mbit,1ms"), Network.parse("50mbit,15ms")
ECHO = """
import socket, sys, time
if sys.argv[1] == "0":
    with socket.create_server(("", 5000)) as server:
        peer, _ = server.accept()
    while got := peer.recv(1):
        peer.sendall(got)
    sys.exit()
while True:
    try:
        peer = socket.create_connection(("node0", 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
least = float("inf")
for _ in range(5):
    begun = time.perf_counter()
    peer.sendall(b"x")
    peer.recv(1)
    least = min(least, time.perf_counter() - begun)
print(least)
"""


def output(lab: Lab, rank: int, argv: list[str], folder: Path) -> str:
    """What a command prints on a node."""
    with open(folder / "out", "w+") as file:
        assert lab.spawn(rank, argv, stdout=file).wait(60) == 0
        return (folder / "out").read_text()


def switch(lab: Lab) -> int:
    """The process in whose namespace the ports are."""
    outer = lab._supervisor.pid
    return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])


def rates(shown: str) -> set[float]:
    """Bits per second of the classes that `tc class show` prints."""
    units = {"bit": 1, "Kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
    return {float(n) * units[unit] for n, unit in re.findall(r"rate ([\d.]+)(\w+)", shown)}


def set_as(lab: Lab, folder: Path) -> None:
    """Both ends of every link have the rate, and what a node sends and receives the latency."""
    rate, latency = lab.net.rate_bits_per_s, lab.net.latency_s
    for rank in range(lab.nodes):
        assert rates(output(lab, rank, ["tc", "class", "show", "dev", "eth0"], folder)) == {rate}
        if os.geteuid() == 0:  # another user may not enter the switch
            inside = ["nsenter", "--target", str(switch(lab)), "--net"]
            show = [*inside, "tc", "class", "show", "dev", f"port{rank}"]
            assert rates(subprocess.check_output(show, text=True)) == {rate}
    if latency:
        server = lab.spawn(0, [sys.executable, "-c", ECHO, "0"])
        least = float(output(lab, 1, [sys.executable, "-c", ECHO, "1"], folder))
        assert server.wait(60) == 0
        assert least >= 2 * latency


@pytest.mark.lab
def test_links_are_set_to_the_network_and_to_its_changes(tmp_path: Path) -> None:
    with Lab(3, FAST) as lab:
        if lab.latency_by == "line":
            child = Path(f"/proc/{switch(lab)}/task/{switch(lab)}/children").read_text().split()
            words = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in child]
            (line,) = (one for one in words if "delay_line" in one[0])
            assert line[1:-1] == ["1000000", "port0", "port1", "port2"]
        set_as(lab, tmp_path)
        for net in (SLOW, FAST):
            lab.change(net)
            assert lab.net == net
            set_as(lab, tmp_path)


@pytest.mark.lab
def test_a_lab_without_latency_changes_its_rate_alone(tmp_path: Path) -> None:
    with Lab(2, Network.parse("400mbit")) as lab:
        assert lab.latency_by == "bridge"
        lab.change(Network.parse("50mbit"))
        set_as(lab, tmp_path)
        with pytest.raises(ConfigError, match="built without latency"):
            lab.change(SLOW)


@pytest.mark.lab
def test_a_schedule_begins_with_its_first_phase_and_can_have_latency_later(tmp_path: Path) -> None:
    schedule = Schedule.parse("late(second: 0 400mbit,0ms; 1 50mbit,15ms)")
    with Lab(3, schedule) as lab:
        assert lab.latency_by in ("line", "netem")
        assert lab.net == schedule.first
        assert "late" in lab.describe()
        lab.change(SLOW)
        set_as(lab, tmp_path)


def test_a_schedule_is_followed_by_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule.parse("two(second: 0 400mbit,1ms; 1 50mbit,15ms)")
    changes: list[str] = []

    def change(net: Network) -> None:
        changes.append(str(net))
        lab.net = net

    lab = SimpleNamespace(schedule=schedule, net=FAST, change=change)
    said = io.StringIO()
    for now in (10.0, 10.9, 11.0, 11.5):
        monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda now=now: now))
        running._follow(lab, 10.0, said)  # type: ignore[arg-type]
    assert changes == ["50mbit,15ms"]
    assert said.getvalue() == "lab: 50mbit,15ms from 1.0 s on\n"


class Heard(io.StringIO):
    """Makes a file once a change of the network is written here."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def write(self, text: str) -> int:
        if " s on" in text:
            self.file.touch()
        return super().write(text)


@pytest.mark.lab
def test_launch_follows_a_schedule(tmp_path: Path) -> None:
    """The nodes run until it has."""
    said = Heard(tmp_path / "changed")
    schedule = Schedule.parse("two(share: 0 400mbit,1ms; 0.5 50mbit,15ms)")
    command = ["sh", "-c", f"until test -e {said.file}; do sleep 0.02; done"]
    assert launch(command, 2, schedule, stderr=said, length=0.1, timeout=100) == [0, 0]
    assert "2 nodes on two(share" not in said.getvalue()  # it goes by second now
    assert "lab: 50mbit,15ms from " in said.getvalue()


def test_loopback_cannot_change() -> None:
    with Lab(1, Network()) as lab, pytest.raises(ConfigError, match="neither from it nor to it"):
        lab.change(FAST)
