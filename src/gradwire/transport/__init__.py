"""Transports: how bytes get from one rank to another. One protocol, several implementations."""

try:
    from gradwire.transport.loopback import Hub, Loopback
    from gradwire.transport.mixed import Mixed
    from gradwire.transport.protocol import Loan, Pending, Transport
    from gradwire.transport.torch_p2p import TorchP2P
except ModuleNotFoundError as missing:
    # Wheels are built where there is no torch, and carry shm_library's functions compiled.
    if missing.name != "torch":
        raise

__all__ = ["Hub", "Loan", "Loopback", "Mixed", "Pending", "TorchP2P", "Transport"]
