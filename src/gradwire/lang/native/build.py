"""Builds the libraries of prebuilt kernels: one per instruction set level (see prebuilt.py).

Every codec with its options and a dtype is one translation unit, compiled with jit's flags and
those of the level; all units of a level are linked into one library. The library also contains the
runner of kernel series (emit/series.c) and PowerSGD's arithmetic (emit/lowrank.c), which then need
no compiler. File and symbol names follow from the sources, so the same sources, compiler and flags
give the same bytes.

The compiler must be gcc: it emits few OpenMP calls, and every runtime that torch may load provides
them, so the libraries need not name a runtime.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError
from gradwire.lang import forms
from gradwire.lang.codec import Codec
from gradwire.lang.emit import c
from gradwire.lang.native import isa, jit, prebuilt

DTYPES = ("fp32", "fp16", "bf16")
MACHINES = {"__x86_64__": "x86_64", "__aarch64__": "aarch64"}  # macro that gcc defines -> machine


@dataclass(frozen=True)
class Unit:
    """A translation unit: its label in the library's listing, its C source, its functions."""

    label: str
    text: str
    names: Iterable[str] = forms.FORMS

    @property
    def digest(self) -> str:
        return prebuilt.digest(self.text)

    @property
    def renamed(self) -> str:
        """The source with its functions renamed, so that units can share a library."""
        names = [f"#define {name} {prebuilt.symbol(self.digest, name)}" for name in self.names]
        return "\n".join([*names, self.text])


_ALWAYS = (Unit("series", c.series(), c.SERIES), Unit("lowrank", c.lowrank(), c.LOWRANK))


def units(codecs: Iterable[tuple[str, Codec]], dtypes: Sequence[str] = DTYPES) -> list[Unit]:
    """One unit per (label, codec) and dtype; units of the same source are merged.

    Codecs with matrices have none: they are interpreted, since torch's BLAS does their work.
    """
    found: dict[str, Unit] = {}
    for label, codec in codecs:
        for dtype in dtypes:
            if not forms.derive(codec, dtype).fused:
                continue
            unit = Unit(f"{label} {dtype}", c.prelude() + c.source(codec, dtype))
            found.setdefault(unit.digest, unit)
    return list(found.values())


def levels(names: Iterable[str] | None = None) -> tuple[isa.Level, ...]:
    """The named levels, or all levels that the compiler can build for.

    Raises `ConfigError` for a level of another machine, `jit.CompileError` without gcc.
    """
    compiler = jit.compiler()
    macros = jit.run([compiler, "-dM", "-E", "-x", "c", os.devnull]).split()
    if "__GNUC__" not in macros or "__clang__" in macros:
        raise jit.CompileError(f"prebuilt kernels need gcc, but {compiler} is another compiler")
    machine = next((MACHINES[m] for m in macros if m in MACHINES), "another machine")
    known = tuple(level for level in isa.LEVELS if level.machine == machine)
    if names is None:
        return known
    chosen = tuple(isa.level(name) for name in names)
    for level in chosen:
        if level not in known:
            raise ConfigError(
                f"{compiler} builds for {machine}, which has no {level.name}: set GRADWIRE_CC to "
                f"a gcc for {level.machine}"
            )
    return chosen


def build(
    wanted: Sequence[Unit],
    levels: Sequence[isa.Level],
    folder: Path,
    jobs: int | None = None,
    advance: Callable[[str, int, int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Build one library per level in `folder`, lowest level first, and yield a row for each.

    Rows: isa, kernels, seconds, bytes, file. Libraries are renamed into place. `jobs` compilers run
    at once, by default one per core. `advance` is called with the level, the number of its sources
    that are compiled, and the number of all. Raises `jit.CompileError`.
    """
    compiler = jit.compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        ThreadPoolExecutor(jobs or _cores()) as at,
    ):
        scratch = Path(name)
        sources = {"manifest": _manifest(wanted)}
        sources |= {unit.label: unit.renamed for unit in _ALWAYS}
        sources |= {unit.digest: unit.renamed for unit in wanted}
        for stem, text in sources.items():
            (scratch / f"{stem}.c").write_text(text, "utf-8")
        for level in levels:
            begun = time.perf_counter()
            compile = [compiler, *jit.FLAGS, *level.flags, "-c"]
            pending = [at.submit(jit.run, [*compile, f"{stem}.c"], scratch) for stem in sources]
            try:
                for index, future in enumerate(pending):
                    if advance is not None:
                        advance(f"kernels for {level.name}", index, len(pending))
                    future.result()
            except BaseException:  # Ctrl-C too
                at.shutdown(wait=False, cancel_futures=True)
                raise
            built = folder / prebuilt.file_name(level.name)
            # no -fopenmp: the OpenMP symbols stay undefined until the library is loaded
            objects = [f"{stem}.o" for stem in sources]
            jit.run([compiler, "-shared", "-s", *objects, "-o", built.name, "-lm"], scratch)
            os.replace(scratch / built.name, built)
            yield {
                "isa": level.name,
                "kernels": len(wanted),
                "seconds": time.perf_counter() - begun,
                "bytes": built.stat().st_size,
                "file": str(built),
            }


def _manifest(wanted: Sequence[Unit]) -> str:
    lines = [f'  "{unit.label}\\n"' for unit in wanted]
    return "\n".join([f"const char {prebuilt.MANIFEST}[] =", *lines, '  "";', ""])


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1
