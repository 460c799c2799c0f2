"""What a lab is told and runs, without one: networks, schedules, commands for links, free ports."""

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
from gradwire_tools.lab import Network, Schedule, links, ports
from gradwire_tools.lab.schedule import SHIPPED

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


EVENING = """
by: step
phases:
  - {from: 0, net: "1gbit,1ms"}
  - {from: 40, net: "100mbit,20ms"}
"""


def written(folder: Path, text: str) -> str:
    file = folder / "evening.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_is_read_and_its_text_is_the_inverse(tmp_path: Path) -> None:
    made = Schedule.parse(written(tmp_path, EVENING))
    assert (made.name, made.unit, made.changes, made.delays) == ("evening", "step", True, True)
    assert str(made) == "evening(step: 0 1gbit,1ms; 40 100mbit,20ms)"
    assert Schedule.parse(str(made)) == made
    assert str(tmp_path) not in str(made)
    assert Schedule.parse(written(tmp_path, EVENING + "name: late.1")).name == "late.1"


def test_shipped_ones_are_known_by_name_and_by_their_phases() -> None:
    for name in SHIPPED:
        made = Schedule.parse(name)
        assert str(made) == name
        assert Schedule.parse(made.spelled()) == made


def test_a_network_is_a_schedule_of_one_phase() -> None:
    for text in ("1gbit,1ms", "none"):
        made = Schedule.parse(text)
        assert made == Schedule.fixed(Network.parse(text))
        assert (made.name, str(made), made.changes) == (text, text, False)
        assert made.at(7, 10, 3.0) == Network.parse(text)


def test_the_papers_schedules() -> None:
    """AR-Topk 3-E; by its epochs of 50 for the second."""

    def nets(name: str, steps: int) -> list[str]:
        return [str(SHIPPED[name].at(step, steps, 0.0)) for step in range(steps)]

    c1 = nets("c1", 4)
    assert c1 == ["25gbit,1ms", "1gbit,1ms", "1gbit,50ms", "25gbit,50ms"]
    assert nets("c1", 40)[9:11] == c1[:2]
    good, moderate, bad = "25gbit,1ms", "5gbit,7ms", "1gbit,50ms"
    assert nets("c2", 50) == [good] * 12 + [moderate] * 8 + [bad] * 8 + [moderate] * 8 + [good] * 14


def test_what_holds_by_step_second_and_share(tmp_path: Path) -> None:
    first, second = Network.parse("1gbit,1ms"), Network.parse("100mbit,20ms")
    by_step = Schedule.parse(written(tmp_path, EVENING))
    assert [by_step.at(step, 80, 1e9) for step in (0, 39, 40, 79)] == [first] * 2 + [second] * 2
    by_second = Schedule.parse(written(tmp_path, EVENING.replace("step", "second")))
    assert [by_second.at(79, 80, t) for t in (0, 39.9, 40, 1e9)] == [first] * 2 + [second] * 2
    assert by_second.in_seconds(None) == by_second
    small = SHIPPED["c1-small"].in_seconds(8)
    assert [str(small.at(0, 1, t)) for t in (1.9, 2, 4, 6)] == [
        *("1gbit,1ms", "100mbit,1ms", "100mbit,20ms", "1gbit,20ms")
    ]
    refused(by_step.in_seconds, [(10, "by step")])
    refused(SHIPPED["c1"].in_seconds, [(None, "give the run's length")])


FAULTS_OF_SCHEDULES = [
    ("[1, 2]", "write the keys by and phases"),
    ("by: step", "write the keys by and phases"),
    (EVENING + "of: 3", "write the keys by and phases"),
    ("by: {step", "not YAML"),
    (EVENING.replace("step", "epoch"), "by is 'epoch': use one of step, second, share"),
    ("by: step\nphases: []", "no phases"),
    ("by: step\nphases: 3", "phases is not a list"),
    (EVENING.replace("from: 0", "from: 2"), "phase 1 starts at 2"),
    (EVENING.replace("from: 40", "from: 0"), "phase 2 starts at 0"),
    (EVENING.replace("from: 40", "from: 1.5"), "phase 2 starts at 1.5: steps are whole"),
    (EVENING.replace("step", "share"), "phase 2 starts at 40: give a share below 1"),
    (EVENING.replace("from: 40", "from: .inf"), "phase 2 starts at inf"),
    (EVENING.replace("from: 40", "from: soon"), "phase 2: from is 'soon'"),
    (EVENING.replace("from: 40, ", ""), "phase 2: write from and net"),
    (EVENING.replace("100mbit,20ms", "100mb"), "phase 2: network '100mb'"),
    (EVENING.replace('"100mbit,20ms"', "4"), "phase 2: net is 4"),
    (EVENING.replace("100mbit,20ms", "none"), "phase 2 has the network none"),
    (EVENING + "name: c1", "a name of gradwire's own"),
    (EVENING + "name: a b", "its name is 'a b'"),
]


def test_faults_of_schedules_are_named(tmp_path: Path) -> None:
    refused(lambda text: Schedule.parse(written(tmp_path, text)), FAULTS_OF_SCHEDULES)
    texts = [
        ("c3", r"c1, c2, c1-small, c2-small or FILE\.yaml"),
        (str(tmp_path / "missing.yaml"), "cannot be read"),
        ("odd(step: 0 1gbit,1ms; x 1gbit,1ms)", "phase 2: from is 'x'"),
    ]
    refused(Schedule.parse, texts)
