"""What a lab is told and runs, without one: texts of networks, commands for links, free ports."""

from __future__ import annotations

import ipaddress
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import refused
from gradwire.errors import TransportError
from gradwire_tools.lab import Network, links, ports

TEXTS = [
    ("1gbit,1ms", 1e9, 1e-3, "1gbit,1ms"),
    ("200mbit,5ms", 2e8, 5e-3, "200mbit,5ms"),
    ("0.5GBIT, 500us", 5e8, 5e-4, "500mbit,500us"),
    ("2500mbit,1500us", 2.5e9, 1.5e-3, "2.5gbit,1.5ms"),
    ("64000bit,1s", 64e3, 1.0, "64kbit,1s"),
    ("10gbit", 1e10, 0.0, "10gbit,0ms"),
    ("none", math.inf, 0.0, "none"),
]


def test_reads_and_writes() -> None:
    for text, rate, latency, spelled in TEXTS:
        net = Network.parse(text)
        assert (net.rate_bits_per_s, net.latency_s, str(net)) == (rate, latency, spelled)
        assert net.shaped == (text != "none")


@given(st.integers(64 * 10**3, 10**11), st.integers(0, 10**10))
def test_text_round_trips(rate: int, latency_ns: int) -> None:
    net = Network(float(rate), latency_ns / 10**9)
    assert Network.parse(str(net)) == net
    assert net.latency_ns == latency_ns


FAULTS = [
    ("", "not a number"),
    ("fast", "not a number"),
    ("1gbit,", "latency '' is not"),
    ("1gbit,1ms,1", "3 parts"),
    ("1gbps,1ms", "unit 'gbps' is not one of gbit"),
    ("1gbit,1min", "unit 'min' is not one of s"),
    ("-1gbit,1ms", "not a number"),
    ("1kbit,1ms", "from 64kbit to 100gbit"),
    ("0gbit,1ms", "from 64kbit"),
    ("1gbit,11s", "up to 10s"),
    ("none,1ms", "rate 'none' is not"),
]


def test_faults_are_named() -> None:
    refused(Network.parse, FAULTS)
    refused(Network.parse, [(text, "RATE,LATENCY") for text, _ in FAULTS])


def test_addresses_are_distinct_and_for_benchmarks() -> None:
    addresses = {ipaddress.ip_address(links.address(rank)) for rank in range(links.MAX_NODES)}
    assert len(addresses) == links.MAX_NODES
    assert all(address in ipaddress.ip_network("198.18.0.0/15") for address in addresses)


def test_hosts_file_names_every_node() -> None:
    lines = links.hosts(2).splitlines()
    assert {"198.18.0.1 node0", "198.18.0.2 node1", "::ffff:198.18.0.2 node1"} <= set(lines)


def test_every_node_knows_every_other() -> None:
    neighbours = [line for line in links.ip_node(1, 4, switch_pid=1) if line.startswith("neigh")]
    assert [line.split()[2] for line in neighbours] == ["198.18.0.1", "198.18.0.3", "198.18.0.4"]
    assert neighbours[0].split()[4] == "02:00:00:00:00:01"


def test_netem_stands_under_htb() -> None:
    qdisc, limit, queue = links.tc_shape(["port0"], 10**9, netem_ns=1_500_000)
    assert "root handle 1: htb" in qdisc
    assert "classid 1:1 htb rate 1000000000bit burst 62500b" in limit
    assert "parent 1:1 handle 10: netem delay 1500.000us limit 100000" in queue


def test_without_netem_a_long_plain_queue() -> None:
    assert "pfifo limit 100000" in links.tc_shape(["eth0"], 10**9)[2]


def test_bridge_is_open_once_all_ports_forward() -> None:
    def shown(*states: str) -> str:
        return json.dumps([{"linkinfo": {"info_slave_data": {"state": s}}} for s in states])

    assert links.bridge_open(shown("forwarding", "forwarding"))
    assert not links.bridge_open(shown("forwarding", "disabled"))


BUFFERS = [  # (bits per second, ms, bytes)
    (10**6, 1, 2**17),  # a few packets at least
    (10**8, 5, 500_000),  # 40 ms, which is four round trips
    (10**8, 20, 2_000_000),  # four round trips
    (3 * 10**8, 1, 1_500_000),
    (10**10, 50, 2**22),  # Linux's limit
]


def test_a_queue_of_some_senders_passes_before_tcp_sends_again() -> None:
    for rate, latency_ms, buffer in BUFFERS:
        settings = links.settings(rate, latency_ms * 10**6)
        assert settings["ipv4/tcp_wmem"] == f"4096 16384 {buffer}"


# ---- ports: nobody else is given one between its choice and the moment a rank listens

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
