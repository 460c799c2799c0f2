"""Memory that collectives own while they run, kept for the next ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

_REMEMBERED = 64  # collectives


class Pool:
    """Arenas of one kind of memory.

    Args:
        make: makes an arena (uint8) of so many bytes.
        unmake: is told of an arena that is let go.

    Attributes:
        owned: bytes of all arenas that exist.
        peak_bytes: the most of that so far.
    """

    def __init__(
        self,
        make: Callable[[int], torch.Tensor],
        unmake: Callable[[torch.Tensor], None] = lambda arena: None,
    ) -> None:
        self.make = make
        self.unmake = unmake
        self.owned = 0
        self.peak_bytes = 0
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        self._recent: deque[int] = deque(maxlen=_REMEMBERED)

    def take(self, nbytes: int) -> torch.Tensor:
        """At least `nbytes` of memory (uint8), reused from earlier collectives where it fits."""
        nbytes = max(nbytes, 1)  # an empty tensor has no address, by which memory is given back
        with self._lock:
            self._recent.append(nbytes)
            self._forget([a for a in self._free if not self._is_needed(a)])
            # A small bucket must not hold a large one's memory, which would be made a second time.
            fitting = [a for a in self._free if nbytes <= a.numel() <= 2 * nbytes]
            if fitting:
                arena = min(fitting, key=torch.Tensor.numel)
                self._free = [a for a in self._free if a is not arena]
            else:
                # What lies free and is too small goes first, so that sizes do not pile up.
                self._forget([a for a in self._free if a.numel() < nbytes])
                arena = self.make(nbytes)
                self.owned += nbytes
                self.peak_bytes = max(self.peak_bytes, self.owned)
        return arena

    def give(self, arena: torch.Tensor) -> None:
        """Return memory that was taken."""
        with self._lock:
            self._free.append(arena)

    def close(self) -> None:
        """Let go of what lies free."""
        with self._lock:
            self._forget(self._free)

    def _is_needed(self, arena: torch.Tensor) -> bool:
        """Whether more than one recent collective would fill most of `arena`.

        DDP's first iteration is a single bucket of the whole model; its memory must not stay.
        """
        return sum(nbytes >= 0.8 * arena.numel() for nbytes in self._recent) > 1

    def _forget(self, arenas: list[torch.Tensor]) -> None:
        for arena in arenas:
            self.owned -= arena.numel()
            self.unmake(arena)
        gone = {id(a) for a in arenas}
        self._free = [a for a in self._free if id(a) not in gone]
