"""The borrowed messages of one run: which buffers they contain, and when each is given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.engine import Graph
from gradwire.transport import Loan


@dataclass
class _Lent:
    """A message that is read in the sender's memory; `left`: how many of its buffers have readers
    left."""

    loan: Loan
    message: torch.Tensor
    left: int


class Loans:
    """The borrowed messages of one run.

    Args:
        graph: of the run.
        nbytes: bytes per buffer.
        readers: per buffer, how many tasks read it.
    """

    def __init__(self, graph: Graph, nbytes: Sequence[int], readers: Sequence[int]) -> None:
        self._graph = graph
        self._nbytes = nbytes
        self._readers = list(readers)  # readers left
        self._held: dict[int, tuple[_Lent, torch.Tensor]] = {}

    def __contains__(self, buffer: int) -> bool:
        """Whether a buffer is part of a message that is borrowed now."""
        return buffer in self._held

    def lend(self, buffer: int, loan: Loan, message: torch.Tensor) -> None:
        """The message that begins with `buffer` has arrived."""
        buffers = self._graph.writes[self._graph.writer[buffer]]
        lent, at = _Lent(loan, message, len(buffers)), 0
        for each in buffers:
            self._held[each] = lent, message[at : at + self._nbytes[each]]
            at += self._nbytes[each]

    def memory(self, buffers: Sequence[int]) -> torch.Tensor:
        """The memory of one buffer, or of a whole message."""
        lent, only = self._held[buffers[0]]
        return only if len(buffers) == 1 else lent.message

    def read(self, buffers: Sequence[int]) -> None:
        """A task has read these buffers; messages without further readers are given back."""
        for buffer in buffers:
            if buffer in self._held:
                self._readers[buffer] -= 1
                if not self._readers[buffer]:
                    lent, _ = self._held.pop(buffer)
                    lent.left -= 1
                    if not lent.left:
                        lent.loan.give_back()
