"""The instruction set levels that kernels are built for, and which of them this CPU supports.

Vocabulary
    level  a set of instructions under its psABI name, such as x86-64-v3 (AVX2); every level of a
           machine includes the ones before it

All levels give the same bytes: none contracts arithmetic, and the codec defines the order of sums.
GRADWIRE_ISA selects a level up to the CPU's, for tests and for comparing speed.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gradwire.errors import ConfigError, use_one_of


@dataclass(frozen=True)
class Level:
    """One level.

    Attributes:
        name: its psABI name, used in file names and in GRADWIRE_ISA.
        machine: the architecture, as platform.machine() names it.
        flags: for the compiler (gcc and clang).
        features: added to the level before it, as spelled in /proc/cpuinfo.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]


# gcc prefers 256-bit vectors on most CPUs that have 512; in sweeps over L1 the wide ones are faster
WIDE = "-mprefer-vector-width=512"
# gcc 12 moves halves of SSE registers through MMX registers without emms: after that, x87 code in
# the same thread (LAPACK, long double) computes NaN.
NO_MMX = "-mno-mmx"

LEVELS = (
    Level(
        "x86-64-v2", "x86_64", ("-march=x86-64-v2", NO_MMX),
        frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    ),
    Level(
        "x86-64-v3", "x86_64", ("-march=x86-64-v3", NO_MMX),
        frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ),
    Level(
        "x86-64-v4", "x86_64", ("-march=x86-64-v4", NO_MMX, WIDE),
        frozenset({"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}),
    ),
    Level("armv8-a", "aarch64", ("-march=armv8-a",), frozenset({"asimd", "fp"})),
)  # fmt: skip


def native() -> tuple[str, ...]:
    """Compiler flags for this machine's CPU."""
    return ("-march=native", *((NO_MMX, WIDE) if machine() == "x86_64" else ()))


def machine() -> str:
    """This machine's architecture, as `Level.machine` names it."""
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def level(name: str) -> Level:
    """A level by its name. Raises `ConfigError`."""
    for one in LEVELS:
        if one.name == name:
            return one
    known = [one.name for one in LEVELS]
    raise ConfigError(f"unknown instruction set {name!r}: {use_one_of(name, known)}")


def within(machine: str, features: frozenset[str]) -> tuple[Level, ...]:
    """The levels, lowest first, that a CPU of this architecture with these features supports."""
    found: list[Level] = []
    for one in LEVELS:
        if one.machine == machine:
            if not one.features <= features:
                break
            found.append(one)
    return tuple(found)


@lru_cache(maxsize=1)
def supported() -> tuple[Level, ...]:
    """The levels that this CPU supports, lowest first; none if its features are unknown."""
    return within(machine(), _features())


def forced() -> Level | None:
    """The level that GRADWIRE_ISA names, or None. `ConfigError` if the CPU does not support it."""
    name = os.environ.get("GRADWIRE_ISA")
    if not name:
        return None
    wanted = level(name)
    if wanted not in supported():
        has = ", ".join(one.name for one in supported()) or "none of them"
        raise ConfigError(f"GRADWIRE_ISA={name}: this CPU supports {has}")
    return wanted


def allowed() -> tuple[Level, ...]:
    """The levels whose kernels may be used, lowest first: the CPU's, up to GRADWIRE_ISA."""
    most = forced()
    levels = supported()
    return levels if most is None else levels[: levels.index(most) + 1]


def cpuinfo() -> list[str]:
    """The lines of /proc/cpuinfo; none where there is no such file."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _features() -> frozenset[str]:
    for line in cpuinfo():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, ARM; the same for every core
            return frozenset(value.split())
    return frozenset()
