"""The transport of a process group: shared memory within a machine, else the group's own messages.

The two ranks of each pair choose together, when the transport is made.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import TransportError
from gradwire.transport import shm_handshake
from gradwire.transport.protocol import Loan, Pending
from gradwire.transport.shm_store import Store
from gradwire.transport.torch_p2p import TorchP2P


class Mixed:
    """Messages within a process group; all ranks construct it together.

    Args:
        group: a process group of CPU tensors (gloo); None is the default group.
        machine: the name of this machine, for tests that emulate several machines.

    Attributes:
        reached: the peers with which this rank shares memory.
        in_memory: whether these are all peers.
        shared_bytes: size of this rank's shared segment, and of what it has taken from its store.

    Raises:
        TransportError: the group cannot carry CPU tensors between ranks, or a peer did not answer.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, machine: str | None = None) -> None:
        self._p2p = TorchP2P(group)
        self.rank = self._p2p.rank
        self.world_size = self._p2p.world_size
        self.timeout = self._p2p.timeout
        try:
            self._shm, self.reached = shm_handshake.share(self._p2p, machine)
        except BaseException:
            self._p2p.close()
            raise
        self.in_memory = self._shm is not None and len(self.reached) == self.world_size - 1
        if self._shm is not None:
            # Both parts share one error and one table of waits.
            self._shm.explain = self._explain
            self._shm.waiting = self._p2p.waiting
            if len(self.reached) < self.world_size - 1:
                # While all other threads wait for gloo, this one moves bytes in shared memory.
                threading.Thread(target=self._shm.drive, name="gradwire-shm", daemon=True).start()

    @property
    def name(self) -> str:
        """shm, torch_p2p, or shm+torch_p2p: the transports of this rank's messages."""
        names = ["shm"] * bool(self.reached)
        names += ["torch_p2p"] * (len(self.reached) < self.world_size - 1 or not self.reached)
        return "+".join(names)

    @property
    def board(self) -> dist.Store:
        return self._p2p.board

    @property
    def shared_bytes(self) -> int:
        return 0 if self._shm is None else self._shm.shared_bytes

    @property
    def lent_bytes(self) -> int:
        return 0 if self._shm is None else self._shm.lent_bytes

    @property
    def lenders(self) -> frozenset[int]:
        return frozenset() if self._shm is None else self._shm.lenders & self.reached

    @property
    def store(self) -> Store | None:
        return None if self._shm is None else self._shm.store

    def isend(self, data: torch.Tensor, peer: int, tag: int, in_use: int | None = None) -> Pending:
        if self._shm is not None and peer in self.reached:
            return self._shm.isend(data, peer, tag, in_use)
        return self._p2p.isend(data, peer, tag)

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> Pending:
        if self._shm is not None and peer in self.reached:
            return self._shm.irecv(data, peer, tag)
        return self._p2p.irecv(data, peer, tag)

    def borrow(self, nbytes: int, peer: int, tag: int) -> Loan:
        assert self._shm is not None
        return self._shm.borrow(nbytes, peer, tag)

    @property
    def waiting(self) -> dict[Any, float]:
        """An object with a `peer` -> when the wait for it began; see TorchP2P."""
        return self._p2p.waiting

    def explain(self, peer: int, what: str, error: RuntimeError) -> TransportError:
        """The error to raise when another operation between these ranks failed; see TorchP2P."""
        return self._explain(peer, what, str(error), None)

    def _explain(self, peer: int, what: str, reason: str, blamed: int | None) -> TransportError:
        error = self._p2p.explain(peer, what, RuntimeError(reason), blamed)
        if self._shm is not None:
            self._shm.error = error
        return error

    def fail(self, peer: int) -> None:
        self._p2p.fail(peer)
        if self._shm is not None:
            self._shm.error = self._p2p.error
            self._shm.fail(peer)

    def longest_wait(self) -> tuple[float, int] | None:
        return self._p2p.longest_wait()

    def close(self) -> None:
        if self._shm is not None:
            self._shm.close()
        self._p2p.close()
