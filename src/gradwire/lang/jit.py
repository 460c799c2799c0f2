"""The C toolchain and the private cache of compiled kernels.

A library is compiled on first use into a folder that only its user can write to. Its name is a
digest of the source, the flags, the compiler's version and the CPU. It is renamed into place
atomically; ranks that need it at the same time wait on a lock file, so it is compiled once.

For debugging, GRADWIRE_CC sets the compiler, GRADWIRE_CACHE the folder, GRADWIRE_KERNEL_FLAGS more
flags for the codecs' kernels, and GRADWIRE_ISA a lower instruction set level (see isa.py).
prebuilt.py looks for prebuilt kernels first.
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

# Flags of every kernel, also of prebuilt ones. No contraction and no -ffast-math: targets must
# agree on every bit. No partial redundancy elimination and no jump threading: gcc 12 uses them to
# branch on the constants of a clamp or a `where`, and then does not vectorise the loop.
FLAGS = (
    "-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fno-tree-pre", "-fno-thread-jumps", "-fopenmp", "-fPIC", "-w",
)  # fmt: skip
LOCK_SECONDS = 60.0  # a compilation takes one or two seconds; after this, compile without the lock


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


def load(source: str, more: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library compiled from `source` with `more` flags, from the cache if it is there."""
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
    """Run a compiler in `folder`; returns its output. Raises `CompileError` with its messages."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        output = "; ".join(done.stderr.strip().splitlines()[:3]) or f"exit {done.returncode}"
        raise CompileError(f"{command[0]} failed: {output}")
    return done.stdout


def cache_folder() -> Path:
    """The user's private folder for kernels, created if needed. Raises `CompileError`."""
    named = os.environ.get("GRADWIRE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    fallback = Path(tempfile.gettempdir()) / f"gradwire-{os.getuid()}"
    rejected = []
    for folder in [Path(named)] if named else [Path(home) / "gradwire", fallback]:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            rejected.append(f"{folder}: {error.strerror}")
            continue
        # code is loaded from this folder, so no other user may write to it
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            rejected.append(f"{folder}: others can write to it")
        elif not os.access(folder, os.W_OK):
            rejected.append(f"{folder}: read-only")
        else:
            return folder
    raise CompileError(f"no private folder for compiled kernels ({'; '.join(rejected)})")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock, or go on without it after LOCK_SECONDS: compiling twice is safe.

    The operating system releases the lock of a process that dies.
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
    """The compiler's version text. Raises `CompileError`."""
    return run([path, "--version"])


@lru_cache(maxsize=1)
def _cpu() -> str:
    """The CPU model and features, which -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def digest(*parts: str) -> str:
    """32 hexadecimal digits that identify these texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
