"""Compile the delay line on first use, into a cache that is private to the user."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from gradwire.errors import ConfigError

SOURCE = Path(__file__).with_name("delay_line.c")


def delay_line() -> str:
    """The path of the compiled delay line; compiles it unless the cache has this very source.

    Raises:
        ConfigError: there is no C compiler, or it fails.
    """
    source = SOURCE.read_bytes()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire" / "lab"
    program = root / f"delay_line-{hashlib.sha256(source).hexdigest()[:16]}"
    if program.exists():
        return str(program)
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        raise ConfigError(
            "the lab needs a C compiler for its delay line, since this kernel has no netem: "
            "install one (package gcc) or ask for no latency, as in '1gbit,0ms'"
        )
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Compiled under a name of its own, then renamed: labs that start together do not meet halfway.
    with tempfile.TemporaryDirectory(dir=root) as folder:
        fresh = Path(folder) / program.name
        done = subprocess.run(
            [compiler, "-O2", "-o", str(fresh), str(SOURCE)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"{compiler} could not compile {SOURCE}:\n{done.stderr}")
        fresh.replace(program)
    return str(program)
