"""Timed round trips between two ranks, over the engine's own transport.

Of a pair, the lower rank *drives*: it says what is sent, and holds the clock; the other *serves*.
A round trip is a message there, and when all of it has come a message back, each of a given size.
So one clock times both directions: a large message there and a small one back, or the reverse.

    driver    command (there, back, times)      ->  server posts its first receive
    server    ready                             ->  driver begins to time
    driver    `there` bytes                     ->  server answers with `back` bytes; `times` times

Receives are posted before the peer sends, as the engine does: a transport that asks for the
receiver's memory first (gloo) so needs no further trip.
"""

from __future__ import annotations

from time import perf_counter as clock

import torch

from gradwire.engine.identity import scope_tag
from gradwire.transport import Transport
from gradwire.transport.protocol import Pending

_COMMAND, _READY, _THERE, _BACK = range(4)


class Trips:
    """This rank's end of the round trips with one peer.

    Args:
        transport: of a group to which both belong.
        peer: the other rank.
        tags: the tag range of these messages; none other uses it.
    """

    def __init__(self, transport: Transport, peer: int, tags: int) -> None:
        self._transport = transport
        self._peer = peer
        self._tags = [scope_tag(tags, 0, 0, slot) for slot in range(4)]
        self._memory = torch.zeros(0, dtype=torch.uint8)

    def drive(self, there: int, back: int, times: int) -> list[float]:
        """Seconds of each of `times` round trips; sizes in bytes, 1 or more.

        Raises:
            TransportError: the peer did not answer.
        """
        command = torch.tensor([there, back, times], dtype=torch.int64)
        ready = self._receive(torch.zeros(1, dtype=torch.uint8), _READY)
        self._send(command.view(torch.uint8), _COMMAND)
        outgoing, incoming = self._of(there), self._of(back)
        ready.wait()
        seconds = []
        for _ in range(times):
            answer = self._receive(incoming, _BACK)
            begun = clock()
            sent = self._transport.isend(outgoing, self._peer, self._tags[_THERE])
            answer.wait()
            seconds.append(clock() - begun)
            sent.wait()
        return seconds

    def end(self) -> None:
        """Let the peer return from `serve`."""
        self._send(torch.zeros(3, dtype=torch.int64).view(torch.uint8), _COMMAND)

    def serve(self) -> None:
        """Answer the driver until it ends.

        Raises:
            TransportError: the peer did not come, or left.
        """
        while True:
            command = torch.zeros(3, dtype=torch.int64)
            self._receive(command.view(torch.uint8), _COMMAND).wait()
            there, back, times = command.tolist()
            if not times:
                return
            incoming, outgoing = self._of(there), self._of(back)
            coming = self._receive(incoming, _THERE)
            self._send(torch.zeros(1, dtype=torch.uint8), _READY)
            for left in reversed(range(times)):
                coming.wait()
                if left:  # what it will write is not read
                    coming = self._receive(incoming, _THERE)
                self._send(outgoing, _BACK)

    def _of(self, nbytes: int) -> torch.Tensor:
        """Memory whose pages are in use already, so that no fault is timed."""
        if self._memory.numel() < nbytes:
            self._memory = torch.zeros(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes]

    def _receive(self, data: torch.Tensor, slot: int) -> Pending:
        return self._transport.irecv(data, self._peer, self._tags[slot])

    def _send(self, data: torch.Tensor, slot: int) -> None:
        self._transport.isend(data, self._peer, self._tags[slot]).wait()
