"""The C toolchain and the private cache of compiled kernels.

A library is compiled on first use, into a folder that only its user can write, under a name made
of the source, the flags, the compiler's version and the CPU. It appears by an atomic rename; ranks
that want it at the same time queue on a lock file, so it is compiled once. GRADWIRE_CC names a
compiler, GRADWIRE_CACHE a folder, GRADWIRE_KERNEL_FLAGS more flags for codecs' kernels, and
GRADWIRE_ISA less than the CPU has (see isa.py): all are for debugging. Kernels that were built
ahead of time are found by prebuilt.py before any of this.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

from gradwire.lang import isa

# What every kernel is compiled with, here and ahead of time. No contraction and no -ffast-math:
# targets must agree on every bit. No partial redundancy elimination, no threading of jumps: gcc 12
# uses them to branch on a clamp's or a choice's constants, and then the loop stays scalar.
FLAGS = (
    "-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fno-tree-pre", "-fno-thread-jumps", "-fopenmp", "-fPIC", "-w",
)  # fmt: skip
LOCK_SECONDS = 60.0  # a compilation takes one or two; after this, compile without waiting


class CompileError(Exception):
    """There is no working compiler; the message says what was tried and what it said."""


def compiler() -> str:
    """The C compiler's path. Raises `CompileError`."""
    wanted = os.environ.get("GRADWIRE_CC")
    for name in [wanted] if wanted else ["gcc", "cc", "clang"]:
        path = shutil.which(name)
        if path is not None:
            return path
    raise CompileError(
        f"GRADWIRE_CC={wanted} is no program" if wanted else "no C compiler (gcc, cc, clang) found"
    )


def kernel_flags() -> tuple[str, ...]:
    """What GRADWIRE_KERNEL_FLAGS says: none, unless somebody debugs."""
    return tuple(os.environ.get("GRADWIRE_KERNEL_FLAGS", "").split())


def load(source: str, more: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library compiled from `source`, with `more` flags, from the cache where it is there."""
    level = isa.forced()
    instructions = isa.native() if level is None else level.flags
    return _load(source, compiler(), (*FLAGS, *instructions, *more), str(cache_folder()))


@cache
def _load(source: str, path: str, flags: tuple[str, ...], folder: str) -> ctypes.CDLL:
    name = digest(source, " ".join(flags), version(path), _cpu())
    library = Path(folder) / f"{name}.so"
    if not library.exists():
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile(source, path, flags, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompileError(f"{library} cannot be loaded: {error}") from error


def _compile(source: str, path: str, flags: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        text, built = Path(scratch) / "kernel.c", Path(scratch) / "kernel.so"
        text.write_text(source, "utf-8")
        run([path, *flags, "-shared", str(text), "-o", str(built), "-lm"])
        os.replace(built, library)


def run(command: list[str], folder: Path | None = None) -> str:
    """What a compiler's run in `folder` prints. Raises `CompileError` with what it said."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        said = "; ".join(done.stderr.strip().splitlines()[:3]) or f"exit {done.returncode}"
        raise CompileError(f"{command[0]} failed: {said}")
    return done.stdout


def cache_folder() -> Path:
    """The user's private folder of kernels, made if needed. Raises `CompileError`."""
    named = os.environ.get("GRADWIRE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    fallback = Path(tempfile.gettempdir()) / f"gradwire-{os.getuid()}"
    said = []
    for folder in [Path(named)] if named else [Path(home) / "gradwire", fallback]:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            said.append(f"{folder}: {error.strerror}")
            continue
        # code is loaded from here: nobody else may be able to put it there
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            said.append(f"{folder}: others can write to it")
        elif not os.access(folder, os.W_OK):
            said.append(f"{folder}: read-only")
        else:
            return folder
    raise CompileError(f"no private folder for compiled kernels ({'; '.join(said)})")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock, or go on after LOCK_SECONDS: the rename keeps a double compile safe.

    The kernel drops the lock of a process that dies, so a killed rank blocks nobody.
    """
    with path.open("w") as file:
        give_up = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < give_up:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield


@cache
def version(path: str) -> str:
    """What the compiler says that it is. Raises `CompileError`."""
    return run([path, "--version"])


@lru_cache(maxsize=1)
def _cpu() -> str:
    """What -march=native depends on: the model and its features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def digest(*parts: str) -> str:
    """A name for what was made of these texts, 32 hexadecimal digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
