"""How every rank of a test ended, and a report in chronological order."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

GRACE = 10.0  # seconds for the other processes to report, once one has failed


@dataclass
class End:
    """A rank returned `result`; or it failed, and `said` is the reason, if possible a traceback."""

    rank: int
    at: float  # time.monotonic(), which the processes of a machine share
    result: Any = None
    said: str = ""


def in_time(ends: Iterable[End]) -> list[End]:
    return sorted(ends, key=lambda end: end.at)


def report(begun: float, ends: Iterable[End], running: dict[int, str]) -> str:
    """How and when every rank ended; last the ranks that still run, with their stacks."""
    lines = ["Every rank, in the order of time:"]
    for end in in_time(ends):
        how = f"failed\n{end.said.rstrip()}" if end.said else "returned"
        lines.append(f"{end.at - begun:+.3f} s: rank {end.rank} {how}")
    now = time.monotonic() - begun
    lines += [f"{now:+.3f} s: rank {r} still runs\n{at}".rstrip() for r, at in running.items()]
    return "\n".join(lines)


def stack(thread: threading.Thread) -> str:
    """A thread's stack, as text."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""


def collect(processes: dict[int, Any], reports: Any, deadline: float) -> dict[int, End]:
    """The ends of these ranks' processes, and of others that report in time.

    Each report must arrive within `deadline` seconds of the one before it; after a failure, all
    others within GRACE. A process that ended without a report has failed.
    """
    ends: dict[int, End] = {}
    give_up = time.monotonic() + deadline
    while processes.keys() - ends.keys() and time.monotonic() < give_up:
        gone = {r: p.exitcode for r, p in processes.items() if p.exitcode is not None}
        try:
            came = [reports.get(timeout=0.1)]
        except queue.Empty:  # processes that had ended before this have sent no report
            now, missing = time.monotonic(), gone.keys() - ends.keys()
            said = "It ended with exit code {}, without a report."
            came = [End(rank, now, None, said.format(gone[rank])) for rank in sorted(missing)]
        for end in came:
            if not any(known.said for known in ends.values()):
                give_up = time.monotonic() + (GRACE if end.said else deadline)
            ends[end.rank] = end
    return ends
