"""Whether the processes of other ranks on this machine still run, as far as /proc shows.

A process is identified by its PID namespace and the machine's boot, its PID, and its start time,
since PIDs are reused. As a rank gets its place in a group it tells its process in a journal of the
group, one for each machine's boot and PID namespace; peers read it when they wait for long.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_STARTED = 19  # field of /proc/PID/stat, counted after the name, which may contain anything

Process = tuple[int, int]  # its PID (0: unknown) and start time, in clock ticks since boot


def own() -> Process:
    """This rank's process."""
    try:
        return os.getpid(), _state(os.getpid())[1]
    except (OSError, ValueError, IndexError):
        return 0, 0


def has_ended(number: int, started: int) -> bool:
    """Whether a process is known to have ended."""
    try:
        state, since = _state(number) if number else ("", started)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, IndexError):
        return False
    return state in ("Z", "X") or since != started


def machine() -> str:
    """Names the boot and PID namespace in which PIDs are valid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        names = os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"  # no process is known there, either
    return hashlib.blake2b(f"{boot} {names}".encode(), digest_size=16).hexdigest()


def _state(number: int) -> tuple[str, int]:
    """(state, start time) of a process."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[_STARTED])
