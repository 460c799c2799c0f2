"""Ports for stores: nobody else is given one between its choice and the moment a rank listens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.errors import TransportError
from gradwire_tools.lab import ports

GIVEN_OUT = """
from gradwire_tools.lab.ports import free_port
print(*[free_port() for _ in range(30)], flush=True)
input()
"""


def test_the_kernel_gives_none_of_them_to_a_socket_that_names_no_port() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(ports.free_port() < first for _ in range(100))


def test_no_two_processes_are_given_one_port() -> None:
    """Both look at the same 100 ports in the same order."""
    script = (
        "from gradwire_tools.lab import ports\n"
        "ports._FIRST = 10_100\nports._ephemeral = lambda: 20_201\n"
        "import random\nrandom.sample = lambda candidates, n: candidates[:100]\n" + GIVEN_OUT
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        given = [process.stdout.readline().split() for process in processes if process.stdout]
    finally:
        for process in processes:
            process.communicate("\n")
    assert len({*given[0], *given[1]}) == 60


def test_what_to_read_where_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_FIRST", 20_301)
    monkeypatch.setattr(ports, "_ephemeral", lambda: 2 * 20_301 + 1)
    taken = ports.free_port()
    monkeypatch.setattr(ports.random, "sample", lambda candidates, n: [taken])
    with pytest.raises(TransportError, match=r"no TCP port of 127\.0\.0\.1 from 20301 to 40602"):
        ports.free_port()
