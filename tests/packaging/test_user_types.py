"""Who installs gradwire gets its types: a program of theirs is checked against the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gradwire

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("user_program.py")
# Of this repository, so that torch's files are read once; git ignores it.
CACHE = ROOT / ".mypy_cache" / "users"

pytestmark = pytest.mark.xdist_group("processes")

Check = Callable[[Path], tuple[int, str]]


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """Runs `mypy --strict` where gradwire is installed from its wheel: (exit code, output)."""
    folder = tmp_path_factory.mktemp("user")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "GRADWIRE_BUILD"}
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=60)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "environment", with_pip=False, symlinks=True)
    (packages,) = folder.glob("environment/lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    python = folder / "environment" / "bin" / "python"

    def run(program: Path) -> tuple[int, str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "mypy", "--strict", "--no-color-output"),
                *("--config-file", os.devnull, "--cache-dir", str(CACHE)),
                *("--python-executable", str(python), str(program)),
            ],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_users_program_is_well_typed(check: Check) -> None:
    code, said = check(PROGRAM)
    assert code == 0, said


def test_every_public_name_has_a_type(check: Check, tmp_path: Path) -> None:
    """Names that come through `__getattr__` would be Any; so would those of a package without
    `py.typed`."""
    program = tmp_path / "names.py"
    lines = [f"reveal_type(gw.{name})" for name in gradwire.__all__]
    program.write_text("\n".join(["import gradwire as gw", *lines, ""]))
    code, said = check(program)
    assert code == 0, said
    revealed = dict(re.findall(r'names\.py:(\d+): note: Revealed type is "(.*)"', said))
    types = {name: revealed[str(at)] for at, name in enumerate(gradwire.__all__, start=2)}
    assert not [name for name, kind in types.items() if kind in ("Any", "builtins.object")]
    results = {name: kind.rpartition("->")[2] for name, kind in types.items()}
    assert not [name for name, result in results.items() if result.strip() == "Any"]


def test_a_wrong_call_is_an_error(check: Check, tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    wrong = """
        import torch

        import gradwire as gw

        gw.attach("a module")
        gw.all_reduce(torch.ones(3), step="first")
        gw.QSGD(bits="four")
        gw.Qsgd()
    """
    program.write_text(textwrap.dedent(wrong))
    code, said = check(program)
    assert code == 1
    found = re.findall(r"wrong\.py:(\d+): error: .*\[([\w-]+)\]", said)
    assert [int(line) for line, _ in found] == [6, 7, 8, 9], said
