"""What a command may leave behind: processes and network namespaces."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path


def network_namespaces(of: set[int] | None = None) -> set[str]:
    """Of these processes; by default of all, so that a lab elsewhere on the machine counts too."""
    found = set()
    for number, entry in processes():
        if of is None or number in of:
            with suppress(OSError):  # it ended, or is not ours to look at
                found.add(os.readlink(entry / "ns" / "net"))
    return found


def marked(mark: str) -> set[int]:
    """The processes whose environment holds `mark`, which every process of a lab inherits."""
    found = set()
    for number, entry in processes():
        with suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.add(number)
    return found


def processes() -> Iterator[tuple[int, Path]]:
    return ((int(e.name), e) for e in Path("/proc").iterdir() if e.name.isdigit())


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False
