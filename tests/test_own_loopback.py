"""Workers of a test run do not meet on the network; what needs the host's network can return."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import socket, sys, threading
from loopback import host_network, own_loopback

def reaches(port):
    with socket.socket() as s:
        s.settimeout(5)
        return s.connect_ex(("127.0.0.1", port)) == 0

port = int(sys.argv[1])
before = reaches(port)
own_loopback()
with socket.create_server(("127.0.0.1", port)) as server:  # the host has a listener there, too
    inside = []
    thread = threading.Thread(target=lambda: inside.append(reaches(port)))
    thread.start()
    thread.join()
    server.settimeout(5)
    server.accept()[0].close()
with host_network():
    outside = reaches(port)
print(before, inside[0], reaches(port), outside)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: a worker has no network of its own")
def test_a_worker_has_loopback_for_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, port], capture_output=True, text=True, check=False,
            timeout=60, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )  # fmt: skip
    assert done.stdout.split() == ["True", "True", "False", "True"], done.stderr
