"""Numbered datagrams from node 1 to node 0, run by test_shape.py: which arrive, and in what order.

Node 1 sends for the given seconds, one per millisecond; node 0 prints the numbers it got.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

PORT = 5001


def receiver() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
        ours.bind(("", PORT))
        found = []
        while data := ours.recv(64):
            found.append(int(data))
        print(json.dumps({"got": found}))


def sender(seconds: float) -> None:
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
    if os.environ["RANK"] == "0":
        receiver()
    else:
        sender(float(sys.argv[1]))
