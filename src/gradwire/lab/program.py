"""Compile the delay line on first use, into the user's private cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from gradwire.errors import ConfigError

SOURCE = Path(__file__).with_name("delay_line.c")


def delay_line() -> str:
    """The path of the compiled delay line; compiles it unless the cache has this source's program.

    Raises:
        ConfigError: there is no C compiler, it fails, or there is no private cache folder.
    """
    # Imported here since the supervisor imports this package and must not import torch (client.py).
    from gradwire.lang.jit import CompileError, cache_folder, compiler

    name = f"delay_line-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    try:
        folder, gcc = cache_folder(), compiler()
        program = folder / name
        if not program.exists():
            _compile(gcc, program)
    except CompileError as error:
        raise ConfigError(
            f"the lab cannot compile its delay line, which replaces netem: {error}; "
            "install a C compiler, or set no latency, as in '1gbit,0ms'"
        ) from error
    return str(program)


def _compile(compiler: str, program: Path) -> None:
    """Compile to a private path, then rename, so that labs that start together do not conflict."""
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        fresh = Path(folder) / program.name
        done = subprocess.run(
            [compiler, "-O2", "-o", str(fresh), str(SOURCE)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"{compiler} could not compile {SOURCE}:\n{done.stderr}")
        os.replace(fresh, program)
