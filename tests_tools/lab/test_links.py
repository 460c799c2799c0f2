"""The commands that build a lab, without running them."""

from __future__ import annotations

import ipaddress
import json

from gradwire_tools.lab import links


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
