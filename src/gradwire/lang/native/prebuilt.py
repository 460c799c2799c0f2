"""Finds prebuilt kernels: those compiled ahead of time and shipped in the wheel.

A library contains every prebuilt kernel for one instruction set level (see isa.py). The symbol
names of a kernel contain a digest of its C source and flags, so the lookup is only `symbol(digest,
name)`: a library built from another version's code has no such symbol, and the kernel is compiled
on first use. GRADWIRE_KERNELS sets another folder of libraries, for tests.

The libraries are not linked against an OpenMP runtime. They use the one that torch has loaded, so a
process has only one, and none needs to be installed.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradwire.lang.native import cache, isa, jit

Signatures = Mapping[str, tuple[tuple[Any, ...], Any]]  # name -> types of arguments, of the result
Functions = dict[str, Any]

MANIFEST = "gradwire_kernels"  # symbol of a text with one line per kernel
RUNTIMES = ("libgomp", "libiomp", "libomp")  # all of them provide the functions that gcc calls


def folder() -> Path:
    """The folder of the libraries: lang/libraries, or GRADWIRE_KERNELS."""
    return Path(os.environ.get("GRADWIRE_KERNELS") or Path(__file__).parents[1] / "libraries")


def file_name(level: str) -> str:
    return f"kernels-{level}.so"


def digest(text: str) -> str:
    """Identifies a kernel's C source, prelude included, and the compiler flags."""
    return jit.digest(text, " ".join(jit.FLAGS))


def symbol(digest: str, name: str) -> str:
    return f"gradwire_{digest}_{name}"


def functions(text: str, signatures: Signatures) -> Functions:
    """These functions of a C source: prebuilt, or else compiled.

    Raises `jit.CompileError` if they cannot be compiled, `ConfigError` for a GRADWIRE_ISA that this
    CPU does not support.
    """
    found, reason = find(text, signatures)
    return compiled(text, signatures, reason) if found is None else found


def find(text: str, signatures: Signatures) -> tuple[Functions | None, str]:
    """These functions of a C source if they are prebuilt, and the library's file; or None, and the
    reason.

    Raises `ConfigError` for a GRADWIRE_ISA that this CPU does not support.
    """
    library, file_or_reason = loaded()
    if library is None:
        return None, file_or_reason
    name = digest(text)
    try:
        return _typed(library, signatures, lambda one: symbol(name, one)), file_or_reason
    except AttributeError:
        return None, "this codec, options and dtype are not among them"


def compiled(
    text: str, signatures: Signatures, reason: str, more: tuple[str, ...] = ()
) -> Functions:
    """These functions of a C source, compiled with `more` flags; `reason` says why no prebuilt ones
    are used.

    Raises `jit.CompileError`.
    """
    try:
        library = jit.load(text, more)
    except jit.CompileError as error:
        raise jit.CompileError(f"{error}; prebuilt kernels: {reason}") from None
    return _typed(library, signatures, lambda one: one)


def _typed(library: ctypes.CDLL, of: Signatures, symbol: Callable[[str], str]) -> Functions:
    found = {name: library[symbol(name)] for name in of}
    for name, function in found.items():
        function.argtypes, function.restype = of[name]
    return found


def loaded() -> tuple[ctypes.CDLL | None, str]:
    """The library for this CPU and its file; or None and the reason.

    Raises `ConfigError` for a GRADWIRE_KERNELS that others control.
    """
    return _loaded(str(folder()), isa.allowed())


@functools.cache
def _loaded(folder: str, levels: tuple[isa.Level, ...]) -> tuple[ctypes.CDLL | None, str]:
    if not any(Path(folder).glob(file_name("*"))):
        return None, "none came with this installation"
    for level in reversed(levels):
        path = Path(folder) / file_name(level.name)
        if path.exists():
            if os.environ.get("GRADWIRE_KERNELS"):  # else as safe as this file beside it
                cache.refuse(f"GRADWIRE_KERNELS={folder}", cache.risk(path))
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
    """Make the OpenMP runtime of this process, or else the system's, visible to the libraries.

    Raises `OSError` if there is neither.
    """
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        mapped = []
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in mapped if "omp" in line)
    found = [p for p in paths if Path(p).name.startswith(RUNTIMES)]
    ctypes.CDLL(found[0] if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
