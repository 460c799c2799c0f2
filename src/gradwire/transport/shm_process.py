"""The stores that a process has mapped, its own and its peers': each once for all groups.

Groups and views hold the stores that they use: one is unmapped when its last group and its last
view are gone. The process's own is made for the first group, and anew for the next one after that.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from gradwire.transport import shm_store
from gradwire.transport.shm_store import Mapped, ProcessStore


class Stores:
    """A process's; tests have several, which play as many processes."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._mapped: weakref.WeakValueDictionary[bytes, Mapped] = weakref.WeakValueDictionary()
        self._own: weakref.ref[ProcessStore] | None = None

    def own(self, library: Any, peers: int) -> ProcessStore:
        """This process's store; if it has none, one for a group with so many peers on the machine.

        Raises:
            OSError: limits leave it no room, or there is no memory, or no descriptor.
        """
        with self._lock:
            store = None if self._own is None else self._own()
            if store is None:
                nbytes = shm_store.room(peers)
                if not nbytes:
                    raise OSError("the limits on files or address space leave it no room")
                store = ProcessStore(library, nbytes)
                self._own = weakref.ref(store)
                self._mapped[store.token] = store
            return store

    def of_peer(self, library: Any, token: bytes, fd: int) -> Mapped:
        """The store with this token, whose file is `fd` (still the caller's).

        Raises:
            OSError: it is no store, or limits or the memory leave it no room.
        """
        with self._lock:
            store = self._mapped.get(token)
            if store is None:
                nbytes, space = shm_store.size_of(fd), shm_store.space_for_stores()
                if not nbytes:
                    raise OSError("its store is empty, or could change its size")
                used = sum(each.nbytes for each in self._mapped.values())
                if space is not None and used + nbytes > space:
                    raise OSError("the limit on address space leaves its store no room")
                store = self._mapped[token] = Mapped(library, fd, nbytes)
            return store

    def forget(self) -> None:
        """In a forked child, which has none of the memory: let go of the parent's store, so that it
        ends with the parent."""
        store = None if self._own is None else self._own()
        if store is not None:
            os.close(store.fd)
        self._clear()


STORES = Stores()
os.register_at_fork(after_in_child=STORES.forget)
