"""The links of the lab, as text for `ip -batch` and `tc -batch`: pure functions that run nothing.

    node 0 [eth0] ==== [port0] switch [port1] ==== [eth0] node 1
            htb          htb            htb         htb
           egress      ingress        ingress      egress

Each link is a veth pair. htb on the node's end limits what the node sends; htb on the switch's end
limits what it receives. The switch is one more namespace: in it, either a kernel bridge joins the
ports, with netem under their htb where there is a latency, or the delay line (delay_line.c) does
the switching itself. Latency applies before the ingress rate limit, as on a real wire.

There is no ARP: addresses follow from the rank, and every node gets a static neighbour table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

# Jumbo frames, as on clusters. Headers then take 0.7 % of the rate. Segmentation offload stays on:
# the kernel handles up to GSO_BYTES at a time and charges the rate for each header.
MTU = 9000
# The delay line's slots hold 65536 bytes, its own headers included.
GSO_BYTES = 61440
# In packets. Bursts of many peers do not reach this limit, since the senders' socket buffers bound
# the data in flight. If the lab lost packets, a benchmark would measure TCP's recovery.
QUEUE_PACKETS = 100_000

# No packet is lost, so a queue grows to the size of the senders' buffers. If it delays a packet by
# more than 200 ms, TCP's minimum retransmission time-out, TCP retransmits the late packet. So the
# send buffer of a connection holds this many seconds' worth of the rate.
SEND_BUFFER_S = 0.04
SEND_BUFFER_BYTES = (1 << 17, 1 << 22)  # at least a few packets; at most Linux's limit

MAX_NODES = 1024


def address(rank: int) -> str:
    """The IPv4 address of a node, in 198.18.0.0/15 (reserved for benchmarks, RFC 2544)."""
    number = rank + 1
    return f"198.18.{number >> 8}.{number & 255}"


def hostname(rank: int) -> str:
    return f"node{rank}"


def hosts(nodes: int) -> str:
    """The /etc/hosts of every node.

    IPv4-mapped IPv6 addresses have lines too: torch's store listens on both, looks up the names of
    these addresses, and warns if there is none.
    """
    lines = ["127.0.0.1 localhost"]
    for rank in range(nodes):
        lines += [f"{prefix}{address(rank)} {hostname(rank)}" for prefix in ("", "::ffff:")]
    return "".join(f"{line}\n" for line in lines)


def settings(rate_bits_per_s: int, latency_ns: int) -> dict[str, str]:
    """Every node's TCP settings, under /proc/sys/net. They override the host's, since results
    depend on them.

    Reno is in every kernel, and every namespace may choose it.
    """
    least, most = SEND_BUFFER_BYTES
    # Queues in both directions delay acknowledgements. A buffer of only two round trips loses a
    # fifth of the rate, so this one holds four.
    in_flight_s = max(SEND_BUFFER_S, 4 * 2 * latency_ns / 1e9)
    buffer = round(min(max(rate_bits_per_s / 8 * in_flight_s, least), most))
    return {
        "ipv4/tcp_congestion_control": "reno",
        "ipv4/tcp_wmem": f"4096 16384 {buffer}",
    }


def ip_node(rank: int, nodes: int, switch_pid: int) -> list[str]:
    """Inside node `rank`: create its link, address it and write the neighbour table."""
    peers = [peer for peer in range(nodes) if peer != rank]
    # eth0's index must differ from its port's. Otherwise the kernel takes a second to notice that
    # the link is up; it does so at once for a device whose peer has another index.
    eth0 = f"eth0 index {4 * MAX_NODES} address {_mac(rank)}"
    return [
        "link set dev lo up",
        f"link add {eth0} type veth peer name port{rank} netns {switch_pid}",
        f"link set dev eth0 mtu {MTU} gso_max_size {GSO_BYTES} addrgenmode none",
        f"addr add {address(rank)}/15 dev eth0",
        "link set dev eth0 up",
        *(f"neigh add {address(p)} lladdr {_mac(p)} dev eth0 nud permanent" for p in peers),
    ]


def ip_switch(nodes: int, bridge: bool) -> list[str]:
    """Inside the switch, once every node has its link: set the ports up, and bridge them."""
    commands = ["link set dev lo up"]
    if bridge:
        commands += [
            "link add lab type bridge",
            f"link set dev lab mtu {MTU} addrgenmode none",
            "link set dev lab up",
        ]
    for rank in range(nodes):
        master = " master lab" if bridge else ""
        commands.append(
            f"link set dev port{rank} mtu {MTU} gso_max_size {GSO_BYTES} addrgenmode none{master}"
        )
        commands.append(f"link set dev port{rank} up")
    return commands


def bridge_open(shown: str) -> bool:
    """Whether every port forwards, from the output of `ip -json -details link show master lab`.

    A port takes a moment after it is set up. A packet sent before is lost, and if it opens a
    connection, TCP waits a second to send it again.
    """
    slaves = [port["linkinfo"]["info_slave_data"] for port in json.loads(shown)]
    return all(slave["state"] == "forwarding" for slave in slaves)


def ip_link(rank: int, up: bool) -> list[str]:
    """Inside the switch: set node `rank`'s port up or down."""
    return [f"link set dev port{rank} {'up' if up else 'down'}"]


def tc_shape(
    devices: Sequence[str], rate_bits_per_s: int, netem_ns: int | None = None, verb: str = "add"
) -> list[str]:
    """Limit the egress of `devices` to the rate, after a delay of `netem_ns` nanoseconds by netem
    unless it is None.

    Args:
        verb: "add"; or "change" for devices that have a limit, which drops no queued packet.
    """
    # The burst is what an idle link may send at once: half a millisecond's worth, and at least one
    # packet. With a larger one, short transfers exceed the rate; with a smaller one, a late timer
    # loses rate.
    burst = max(MTU + 100, rate_bits_per_s // 8 // 2000)
    limit = f"rate {rate_bits_per_s}bit burst {burst}b cburst {burst}b quantum {GSO_BYTES}"
    commands = []
    for device in devices:
        if verb == "add":
            commands.append(f"qdisc add dev {device} root handle 1: htb default 1")
        commands.append(f"class {verb} dev {device} parent 1: classid 1:1 htb {limit}")
        queue = f"qdisc {verb} dev {device} parent 1:1 handle 10:"
        if netem_ns is not None:
            delay = f"{netem_ns / 1000:.3f}us"
            commands.append(f"{queue} netem delay {delay} limit {QUEUE_PACKETS}")
        elif verb == "add":
            commands.append(f"{queue} pfifo limit {QUEUE_PACKETS}")
    return commands


def tc_try_netem() -> list[str]:
    """Inside the switch: succeeds where the kernel has netem, and changes nothing."""
    return ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"]


def _mac(rank: int) -> str:
    """A locally administered address; the delay line routes by its last two bytes, rank + 1."""
    number = rank + 1
    return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"
