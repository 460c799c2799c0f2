"""The stores that a process has mapped, its own and its peers': each once for all groups.

Groups and views keep the stores that they use alive: a store is unmapped with its last group and
its last view. The process's own store is made for the first group, and made again if a later group
finds it unmapped.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from gradwire.transport import shm_store
from gradwire.transport.shm_store import Mapped, ProcessStore


class Stores:
    """The stores of one process; tests make several to emulate as many processes."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._mapped: weakref.WeakValueDictionary[bytes, Mapped] = weakref.WeakValueDictionary()
        self._own: weakref.ref[ProcessStore] | None = None

    def own(self, library: Any, peers: int) -> ProcessStore:
        """This process's store; made if missing, for a group with `peers` peers on the machine.

        Raises:
            OSError: resource limits are too low, or there is no memory or no descriptor.
        """
        with self._lock:
            store = None if self._own is None else self._own()
            if store is None:
                nbytes = shm_store.room(peers)
                if not nbytes:
                    raise OSError("the limits on file size or address space are too low for it")
                store = ProcessStore(library, nbytes)
                self._own = weakref.ref(store)
                self._mapped[store.token] = store
            return store

    def of_peer(self, library: Any, token: bytes, fd: int) -> Mapped:
        """The store with this token, whose file is `fd` (the caller keeps the descriptor).

        Raises:
            OSError: it is no store, resource limits are too low, or it cannot be mapped.
        """
        with self._lock:
            store = self._mapped.get(token)
            if store is None:
                nbytes, space = shm_store.size_of(fd), shm_store.space_for_stores()
                if not nbytes:
                    raise OSError("its store is empty, or could change its size")
                used = sum(each.nbytes for each in self._mapped.values())
                if space is not None and used + nbytes > space:
                    raise OSError("the limit on address space is too low for its store")
                store = self._mapped[token] = Mapped(library, fd, nbytes)
            return store

    def forget(self) -> None:
        """In a forked child, which does not inherit the memory: close the parent's store, so that
        it ends with the parent."""
        store = None if self._own is None else self._own()
        if store is not None:
            os.close(store.fd)
        self._clear()


STORES = Stores()
os.register_at_fork(after_in_child=STORES.forget)
