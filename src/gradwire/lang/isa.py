"""Levels of instruction sets that kernels are built for, and which of them this CPU runs.

Vocabulary
    level  a set of instructions under its psABI name, such as x86-64-v3 (AVX2); every level of a
           machine includes the ones before it

All levels give the same bytes: none contracts arithmetic, and the order of sums is the codec's.
GRADWIRE_ISA names a level at or below the CPU's, for tests and for comparing speed.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gradwire.errors import ConfigError


@dataclass(frozen=True)
class Level:
    """One level.

    Attributes:
        name: psABI's, in file names and in GRADWIRE_ISA.
        machine: what platform.machine() calls the family.
        flags: of the compiler (gcc and clang).
        features: as /proc/cpuinfo spells them; those of the levels before it are implied.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]


# gcc prefers vectors of 256 bits on most CPUs that have 512: for sweeps over L1 the wide ones win
WIDE = "-mprefer-vector-width=512"
# gcc 12 moves halves of SSE registers through MMX ones and never cleans up: from then on x87, which
# LAPACK and long double use, computes NaN in that thread.
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
    """What a compiler is told for this machine's own CPU."""
    return ("-march=native", *((NO_MMX, WIDE) if machine() == "x86_64" else ()))


def machine() -> str:
    """This machine's family, as `Level.machine` spells it."""
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def level(name: str) -> Level:
    """A level by its name. Raises `ConfigError`."""
    for one in LEVELS:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in LEVELS)
    raise ConfigError(f"unknown instruction set {name!r}: use one of {known}")


def within(machine: str, features: frozenset[str]) -> tuple[Level, ...]:
    """The levels, lowest first, of a CPU of this family with these features."""
    found: list[Level] = []
    for one in LEVELS:
        if one.machine == machine:
            if not one.features <= features:
                break
            found.append(one)
    return tuple(found)


@lru_cache(maxsize=1)
def supported() -> tuple[Level, ...]:
    """The levels that this CPU runs, lowest first; none where that cannot be found out."""
    return within(machine(), _features())


def forced() -> Level | None:
    """The level that GRADWIRE_ISA names, or None. `ConfigError` if this CPU does not run it."""
    name = os.environ.get("GRADWIRE_ISA")
    if not name:
        return None
    wanted = level(name)
    if wanted not in supported():
        has = ", ".join(one.name for one in supported()) or "none of them"
        raise ConfigError(f"GRADWIRE_ISA={name}: this CPU does not run it, it runs {has}")
    return wanted


def allowed() -> tuple[Level, ...]:
    """The levels to look for kernels of, lowest first: the CPU's, up to GRADWIRE_ISA."""
    most = forced()
    levels = supported()
    return levels if most is None else levels[: levels.index(most) + 1]


def _features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, ARM; every core has a line, all alike
            return frozenset(value.split())
    return frozenset()
