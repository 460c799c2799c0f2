"""A wheel trains without a compiler: built, installed in a new environment, run. Who installs it
gets its types: a program of theirs is checked against it.

The environment gets torch from the one that runs these tests, by a path file, and gradwire from
the wheel alone. Its PATH leads to no compiler and its home is empty.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import venv
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch

import gradwire
from gradwire.lang.native import isa
from loopback import host_network
from products import EXHAUSTIVE

ROOT = Path(__file__).parents[2]
LEVELS = list(dict.fromkeys([isa.supported()[-1].name, isa.supported()[0].name]))
KERNELS = "identity qsgd:bits=4 shm"
PROGRAM = Path(__file__).with_name("user_program.py")
# Of this repository, so that torch's files are read once; git ignores it.
TYPES = ROOT / ".mypy_cache" / "users"

pytestmark = pytest.mark.xdist_group("processes")

TRAINING = r"""
    import sys
    import warnings

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gradwire as gw
    from gradwire.lang import kernels
    from gradwire.lang.native import prebuilt
    from gradwire.transport import shm_library

    warnings.simplefilter("error", RuntimeWarning)  # the fallback to eager is one
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(model)
    gw.attach(model, codec="qsgd", bits=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(256, 32)
    y = x[:, :1] - x[:, 1:2]
    for step in range(40):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            # One write: the ranks share a pipe, and print writes a line in several parts.
            sys.stdout.write(f"loss {loss.item()}\n")
    assert kernels(gw.QSGD(bits=4), torch.float32).target == "c"
    assert shm_library.unavailable() is None, shm_library.unavailable()
    sys.stdout.write(f"kernels from {prebuilt.loaded()[1]}\n")
    dist.destroy_process_group()
"""


def run(command: list[str], seconds: float, cwd: Path, **environment: str) -> str:
    """The output of a command, which must succeed. `environment` is added to this process's."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=cwd,
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def an_index() -> bool:
    """Whether there is a package index, which build isolation needs."""
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "hatchling"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run([*fetch, "--dest", folder], 30, Path(folder))
        except (AssertionError, subprocess.TimeoutExpired):
            return False
    return True


def build(folder: Path, isolated: bool = False, **environment: str) -> Path:
    """The wheel of this checkout, which is not changed."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    if isolated:
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder)]
    run(command, 240, ROOT, **environment)
    (made,) = folder.glob("*.whl")
    return made


def environment_in(folder: Path) -> tuple[Path, Path]:
    """The interpreter and the packages of a new environment, with torch by a path file."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # a path in a path file is searched, but the path files there (this checkout's) are not read
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder / "bin" / "python", packages


@pytest.fixture(scope="module")
def levels(pytestconfig: pytest.Config) -> list[str]:
    """The targets of kernels: this CPU, and in an exhaustive run also a lower level."""
    return LEVELS if pytestconfig.getoption("exhaustive") else LEVELS[:1]


@pytest.fixture(scope="module")
def wheel(
    levels: list[str], tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Path:
    """A wheel with a few kernels; built as users build it, but where there is no package index."""
    wanted = {"GRADWIRE_BUILD": KERNELS, "GRADWIRE_BUILD_ISA": " ".join(levels)}
    with host_network():
        isolated = pytestconfig.getoption("exhaustive") and an_index()
        return build(tmp_path_factory.mktemp("wheel"), isolated, **wanted)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and with torch by a path file."""
    folder = tmp_path_factory.mktemp("environment")
    made, _ = environment_in(folder)
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    run([sys.executable, "-m", "pip", "--python", str(made), *install], 60, folder)
    return made


@EXHAUSTIVE
def test_a_wheel_names_the_platform_of_its_kernels(wheel: Path, levels: list[str]) -> None:
    assert re.fullmatch(r"gradwire-[\d.]+-py3-none-\w+\.whl", wheel.name)
    assert wheel.name.endswith(f"{isa.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name for name in archive.namelist() if name.endswith(".so")}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()
    assert names == {f"kernels-{level}.so" for level in levels}


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_training_needs_no_compiler(python: Path, levels: list[str], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(TRAINING))
    launcher = [str(python), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(program)]
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: "" for name in os.environ if name.startswith("GRADWIRE_")}
    environment |= {"PATH": str(python.parent), "HOME": str(home), "XDG_CACHE_HOME": ""}
    environment |= {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    curves = []
    for level in levels:
        said = run(launcher, 100, tmp_path, **environment, GRADWIRE_ISA=level)
        losses = [float(x) for x in re.findall(r"loss ([\d.e-]+)", said)]
        assert len(losses) == 40
        assert losses[-1] < 0.5 * losses[0]
        used = re.findall(r"kernels from (\S+)", said)
        assert len(used) == 2
        assert {Path(path).name for path in used} == {f"kernels-{level}.so"}
        assert all(Path(path).is_relative_to(python.parents[1]) for path in used)
        curves.append(losses)
    assert curves[0] == curves[-1], "levels differ"
    assert not list(home.rglob("*.so")), "something was compiled"


def test_a_wheel_has_no_kernels_unless_asked(tmp_path: Path) -> None:
    """`pip install .` builds such a wheel, in seconds: no compiler is called."""
    called, compiler = tmp_path / "called", tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    compiler.chmod(0o755)
    made = build(tmp_path, GRADWIRE_BUILD="", GRADWIRE_CC=str(compiler))
    assert not called.exists()
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert "gradwire/py.typed" in names


IMPOSSIBLE = (
    (
        {"GRADWIRE_BUILD": "all", "GRADWIRE_CC": "no-such-compiler"},
        "GRADWIRE_BUILD=all asks for prebuilt kernels: GRADWIRE_CC=no-such-compiler is not a",
    ),
    (
        {"GRADWIRE_BUILD": "identity nonsense"},
        "GRADWIRE_BUILD=identity nonsense asks for prebuilt kernels: ",
    ),
)


def test_kernels_that_cannot_be_built_end_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    kernels = runpy.run_path(str(ROOT / "hatch_build.py"))["Kernels"]
    hook = kernels(str(ROOT), {}, None, None, "", "wheel")
    for environment, reason in IMPOSSIBLE:
        with mock.patch.dict(os.environ, environment), pytest.raises(SystemExit) as ended:
            hook.initialize("standard", {})
        assert reason in str(ended.value)
        assert hook.made is None


def test_make_wheel_asks_for_all_kernels() -> None:
    command = ["make", "--dry-run", "--always-make", "wheel"]
    assert "GRADWIRE_BUILD=all .venv/bin/python -m build" in run(command, 20, ROOT)


def test_an_editable_install_builds_nothing(tmp_path: Path) -> None:
    code = f"from hatchling.build import build_editable; build_editable({str(tmp_path)!r})"
    run([sys.executable, "-c", code], 20, ROOT, GRADWIRE_CC="false")
    (made,) = tmp_path.glob("*.whl")
    assert made.name.endswith("-py3-none-any.whl")


def test_a_source_archive_carries_the_hook(tmp_path: Path) -> None:
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)], 60, ROOT)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", "pyproject.toml", "src/gradwire/lang/emit/prelude.h"} <= names
    assert not [name for name in names if name.endswith(".so")]


@EXHAUSTIVE
def test_a_users_calls_are_checked_and_every_public_name_has_a_type(tmp_path: Path) -> None:
    """A program of theirs is well typed, but for its wrong calls.

    Names that come through `__getattr__` would be Any; so would those of a package without
    `py.typed`.
    """
    made, packages = environment_in(tmp_path / "environment")
    with zipfile.ZipFile(build(tmp_path, GRADWIRE_BUILD="")) as archive:
        archive.extractall(packages)
    names = tmp_path / "names.py"
    lines = [f"reveal_type(gw.{name})" for name in gradwire.__all__]
    names.write_text("\n".join(["import gradwire as gw", *lines, ""]))
    check = [sys.executable, "-m", "mypy", "--strict", "--no-color-output", "--config-file"]
    check += [os.devnull, "--cache-dir", str(TYPES), "--python-executable", str(made)]
    said = run([*check, str(PROGRAM), str(names)], 280, tmp_path, PYTHONPATH="", MYPYPATH="")
    revealed = dict(re.findall(r'names\.py:(\d+): note: Revealed type is "(.*)"', said))
    types = {name: revealed[str(at)] for at, name in enumerate(gradwire.__all__, start=2)}
    assert not [name for name, kind in types.items() if kind in ("Any", "builtins.object")]
    results = {name: kind.rpartition("->")[2] for name, kind in types.items()}
    assert not [name for name, result in results.items() if result.strip() == "Any"]
