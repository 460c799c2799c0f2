"""Whether the processes of other ranks on this machine still run, as far as /proc shows.

A process is identified by its PID namespace and the machine's boot, its PID, and its start time,
since PIDs are reused.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

_STARTED = 19  # field of /proc/PID/stat, counted after the name, which may contain anything


@dataclass(frozen=True)
class Process:
    """A rank's process.

    Attributes:
        space: 32 bytes, a digest of the boot and PID namespace in which `number` is valid.
        number: the PID; 0: unknown.
        started: start time, in clock ticks since boot.
    """

    space: bytes
    number: int
    started: int

    @classmethod
    def own(cls) -> Process:
        """This rank's process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text()
            names = os.readlink("/proc/self/ns/pid")
            _, started = _state(os.getpid())
        except (OSError, ValueError, IndexError):
            return cls(bytes(32), 0, 0)
        space = hashlib.blake2b(f"{boot} {names}".encode(), digest_size=32).digest()
        return cls(space, os.getpid(), started)

    def has_ended(self, space: bytes) -> bool:
        """Whether it is known to have ended; `space` is the caller's."""
        if not self.number or self.space != space:
            return False
        try:
            state, started = _state(self.number)
        except FileNotFoundError:
            return True
        except (OSError, ValueError, IndexError):
            return False
        return state in "ZX" or started != self.started


def _state(number: int) -> tuple[str, int]:
    """(state, start time) of a process."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[_STARTED])
