"""Importing torch and gradwire: what it loads, that it is silent, and that a fault of ours ends in
a warning.

`import torch` loads the entry point `torch.backends` of every package that is installed, gradwire's
too; so a fault there would break torch for everybody. All of this runs in processes of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire

SOURCE = Path(gradwire.__file__).parent
ENTRY = {"gradwire", "gradwire.integrations", "gradwire.integrations.backend_entry"}
LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"
NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def python(
    script: str, *options: str, first: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, which must succeed; `first` is searched for modules before all else."""
    paths = [str(first or SOURCE.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *options, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def loaded(script: str, **environment: str) -> set[str]:
    """The modules that are loaded after a script."""
    return set(json.loads(python(f"{script}; {LOADED}", **environment).stdout))


def extension(folder: Path, code: str) -> None:
    """Install in `folder` another package with an entry point `torch.backends`, which runs
    `code`; torch loads it before gradwire's where the folder is searched first."""
    (folder / "fault.py").write_text(f"def autoload():\n    {code}\n")
    metadata = folder / "fault-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nfault = fault:autoload\n")


# ---- what is imported, and when


@pytest.fixture(scope="module")
def torchs() -> set[str]:
    """The modules that `import torch` loads where no entry point is."""
    return loaded("import torch, warnings, importlib.metadata", **NO_AUTOLOAD)


def test_import_gradwire_loads_no_other_module(torchs: set[str]) -> None:
    """Neither its own nor others': each public name is imported when it is used."""
    assert loaded("import torch, gradwire", **NO_AUTOLOAD) - torchs == {"gradwire"}


def test_import_gradwire_does_not_import_torch() -> None:
    added = loaded("import gradwire") - loaded("import __future__, importlib, typing")
    assert added == {"gradwire"}


def test_the_entry_point_loads_next_to_nothing(torchs: set[str]) -> None:
    """Three files of gradwire, and nothing that `import torch` does not load."""
    assert loaded("import torch") - torchs == ENTRY


def test_importing_and_using_public_names_is_silent() -> None:
    every = "[getattr(gradwire, name) for name in gradwire.__all__]"
    for script in ("import gradwire", f"import torch, gradwire; {every}"):
        done = python(script, "-W", "error")
        assert done.stdout + done.stderr == ""


def test_importing_costs_little_beyond_torch() -> None:
    """The median of three; it contains what the entry point does in `import torch`."""
    script = """
import time, torch
begin = time.perf_counter()
from gradwire.integrations.backend_entry import autoload
autoload()
import gradwire
print(time.perf_counter() - begin)
"""
    taken = [float(python(script, **NO_AUTOLOAD).stdout) for _ in range(3)]
    assert statistics.median(taken) < 0.3


# ---- faults


def test_registering_may_fail(tmp_path: Path) -> None:
    """`import torch` goes on, with one warning that gives the reason."""
    message = "injected: the registry is full"
    extension(
        tmp_path,
        "import torch.distributed as dist\n"
        "    def refuse(*args, **options):\n"
        f"        raise RuntimeError({message!r})\n"
        "    dist.Backend.register_backend = refuse",
    )
    script = "import torch; print(torch.ones(2).sum().item())"
    done = python(script, "-W", "always", first=tmp_path)
    assert done.stdout == "2.0\n"
    assert done.stderr.count("RuntimeWarning: gradwire could not register its backend") == 1
    assert f"RuntimeError: {message}" in done.stderr
    assert "Traceback" not in done.stderr
    # Where warnings are errors the reason is still told, and torch still imports.
    done = python(script, "-W", "error::RuntimeWarning", first=tmp_path)
    assert done.stdout == "2.0\n"
    assert message in done.stderr


def test_torch_without_distributed_is_left_alone(tmp_path: Path) -> None:
    extension(
        tmp_path,
        "import torch.distributed as dist\n"
        "    dist.is_available = lambda: False\n"
        "    dist.Backend.register_backend = None",
    )
    done = python("import torch", "-W", "always", first=tmp_path)
    assert "gradwire" not in done.stderr


def test_a_broken_module_of_gradwire_does_not_break_torch(tmp_path: Path) -> None:
    """Each file but the three that the entry point needs raises when it is imported."""
    copy = tmp_path / "gradwire"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "libraries"))
    kept = {
        copy / "__init__.py",
        copy / "integrations" / "__init__.py",
        copy / "integrations" / "backend_entry.py",
    }
    broken = [path for path in copy.rglob("*.py") if path not in kept]
    assert len(broken) > 100
    for path in broken:
        path.write_text("raise ImportError('injected: a broken installation')\n")
    script = """
import torch, gradwire, torch.distributed as dist
assert gradwire.__file__.startswith({folder!r})
assert "gradwire" in dist.Backend.backend_list
try:
    gradwire.attach
except ImportError as error:
    print(error)
"""
    done = python(script.format(folder=str(tmp_path)), "-W", "always", first=tmp_path)
    assert done.stdout == "injected: a broken installation\n"
    assert done.stderr == ""
