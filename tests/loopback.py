"""A loopback network of its own for each xdist worker.

gloo takes the first connection that names a pair's number for that pair, whoever made it. A process
of another test that still tries to reach a former peer's port may so take the place of a rank, once
that port is given to a new listener; the rank itself then reads "Connection closed by peer". In a
network namespace of its own, a worker meets only its own processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1

_hosts: list[int] = []  # the host's network, once it is left


def own_loopback() -> None:
    """Give this thread, and all that it starts from now on, a network with nothing but loopback.

    Without root, or where namespaces are forbidden, nothing changes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    host = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    if libc.unshare(_NEWNET):
        os.close(host)
        return
    _hosts.append(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


@contextlib.contextmanager
def host_network() -> Iterator[None]:
    """Return to the host's network in the block."""
    if not _hosts:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert libc.setns(_hosts[0], _NEWNET) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.setns(own, _NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(own)


def without_lookups(said: str) -> str:
    """What a process said, less torch's warnings that an address has no name: there is no DNS."""
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if "hostname of the client socket cannot be" not in line)
