"""The nodes' output: prefixed lines, node 0's lines alone, or files."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TextIO

# On net none a grandchild that has left its session may hold a pipe open; readers wait no longer.
_LAST_LINES_S = 5.0


class Outputs:
    """The receiving ends of all nodes' streams: one thread per stream, which ends with its writer.

    Leave the context after the writers have ended; only then have all lines arrived.

    Args:
        mode: "prefix", "rank0" or "files", as `launch` explains them.
        log_dir: the folder for "files"; made if missing.
        stdout, stderr: the text streams that lines go to.
    """

    def __init__(
        self,
        mode: str,
        log_dir: str | os.PathLike[str] | None,
        stdout: TextIO,
        stderr: TextIO,
    ) -> None:
        self._readers: list[threading.Thread] = []
        self._mode = mode
        self._streams = {"out": stdout, "err": stderr}
        self._lock = threading.Lock()  # lines of different nodes must not mix
        self._folder = Path(log_dir) if log_dir is not None else None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *error: object) -> None:
        deadline = time.monotonic() + _LAST_LINES_S
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def end(self, ends: ExitStack, rank: int, stream: str) -> int | IO[bytes]:
        """The descriptor for node `rank`'s `stream` ("out" or "err"); `ends` closes it."""
        if self._folder is not None:
            return ends.enter_context(open(self._folder / f"node{rank}.{stream}", "wb"))
        if self._mode == "rank0" and stream == "out" and rank > 0:
            return subprocess.DEVNULL
        raw = self._mode == "rank0" and stream == "out"
        prefix = "" if raw else f"[node {rank}] "
        reading, writing = os.pipe()
        reader = threading.Thread(
            target=self._copy, args=(reading, prefix, self._streams[stream]), daemon=True
        )
        reader.start()
        self._readers.append(reader)
        ends.callback(os.close, writing)
        return writing

    def _copy(self, reading: int, prefix: str, stream: TextIO) -> None:
        """Thread: copy lines as they come, and complete the last one."""
        with open(reading, encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                with self._lock:
                    stream.write(prefix + line)
                    if prefix and not line.endswith("\n"):
                        stream.write("\n")
                    stream.flush()
