"""The C toolchain.

A library is compiled on first use into the user's folder (see cache.py). Its name is a
digest of the source, the flags, the compiler's version and the CPU.

For debugging, GRADWIRE_CC sets the compiler, GRADWIRE_KERNEL_FLAGS more flags for the codecs'
kernels, and GRADWIRE_ISA a lower instruction set level (see isa.py). prebuilt.py looks for prebuilt
kernels first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from gradwire.lang.native import cache, isa

# Flags of every kernel, also of prebuilt ones. No contraction and no -ffast-math: targets must
# agree on every bit. No partial redundancy elimination and no jump threading: gcc 12 uses them to
# branch on the constants of a clamp or a `where`, and then does not vectorise the loop.
FLAGS = (
    "-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fno-tree-pre", "-fno-thread-jumps", "-fopenmp", "-fPIC", "-w",
)  # fmt: skip


class CompileError(Exception):
    """There is no working compiler; the message contains what was tried and its output."""


def compiler() -> str:
    """The C compiler's path. Raises `CompileError`."""
    wanted = os.environ.get("GRADWIRE_CC")
    for name in [wanted] if wanted else ["gcc", "cc", "clang"]:
        path = shutil.which(name)
        if path is not None:
            return path
    raise CompileError(
        f"GRADWIRE_CC={wanted} is not a program"
        if wanted
        else "no C compiler found: gcc, cc, clang"
    )


def kernel_flags() -> tuple[str, ...]:
    """The flags in GRADWIRE_KERNEL_FLAGS, for debugging."""
    return tuple(os.environ.get("GRADWIRE_KERNEL_FLAGS", "").split())


def optimises() -> bool:
    """Whether the codecs' kernels are optimised."""
    return "-O0" not in kernel_flags()


def load(source: str, more: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library compiled from `source` with `more` flags, from the cache if it is there.

    Raises `CompileError`, and `ConfigError` for a GRADWIRE_CACHE that others control.
    """
    level = isa.forced()
    instructions = isa.native() if level is None else level.flags
    return _load(source, compiler(), (*FLAGS, *instructions, *more), cache.folder())


@functools.cache
def _load(source: str, path: str, flags: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    def make(library: Path) -> None:
        text = library.with_suffix(".c")
        text.write_text(source, "utf-8")
        run([path, *flags, "-shared", str(text), "-o", str(library), "-lm"])

    library = folder / f"{digest(source, ' '.join(flags), version(path), _cpu())}.so"
    if not cache.is_whole(library):
        cache.tell_of_compiling(folder)
    try:
        library = cache.obtain(library, make)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompileError(f"{library} cannot be made or loaded: {error}") from None


def run(command: list[str], folder: Path | None = None) -> str:
    """Run a compiler in `folder`; returns its output. Raises `CompileError` with its messages."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} failed: {error}") from None
    if done.returncode != 0:
        output = "; ".join(done.stderr.strip().splitlines()[:3]) or f"exit {done.returncode}"
        raise CompileError(f"{command[0]} failed: {output}")
    return done.stdout


@functools.cache
def version(path: str) -> str:
    """The compiler's version text. Raises `CompileError`."""
    return run([path, "--version"])


@functools.cache
def _cpu() -> str:
    """The CPU model and features, which -march=native depends on."""
    wanted = ("model name", "flags", "Features", "CPU part")
    known = sorted({line for line in isa.cpuinfo() if line.startswith(wanted)})
    return "\n".join(known) or platform.processor()


def digest(*parts: str) -> str:
    """32 hexadecimal digits that identify these texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
