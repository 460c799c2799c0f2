"""Who installs gradwire gets its types: a program of theirs is checked against the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import gradwire
from products import EXHAUSTIVE

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("user_program.py")
# Of this repository, so that torch's files are read once; git ignores it.
CACHE = ROOT / ".mypy_cache" / "users"

pytestmark = [EXHAUSTIVE, pytest.mark.xdist_group("processes")]


def checked(folder: Path, programs: list[Path]) -> str:
    """What `mypy --strict` says of programs where gradwire is installed from its wheel."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "GRADWIRE_BUILD"}
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=100)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "environment", with_pip=False, symlinks=True)
    (packages,) = folder.glob("environment/lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    python = folder / "environment" / "bin" / "python"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--no-color-output"),
            *("--config-file", os.devnull, "--cache-dir", str(CACHE)),
            *("--python-executable", str(python), *map(str, programs)),
        ],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_users_calls_are_checked_and_every_public_name_has_a_type(tmp_path: Path) -> None:
    """A program of theirs is well typed, but for its wrong calls.

    Names that come through `__getattr__` would be Any; so would those of a package without
    `py.typed`.
    """
    names = tmp_path / "names.py"
    lines = [f"reveal_type(gw.{name})" for name in gradwire.__all__]
    names.write_text("\n".join(["import gradwire as gw", *lines, ""]))
    said = checked(tmp_path, [PROGRAM, names])
    revealed = dict(re.findall(r'names\.py:(\d+): note: Revealed type is "(.*)"', said))
    types = {name: revealed[str(at)] for at, name in enumerate(gradwire.__all__, start=2)}
    assert not [name for name, kind in types.items() if kind in ("Any", "builtins.object")]
    results = {name: kind.rpartition("->")[2] for name, kind in types.items()}
    assert not [name for name, result in results.items() if result.strip() == "Any"]
