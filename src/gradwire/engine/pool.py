"""Memory of collectives in flight, pooled for reuse."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from gradwire.engine.cuda_streams import on
from gradwire.transport.shm_store import Store

_REMEMBERED = 64  # collectives


class Pool:
    """Arenas of one kind of memory.

    Args:
        make: allocates an arena (uint8) of the given number of bytes.
        unmake: called with an arena that the pool drops.

    Attributes:
        owned: bytes of all arenas that exist.
        peak_bytes: the maximum of `owned` so far.
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
        nbytes = max(nbytes, 1)  # memory is given back by address; an empty tensor has none
        with self._lock:
            self._recent.append(nbytes)
            self._forget([a for a in self._free if not self._is_needed(a)])
            # A small bucket must not take a large one's arena, which would be allocated again.
            fitting = [a for a in self._free if nbytes <= a.numel() <= 2 * nbytes]
            if fitting:
                arena = min(fitting, key=torch.Tensor.numel)
                self._free = [a for a in self._free if a is not arena]
            else:
                # Drop free arenas that are too small, so that sizes do not accumulate.
                self._forget([a for a in self._free if a.numel() < nbytes])
                arena = self.make(nbytes)
                self.owned += nbytes
                self.peak_bytes = max(self.peak_bytes, self.owned)
        return arena

    def give(self, arena: torch.Tensor) -> None:
        """Give back memory that was taken."""
        with self._lock:
            self._free.append(arena)

    def close(self) -> None:
        """Drop the free arenas."""
        with self._lock:
            self._forget(self._free)

    def _is_needed(self, arena: torch.Tensor) -> bool:
        """Whether more than one recent collective would fill most of `arena`.

        DDP's first iteration is a single bucket of the whole model; its arena must not be kept.
        """
        return sum(nbytes >= 0.8 * arena.numel() for nbytes in self._recent) > 1

    def _forget(self, arenas: list[torch.Tensor]) -> None:
        for arena in arenas:
            self.owned -= arena.numel()
            self.unmake(arena)
        gone = {id(a) for a in arenas}
        self._free = [a for a in self._free if id(a) not in gone]


class Pools:
    """The arenas of one process group, and the side streams of its kernels.

    Args:
        store: returns the memory that peers on this machine can read in place, or None.
    """

    def __init__(self, store: Callable[[], Store | None]) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._pools: dict[tuple[torch.device, bool], Pool] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._peak_bytes = 0  # of closed pools

    def of(self, device: torch.device, staging: bool = False) -> Pool:
        """The arenas on `device`; with `staging`, host arenas for messages to and from it."""
        with self._lock:
            known = self._pools.get((device, staging))
        if known is not None:
            return known
        pinned = staging and device.type == "cuda"
        place = torch.device("cpu") if staging else device
        stream = None if staging else self.stream(device)
        # Peers on this machine may read in place what kernels on the CPU write.
        store = self._store() if device.type == "cpu" and not staging else None

        def make(nbytes: int) -> torch.Tensor:
            arena = None if store is None else store.take(nbytes)
            if arena is not None:
                return arena
            # Allocated on the side stream, so that no other stream's work may still use the memory.
            with on(stream):
                return torch.empty(nbytes, dtype=torch.uint8, device=place, pin_memory=pinned)

        def unmake(arena: torch.Tensor) -> None:
            if store is not None:
                store.give(arena)

        with self._lock:
            return self._pools.setdefault((device, staging), Pool(make, unmake))

    @property
    def peak_bytes(self) -> int:
        """The sum over kinds of memory of the most bytes that were allocated at one time."""
        with self._lock:
            return self._peak_bytes + sum(pool.peak_bytes for pool in self._pools.values())

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The side stream of this group's kernels on `device`; None on the CPU."""
        if device.type == "cpu":
            return None
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            return self._streams[device]

    def close(self) -> None:
        """Close all pools, and drop the store."""
        with self._lock:
            for pool in self._pools.values():
                pool.close()
                self._peak_bytes += pool.peak_bytes
            self._pools.clear()
