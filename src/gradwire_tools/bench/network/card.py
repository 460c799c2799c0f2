"""The network card by which this machine reaches another, and its speed, as the kernel tells it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_DEVICES = Path("/sys/class/net")
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # a datagram socket that is connected sends nothing


def card_to(host: str) -> str | None:
    """The name of the card, such as "eth0": that of GLOO_SOCKET_IFNAME, else the one whose address
    messages to `host` come from; None: it is not known."""
    if given := os.environ.get("GLOO_SOCKET_IFNAME"):
        return given.split(",")[0]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as reaching:
        reaching.connect((host, _ANY_PORT))
        own = reaching.getsockname()[0]
        return next((card for _, card in socket.if_nameindex() if _address(card) == own), None)
    return None


def speed_of(card: str) -> float | None:
    """Bits per second; None where the kernel does not know, or the card is none (a veth pair)."""
    folder = _DEVICES / card
    if not any((folder / kind).exists() for kind in ("device", "bonding")):
        return None
    with suppress(OSError, ValueError):  # "Invalid argument" where no cable is
        speed = 1e6 * int((folder / "speed").read_text())
        return speed if speed > 0 else None
    return None


def _address(card: str) -> str | None:
    """The IPv4 address of a card."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asked = struct.pack("256s", card.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(asking, _SIOCGIFADDR, asked)[20:24])
    return None
