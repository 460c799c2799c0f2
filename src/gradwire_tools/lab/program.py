"""Compile the delay line on first use, into the user's private cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gradwire.errors import ConfigError

SOURCE = Path(__file__).with_name("delay_line.c")


def delay_line() -> str:
    """The path of the compiled delay line; compiles it unless the cache has this source's program.

    Raises:
        ConfigError: there is no C compiler, it fails, or others control the cache folder.
    """
    # Imported here since the supervisor imports this package and must not import torch (client.py).
    from gradwire.lang import kernel_cache
    from gradwire.lang.jit import CompileError, compiler, run

    name = f"delay_line-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    try:
        gcc = compiler()
        program = kernel_cache.obtain(
            kernel_cache.folder() / name,
            lambda made: run([gcc, "-O2", "-o", str(made), str(SOURCE)]),
        )
    except (CompileError, OSError) as error:
        raise ConfigError(
            f"the lab cannot compile its delay line, which replaces netem: {error}; "
            "install a C compiler, or set no latency, as in '1gbit,0ms'"
        ) from None
    return str(program)
