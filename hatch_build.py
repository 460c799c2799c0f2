"""Puts prebuilt kernels into wheels: hatchling calls this hook while it builds one.

The kernels are those of `gradwire codec build` (docs/reference/kernels.md), made in a folder that is gone
when the wheel is done. Without a gcc the wheel has none and fits every platform; an editable
install never has any. Two variables narrow what is built, for tests and for small images:

    GRADWIRE_BUILD      what, such as "identity qsgd:bits=3 shm"; "none" for a wheel without kernels
    GRADWIRE_BUILD_ISA  levels of instruction sets, such as "x86-64-v2 x86-64-v4"
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

FOLDER = "gradwire/lang/libraries"  # where lang/prebuilt.py looks
OLDEST_GLIBC = (2, 17)  # the oldest that installers have a name for on every machine


class Kernels(BuildHookInterface[Any]):
    """Builds the libraries, adds them to the wheel, and names the platform that they are for."""

    made: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is packed."""
        chosen = os.environ.get("GRADWIRE_BUILD", "").split()
        if self.target_name != "wheel" or version == "editable" or chosen == ["none"]:
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from gradwire import wheel
        from gradwire.lang import build, isa, jit

        try:
            levels = build.levels(os.environ.get("GRADWIRE_BUILD_ISA", "").split() or None)
        except jit.CompileError as error:
            self.app.display_warning(f"no prebuilt kernels in this wheel: {error}")
            return
        if any(level.machine != isa.machine() for level in levels):
            raise SystemExit("GRADWIRE_CC builds for another machine: wheels are made natively")
        units = wheel.units(chosen or None)
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
    """The wheel's platform tag, by the newest glibc symbol that the libraries ask for."""
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
