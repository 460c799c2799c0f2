"""What a command may leave behind: processes and network namespaces."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def network_namespaces(of: set[int] | None = None) -> set[str]:
    """Of these processes; by default of all, so that a lab elsewhere on the machine counts too."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (of is None or int(entry.name) in of):
            try:
                found.add(os.readlink(entry / "ns" / "net"))
            except OSError:
                continue  # it ended, or is not ours to look at
    return found


def marked(mark: str) -> set[int]:
    """The processes whose environment holds `mark`, which every process of a lab inherits."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False
