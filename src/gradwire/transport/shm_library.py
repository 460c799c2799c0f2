"""The compiled part of the shared-memory transport: shm_ring.c and shm_wait.c, through ctypes.

Like the codecs' kernels they are prebuilt, or compiled on first use into the user's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gradwire.lang.native import jit, prebuilt

_FILES = ("shm_ring.c", "shm_wait.c")
REFUSED = (1 << 64) - 1  # what shm_send and shm_receive return once stopped


_POINTER, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "shm_size": ((_INT, _NUMBER), _NUMBER),
    "shm_map": ((_INT, _NUMBER), _POINTER),
    "shm_unmap": ((_POINTER, _NUMBER), None),
    "shm_fill": ((_POINTER, _NUMBER), _INT),
    "shm_empty": ((_POINTER, _NUMBER), None),
    "shm_lend": ((_POINTER, _POINTER, _NUMBER), None),
    "shm_borrow_from": ((_POINTER, _INT, _POINTER, _NUMBER), None),
    "shm_lent_bytes": ((_POINTER,), _NUMBER),
    "shm_is_lent": ((_POINTER, _POINTER, _NUMBER), _INT),
    "shm_overslept": ((_POINTER,), _NUMBER),
    "shm_begin": ((_INT, _INT, _NUMBER, _NUMBER), _POINTER),
    "shm_connect": ((_POINTER, _INT, _INT, _INT, _INT), _INT),
    "shm_send": ((_POINTER, _INT, _POINTER, _NUMBER, _NUMBER, _NUMBER), _POINTER),
    "shm_receive": ((_POINTER, _INT, _POINTER, _NUMBER, _NUMBER, _INT), _POINTER),
    "shm_message": ((_POINTER,), _POINTER),
    "shm_copy": ((_POINTER,), _INT),
    "shm_free_copy": ((_POINTER,), None),
    "shm_give_back": ((_POINTER, _POINTER), None),
    "shm_wait": ((_POINTER, _POINTER, _NUMBER), _NUMBER),
    "shm_drive": ((_POINTER,), None),
    "shm_fail": ((_POINTER, _INT), None),
    "shm_stop": ((_POINTER, _NUMBER), None),
    "shm_free": ((_POINTER,), None),
}


class Ended(IntEnum):
    """How a wait ended, in the order of shm_wait.c's enum."""

    OK = 0
    TIMEOUT = 1
    DEAD = 2
    FAILED = 3
    GONE = 4
    CORRUPT = 5
    STOPPED = 6
    INTERRUPTED = 7


def source() -> str:
    """The C source."""
    return "\n".join(Path(__file__).with_name(name).read_text("utf-8") for name in _FILES)


def version() -> bytes:
    """8 bytes, a digest of the source; equal digests mean equal segment layouts."""
    return hashlib.sha256(source().encode()).digest()[:8]


@cache
def load() -> SimpleNamespace:
    """The functions of shm_wait.c by name, with their types.

    Raises:
        CompileError: there is no working compiler, or the system lacks the calls to share memory.
    """
    if os.environ.get("GRADWIRE_SHM") == "0":
        raise jit.CompileError("switched off by GRADWIRE_SHM=0")
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED"):
        raise jit.CompileError("only Linux has memfd_create, SO_PEERCRED and futexes")
    return SimpleNamespace(**prebuilt.functions(source(), SIGNATURES))


def unavailable() -> str | None:
    """Why ranks on this machine cannot share memory; None if they can."""
    try:
        load()
    except jit.CompileError as error:
        return str(error)
    return None
