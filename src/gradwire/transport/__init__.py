"""Transports carry bytes from one rank to another: one protocol, several implementations."""

try:
    from gradwire.transport.loopback import Hub, Loopback
    from gradwire.transport.mixed import Mixed
    from gradwire.transport.protocol import Loan, Pending, Transport
    from gradwire.transport.torch_p2p import TorchP2P
except ModuleNotFoundError as missing:
    # Wheels, which contain shm_library's functions compiled, are built without torch.
    if missing.name != "torch":
        raise

__all__ = ["Hub", "Loan", "Loopback", "Mixed", "Pending", "TorchP2P", "Transport"]
