"""A store's server: its address, gradwire's own connection to it, and whether it still runs.

For every operation on a server that has ended, torch's client writes a warning with a stack trace
to standard error; connecting to one blocks for minutes. At the end of a training script the server
often ends first. So a plain socket without traffic, which breaks silently, shows whether the server
still runs, and no operation is started once it is broken.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Hashable
from typing import Any

import torch.distributed as dist

_CONNECT_S = 5.0
_SERVER_KEY = "gradwire/server"


class Gone(Exception):
    """The store cannot be reached any more."""


class Host:
    """The server of a store.

    Args:
        store: a torch.distributed Store, with any prefixes. `connect` drops the reference: the
            store may be the server itself.

    Attributes:
        address: equal for stores on the same server.
    """

    def __init__(self, store: Any) -> None:
        self._store: Any = store
        self._base: Any = None
        self._client: Any = None
        self._server = b""  # the server's random name
        self.address: Hashable = _address(without_prefixes(store))
        self._watch: socket.socket | None = None

    def __str__(self) -> str:
        if isinstance(self.address, tuple) and self.address[0] == "tcp":
            return "the store at {1}:{2}".format(*self.address)
        return "the group's store"

    def connect(self) -> Any:
        """Open a new connection to the store, with its prefixes.

        Raises:
            Gone: the server does not answer.
        """
        self._watch = self._reach()
        store, self._store = self._store, None
        if not isinstance(without_prefixes(store), dist.TCPStore):
            self._base = without_prefixes(store)  # kept, so that its id stays its address
        client = own(store)
        self._client = without_prefixes(client)
        self._server = _server(self._client)
        return client

    @property
    def is_broken(self) -> bool:
        """Whether the server has closed the socket; thread-safe, one system call."""
        watch = self._watch
        if watch is None:
            return False
        try:
            watch.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            pass
        return True

    def check(self) -> None:
        """Raise Gone if the server has ended; one system call.

        A server may close an idle socket and still run; and where one has ended, another may have
        taken its address. `is_broken` stays true until this is known, so that no new group joins
        through a server that has ended.
        """
        if self.is_broken:
            watch = self._reach()
            assert watch is not None
            assert self._watch is not None
            try:
                if _server(own(self._client)) != self._server:
                    raise Gone("another store has taken its address")
            except (Gone, RuntimeError) as error:
                watch.close()
                raise Gone(str(error)) from None
            self._watch.close()
            self._watch = watch

    def close(self) -> None:
        self._store = self._base = self._client = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _reach(self) -> socket.socket | None:
        if not (isinstance(self.address, tuple) and self.address[0] == "tcp"):
            return None
        _, name, port = self.address
        try:
            watch = socket.create_connection((name, port), timeout=_CONNECT_S)
        except OSError as error:
            raise Gone(str(error)) from None
        watch.setblocking(False)
        return watch


def without_prefixes(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def own(store: Any) -> Any:
    """A new connection to a store; the store itself, if its kind cannot be cloned."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        if isinstance(without_prefixes(store), dist.TCPStore):
            raise
        return store


def _server(store: Any) -> bytes:
    """The random name of a store's server, which its first client writes."""
    name: bytes = store.compare_set(_SERVER_KEY, "", secrets.token_hex(8))
    return name


def _address(base: Any) -> Hashable:
    if isinstance(base, dist.TCPStore):
        return ("tcp", base.host, base.port)
    with contextlib.suppress(AttributeError):
        return ("file", base.path)
    return ("object", id(base))
