"""Free TCP ports for rendezvous stores: a port is named now, and a rank listens on it later.

A port that the kernel chose (`bind` to 0) is from its ephemeral range. In the seconds until the
rank listens, the kernel may give the same port to a socket of any other process, such as a listener
of gloo. So these ports are from below that range, where a socket gets only the port that it names.
Processes that use this module are kept apart by UDP sockets, whose port numbers are separate from
TCP's: only the process that holds UDP port N gives TCP port N out.
"""

from __future__ import annotations

import random
import socket
from collections import deque
from pathlib import Path

from gradwire.errors import TransportError

_FIRST = 10_000
_EPHEMERAL = 32_768  # where Linux's range begins unless the machine's owner moved it

# Each socket keeps its port ours; the oldest are let go, long after their stores began to listen.
_held: deque[socket.socket] = deque(maxlen=64)


def free_port() -> int:
    """A TCP port on 127.0.0.1 that is free and that no other caller, in any process, is given.

    Raises `TransportError` if every port is taken.
    """
    end = _ephemeral()
    candidates = range(_FIRST, end if end > 2 * _FIRST else 2**16)
    for port in random.sample(candidates, len(candidates)):
        held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            held.bind(("127.0.0.1", port))
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            held.close()
        else:
            _held.append(held)
            return port
    raise TransportError(
        f"no TCP port of 127.0.0.1 from {candidates.start} to {candidates.stop - 1} is free"
    )


def _ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return _EPHEMERAL
