"""The interface of the stress to the engine: owners of scopes, and the start of a scope.

The only file here that knows classes of the engine; the rest calls `gradwire`'s public functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from averaging import started
from gradwire import groups
from gradwire.aggregators import Attached
from gradwire.engine import Communicator
from gradwire.transport import Transport


class Scopes:
    """The owners of one process group, on one rank."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def open(self, name: str, window: int) -> Any:
        """An owner with up to `window` scopes in flight; all ranks open owners in one order."""
        return self.comm.owner(name, window=window)

    def start(
        self, owner: Any, members: Sequence[Attached], gradients: Sequence[torch.Tensor]
    ) -> Future[Any]:
        """Start a scope; the future completes when the gradients are averages, or with an error."""
        return started(owner, members, gradients)

    def abandon(self, error: BaseException) -> None:
        """This rank has raised, and will start no more scopes."""
        self.comm.fail(error)

    def close(self) -> None:
        self.comm.close()


def of_threads(transport: Transport, link: Any = None) -> Scopes:
    """One rank's end of a group of threads; with `link`, collectives run in order over it."""
    return Scopes(Communicator(transport, links=lambda device: link))


def of_processes(group: dist.ProcessGroup) -> Scopes:
    """One rank's end of a process group."""
    return Scopes(groups.communicator(group))
