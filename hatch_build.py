"""Puts prebuilt kernels into a wheel, where the environment asks for them.

hatchling calls this hook while it builds a wheel. The kernels are those of `gradwire codec build`
(docs/reference/kernels.md). Without these variables a wheel has no kernels, so `pip install .` compiles
nothing: kernels are compiled on first use. An editable install never has any.

    GRADWIRE_BUILD      what to build: "all", or names such as "identity qsgd:bits=3 shm";
                        `make wheel` sets "all"
    GRADWIRE_BUILD_ISA  levels of instruction sets, such as "x86-64-v2 x86-64-v4"; all if not set

If GRADWIRE_BUILD is set, a missing gcc is an error.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "gradwire/lang/libraries"  # where lang/native/prebuilt.py looks
OLDEST_GLIBC = (2, 17)  # the oldest version with a manylinux tag on every architecture


class Kernels(BuildHookInterface[Any]):
    """Builds the libraries, adds them to the wheel, and sets its platform tag."""

    made: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is packed."""
        chosen = os.environ.get("GRADWIRE_BUILD", "").split()
        if self.target_name != "wheel" or version == "editable" or not chosen:
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from gradwire import wheel
        from gradwire.errors import ConfigError
        from gradwire.lang.native import build, isa, jit

        try:
            levels = build.levels(os.environ.get("GRADWIRE_BUILD_ISA", "").split() or None)
            units = wheel.units(None if chosen == ["all"] else chosen)
        except (jit.CompileError, ConfigError) as error:
            raise SystemExit(
                f"GRADWIRE_BUILD={' '.join(chosen)} asks for prebuilt kernels: {error}. Unset it "
                "for a wheel without them"
            ) from None
        if any(level.machine != isa.machine() for level in levels):
            raise SystemExit("GRADWIRE_CC builds for another machine: build wheels natively")
        self.made = tempfile.TemporaryDirectory(prefix="gradwire-")
        files = []
        for row in build.build(units, levels, Path(self.made.name)):
            self.app.display_info(
                f"{row['isa']}: {row['kernels']} kernels, {row['bytes'] / 1e6:.1f} MB, "
                f"{row['seconds']:.0f} s"
            )
            files.append(Path(row["file"]))
        build_data["force_include"].update({str(f): f"{FOLDER}/{f.name}" for f in files})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(files)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is packed."""
        if self.made is not None:
            self.made.cleanup()


def _platform(files: list[Path]) -> str:
    """The wheel's platform tag, from the newest glibc symbol that the libraries need."""
    platform = re.sub(r"[^a-z0-9]", "_", sysconfig.get_platform().lower())
    if not platform.startswith("linux_") or "musl" in str(sysconfig.get_config_var("SOABI")):
        return platform
    found = [
        (int(major), int(minor))
        for file in files
        for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", file.read_bytes())
    ]
    major, minor = max([OLDEST_GLIBC, *found])
    return platform.replace("linux", f"manylinux_{major}_{minor}", 1)
