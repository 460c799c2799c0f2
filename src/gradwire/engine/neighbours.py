"""Whether the processes of other ranks on this machine are still there, as far as /proc says.

A process is known by where its number means something (the boot and the namespace of process
numbers), that number, and when it was started: a number is given again.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

_STARTED = 19  # of /proc/PID/stat, counted behind the name, which may hold anything


@dataclass(frozen=True)
class Process:
    """A rank's process; `number` 0: nothing is known of it.

    Attributes:
        space: 32 bytes, where `number` means something.
        started: in clock ticks since the machine was.
    """

    space: bytes
    number: int
    started: int

    @classmethod
    def own(cls) -> Process:
        """This rank's."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text()
            names = os.readlink("/proc/self/ns/pid")
            _, started = _state(os.getpid())
        except (OSError, ValueError, IndexError):
            return cls(bytes(32), 0, 0)
        space = hashlib.blake2b(f"{boot} {names}".encode(), digest_size=32).digest()
        return cls(space, os.getpid(), started)

    def is_over(self, space: bytes) -> bool:
        """Whether it has ended, which is known of those in the same `space` alone."""
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
    """(state, when it was started) of a process."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[_STARTED])
