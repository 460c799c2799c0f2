"""Measures a lab from inside: run on its nodes by test_shape.py, it prints one JSON object.

streams BYTES      node 0 exchanges single bytes with node 1 (round trip), then receives a
                   stream from node 1 alone (rate), then from nodes 1 and 2 at once
datagrams SECONDS  numbered, one per millisecond from node 1 to node 0, which prints those that
                   it got
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time

ROUNDS = 50
PORT = 5000


def receive(peer: socket.socket) -> float:
    """Bits received until the peer shuts down, per second since the first of them."""
    buffer = bytearray(1 << 20)
    peer.sendall(b"g")
    total = peer.recv_into(buffer)
    start = time.perf_counter()
    while count := peer.recv_into(buffer):
        total += count
    return 8 * total / (time.perf_counter() - start)


def lost() -> int:
    """Segments that this node has retransmitted, less the spurious retransmissions.

    TCP sends again what others have overtaken, which on a busy machine happens without any loss;
    the receiver then tells it so (a duplicate SACK).
    """
    counts: dict[str, int] = {}
    for table in ("/proc/net/snmp", "/proc/net/netstat"):
        with open(table) as file:
            rows = [line.split() for line in file if line.startswith(("Tcp:", "TcpExt:"))]
        for names, values in zip(rows[::2], rows[1::2], strict=True):
            counts.update(zip(names[1:], map(int, values[1:]), strict=True))
    return counts["RetransSegs"] - counts["TCPDSACKRecvSegs"]


def receive_streams(peers: int) -> None:
    with socket.create_server(("", PORT)) as server:
        streams = {}
        for _ in range(2 * peers - 1):  # node 1 connects twice
            stream, _ = server.accept()
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            streams[stream.recv(2)] = stream
    first = streams.pop(b"1a")
    rtts = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        first.sendall(b"x")
        first.recv(1)
        rtts.append(time.perf_counter() - start)
    alone = receive(first)
    start = time.perf_counter()
    rates: list[float] = []
    others = [streams[key] for key in (b"1b", b"2b")]
    readers = [threading.Thread(target=lambda s=s: rates.append(receive(s))) for s in others]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    print(json.dumps({"rtt_s": statistics.median(rtts), "alone": alone, "shared": sum(rates)}))


def send_streams(rank: str, payload: bytes) -> None:
    def connect(name: str) -> socket.socket:
        while True:
            try:
                stream = socket.create_connection(("node0", PORT))
            except ConnectionRefusedError:
                time.sleep(0.01)
                continue
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.sendall((rank + name).encode())
            return stream

    first = connect("a") if rank == "1" else None
    second = connect("b")
    if first is not None:
        for _ in range(ROUNDS):
            first.recv(1)
            first.sendall(b"x")
    for stream in filter(None, (first, second)):
        stream.recv(1)
        stream.sendall(payload)
        stream.shutdown(socket.SHUT_WR)
    second.recv(1)  # wait until the receiver has everything
    print(json.dumps({"lost": lost()}))


def receive_datagrams() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
        ours.bind(("", PORT))
        found = []
        while data := ours.recv(64):
            found.append(int(data))
        print(json.dumps({"got": found}))


def send_datagrams(seconds: float) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
        time.sleep(0.5)  # the receiver starts at the same time
        sent = int(1000 * seconds)
        for number in range(sent):
            ours.sendto(b"%d" % number, ("node0", PORT))
            time.sleep(0.001)
        time.sleep(0.2)
        ours.sendto(b"", ("node0", PORT))
        print(json.dumps({"sent": sent}))


if __name__ == "__main__":
    rank, (what, given) = os.environ["RANK"], sys.argv[1:]
    if what == "streams":
        receive_streams(peers=2) if rank == "0" else send_streams(rank, bytes(int(given)))
    else:
        receive_datagrams() if rank == "0" else send_datagrams(float(given))
