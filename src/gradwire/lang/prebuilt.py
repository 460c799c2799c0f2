"""Kernels that were built ahead of time and came with the wheel: how a running process finds them.

A library holds every prebuilt kernel for one level of instruction sets (see isa.py). The name of
a kernel's entry points contains the digest of the C source that it was compiled from and of the
flags, so asking for `symbol(digest, name)` is the whole lookup: a library that was built from
another version's code has no such symbol, and the kernel is compiled on first use as if there were
no library. GRADWIRE_KERNELS names another folder of libraries; it is for tests.

The libraries do not say which OpenMP runtime they need: they take the one that torch has brought
into the process, so that there is one only, and none needs to be installed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.lang import isa, jit

if TYPE_CHECKING:
    Functions = dict[str, ctypes._NamedFuncPointer]

MANIFEST = "gradwire_kernels"  # symbol: text, a line a kernel
RUNTIMES = ("libgomp", "libiomp", "libomp")  # all of them know the calls that gcc emits


def folder() -> Path:
    """Where libraries lie: beside this file, or where GRADWIRE_KERNELS says."""
    return Path(os.environ.get("GRADWIRE_KERNELS") or Path(__file__).parent / "libraries")


def file_name(level: str) -> str:
    return f"kernels-{level}.so"


def digest(text: str) -> str:
    """What tells a kernel's whole C source, prelude included, from every other."""
    return jit.digest(text, " ".join(jit.FLAGS))


def symbol(digest: str, name: str) -> str:
    return f"gradwire_{digest}_{name}"


def functions(text: str, names: Sequence[str]) -> tuple[Functions, bool]:
    """The named functions of a C source, and whether they came prebuilt; else compiled here.

    Raises `jit.CompileError` if they did not and cannot be, `ConfigError` for a GRADWIRE_ISA that
    this CPU does not run.
    """
    found, said = find(text, names)
    return (compiled(text, names, said), False) if found is None else (found, True)


def find(text: str, names: Sequence[str]) -> tuple[Functions | None, str]:
    """The named functions of a C source if they came prebuilt, or None, and why not.

    Raises `ConfigError` for a GRADWIRE_ISA that this CPU does not run.
    """
    library, said = loaded()
    if library is None:
        return None, said
    name = digest(text)
    try:
        return {one: library[symbol(name, one)] for one in names}, said
    except AttributeError:
        return None, "this codec, options and dtype are not among them"


def compiled(text: str, names: Sequence[str], said: str, more: tuple[str, ...] = ()) -> Functions:
    """The named functions of a C source, compiled here with `more` flags; `said` is why there are
    no others.

    Raises `jit.CompileError`.
    """
    try:
        library = jit.load(text, more)
    except jit.CompileError as error:
        raise jit.CompileError(f"{error}; prebuilt kernels: {said}") from error
    return {one: library[one] for one in names}


def loaded() -> tuple[ctypes.CDLL | None, str]:
    """The library for this CPU, and its file; or None, and why there is none."""
    return _loaded(str(folder()), isa.allowed())


@cache
def _loaded(folder: str, levels: tuple[isa.Level, ...]) -> tuple[ctypes.CDLL | None, str]:
    if not any(Path(folder).glob(file_name("*"))):
        return None, "none came with this installation"
    for level in reversed(levels):
        path = Path(folder) / file_name(level.name)
        if path.exists():
            try:
                _share_openmp()
                return ctypes.CDLL(str(path)), str(path)
            except OSError as error:
                return None, f"{path} cannot be loaded: {error}"
    return None, f"those in {folder} are not for this CPU"


def listing() -> list[str]:
    """The kernels of the loaded library: CODEC:OPTION=VALUE:... DTYPE, in order."""
    library = loaded()[0]
    if library is None:
        return []
    text = ctypes.c_char.in_dll(library, MANIFEST)
    return ctypes.string_at(ctypes.addressof(text)).decode().splitlines()


def _share_openmp() -> None:
    """Let libraries see the OpenMP runtime of this process, or else the system's.

    Raises `OSError` if there is neither.
    """
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        mapped = []
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in mapped if "omp" in line)
    found = [p for p in paths if Path(p).name.startswith(RUNTIMES)]
    ctypes.CDLL(found[0] if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
