"""The links of the lab, as text for `ip -batch` and `tc -batch`: pure functions, run elsewhere.

    node 0 [eth0] ==== [port0] switch [port1] ==== [eth0] node 1
            htb          htb            htb         htb
           egress      ingress        ingress      egress

Each link is a veth pair. htb on the node's end limits what the node sends; htb on the switch's end
limits what it receives. The switch is one more namespace: in it, either a kernel bridge joins the
ports, with netem under their htb where there is a latency, or the delay line (delay_line.c) does
the switching itself. Latency comes before the ingress rate, as a wire comes before a queue.

There is no ARP: addresses follow from the rank, and every node is given the table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

# Jumbo frames, as clusters set them. Headers then take 0.7 % of the rate; segmentation offload
# stays on, so the kernel handles up to GSO_BYTES at a time and charges the rate for each header.
MTU = 9000
# The delay line's slots hold 65536 bytes, its own headers included.
GSO_BYTES = 61440
# Packets, not bytes: a limit that bursts of many peers do not reach, since the senders' own socket
# buffers bound what is under way. A lab that loses packets would measure TCP's recovery instead.
QUEUE_PACKETS = 100_000

# Since nothing is lost, a queue is as long as the senders' buffers. Where that delays what stands
# behind it by more than 200 ms, TCP's least time-out, TCP sends again what was only late. So a
# connection may have this time's worth under way.
SEND_BUFFER_S = 0.04
SEND_BUFFER_BYTES = (1 << 17, 1 << 22)  # a few packets at least; at most what Linux takes

MAX_NODES = 1024


def address(rank: int) -> str:
    """The IPv4 address of a node, in 198.18.0.0/15 (RFC 2544: for benchmarks)."""
    number = rank + 1
    return f"198.18.{number >> 8}.{number & 255}"


def hostname(rank: int) -> str:
    return f"node{rank}"


def hosts(nodes: int) -> str:
    """The /etc/hosts of every node.

    IPv4 addresses in IPv6's clothes have lines too: torch's store, which listens on both, asks for
    the names of those, and warns if there is none.
    """
    lines = ["127.0.0.1 localhost"]
    for rank in range(nodes):
        lines += [f"{prefix}{address(rank)} {hostname(rank)}" for prefix in ("", "::ffff:")]
    return "".join(f"{line}\n" for line in lines)


def settings(rate_bits_per_s: int, latency_ns: int) -> dict[str, str]:
    """Of every node's TCP, under /proc/sys/net, whatever the host's: results depend on them.

    Reno is in every kernel, and every namespace may choose it.
    """
    least, most = SEND_BUFFER_BYTES
    # Both directions' queues delay acknowledgements: two round trips' worth cost a fifth of a rate.
    under_way = max(SEND_BUFFER_S, 4 * 2 * latency_ns / 1e9)
    buffer = round(min(max(rate_bits_per_s / 8 * under_way, least), most))
    return {
        "ipv4/tcp_congestion_control": "reno",
        "ipv4/tcp_wmem": f"4096 16384 {buffer}",
    }


def ip_node(rank: int, nodes: int, switch_pid: int) -> list[str]:
    """Inside node `rank`: create its link, address it and write the neighbour table."""
    peers = [peer for peer in range(nodes) if peer != rank]
    # eth0's index differs from its port's, or the kernel takes its time (a second) to notice that
    # the link is up: it hurries for a device whose peer has another index.
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
    """Inside the switch, once every node has made its link: raise the ports, and bridge them."""
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
    """Whether every port forwards, by the answer to `ip -json -details link show master lab`.

    A port takes a moment after it is raised. A packet sent before is lost, and if it opens a
    connection, TCP waits a second to send it again.
    """
    slaves = [port["linkinfo"]["info_slave_data"] for port in json.loads(shown)]
    return all(slave["state"] == "forwarding" for slave in slaves)


def ip_link(rank: int, up: bool) -> list[str]:
    """Inside the switch: plug node `rank`'s cable in, or pull it out."""
    return [f"link set dev port{rank} {'up' if up else 'down'}"]


def tc_shape(devices: Sequence[str], rate_bits_per_s: int, netem_ns: int = 0) -> list[str]:
    """Limit what leaves `devices` to the rate, after `netem_ns` nanoseconds if that is not zero."""
    # The burst is what an idle link may send at once. Too large, and short transfers look faster
    # than the rate; too small, and a late timer loses rate: half a millisecond, and one packet.
    burst = max(MTU + 100, rate_bits_per_s // 8 // 2000)
    queue = f"pfifo limit {QUEUE_PACKETS}"
    if netem_ns:
        queue = f"netem delay {netem_ns / 1000:.3f}us limit {QUEUE_PACKETS}"
    limit = f"rate {rate_bits_per_s}bit burst {burst}b cburst {burst}b quantum {GSO_BYTES}"
    commands = []
    for device in devices:
        commands += [
            f"qdisc add dev {device} root handle 1: htb default 1",
            f"class add dev {device} parent 1: classid 1:1 htb {limit}",
            f"qdisc add dev {device} parent 1:1 handle 10: {queue}",
        ]
    return commands


def tc_try_netem() -> list[str]:
    """Inside the switch: succeeds where the kernel has netem, and leaves nothing behind."""
    return ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"]


def _mac(rank: int) -> str:
    """Locally administered; its last two bytes are rank + 1, which the delay line routes by."""
    number = rank + 1
    return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"
