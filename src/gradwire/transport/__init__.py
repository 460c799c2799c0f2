"""Transports: how bytes get from one rank to another. One protocol, several implementations."""

from gradwire.transport.loopback import Hub, Loopback
from gradwire.transport.mixed import Mixed
from gradwire.transport.protocol import Pending, Transport
from gradwire.transport.torch_p2p import TorchP2P

__all__ = ["Hub", "Loopback", "Mixed", "Pending", "TorchP2P", "Transport"]
