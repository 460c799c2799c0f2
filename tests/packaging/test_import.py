"""Importing torch and gradwire: what it loads, that it is silent, and that a fault of ours ends in
a warning.

`import torch` loads the entry point `torch.backends` of every package that is installed, gradwire's
too; so a fault there would break torch for everybody. All of this runs in processes of its own, of
which few import torch, since that takes seconds.
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
from products import EXHAUSTIVE

SOURCE = Path(gradwire.__file__).parent
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


# ---- what is imported, and when


def test_import_gradwire_loads_no_other_module_not_even_torch() -> None:
    """Neither its own nor others': each public name is imported when it is used."""
    script = """
import __future__, importlib, json, sys, typing
before = set(sys.modules)
import gradwire
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = python(script, "-W", "error")
    assert json.loads(done.stdout) == ["gradwire"]
    assert done.stderr == ""


def test_the_entry_point_and_public_names_beside_torch() -> None:
    """The entry point loads three files of gradwire and nothing else, and tells what fails; the
    import and use of public names is silent. Each warning would be an error.
    """
    script = """
import importlib.metadata, io, json, sys, torch, warnings
import torch.distributed as dist

found, before = {}, set(sys.modules)

def loaded(name):
    global before
    found[name], before = sorted(set(sys.modules) - before), set(sys.modules)

import gradwire
loaded("gradwire")
(entry,) = importlib.metadata.entry_points(group="torch.backends", name="gradwire")
autoload = entry.load()
register, available = dist.Backend.register_backend, dist.is_available

def refuse(*args, **options):
    raise RuntimeError("injected: the registry is full")

dist.Backend.register_backend = refuse
dist.is_available = lambda: False
autoload()  # torch without distributed is left alone
dist.is_available = available
said, sys.stderr = sys.stderr, io.StringIO()
autoload()  # a warning is an error here: the reason is told nevertheless
found["refused"], sys.stderr = sys.stderr.getvalue(), said
dist.Backend.register_backend = register
autoload()
autoload()
found["registered"] = list(dist.Backend.backend_list).count("gradwire")
loaded("entry")
found["names"] = len([getattr(gradwire, name) for name in gradwire.__all__])
print(json.dumps(found))
"""
    done = python(script, "-W", "error", **NO_AUTOLOAD)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["gradwire"] == ["gradwire"]
    assert found["entry"] == ["gradwire.backend", "gradwire.backend.entry"]
    assert found["registered"] == 1
    assert "RuntimeError: injected: the registry is full" in found["refused"]
    assert found["names"] == len(gradwire.__all__)


@pytest.mark.timing
def test_importing_costs_little_beyond_torch() -> None:
    """The median of three; it contains what the entry point does in `import torch`."""
    script = """
import time
first = time.perf_counter()
import torch
begin = time.perf_counter()
from gradwire.backend.entry import autoload
autoload()
import gradwire
print((time.perf_counter() - begin) / (begin - first))
"""
    shares = [float(python(script, **NO_AUTOLOAD).stdout) for _ in range(3)]
    assert statistics.median(shares) < 0.2


# ---- faults, in the true course of `import torch`


@EXHAUSTIVE
def test_registering_may_fail(tmp_path: Path) -> None:
    """`import torch` goes on, with one warning that gives the reason.

    Another package, whose entry point torch loads first, breaks the registry.
    """
    (tmp_path / "fault.py").write_text(
        "def autoload():\n"
        "    import torch.distributed as dist\n"
        "    def refuse(*args, **options):\n"
        "        raise RuntimeError('injected: the registry is full')\n"
        "    dist.Backend.register_backend = refuse\n"
    )
    metadata = tmp_path / "fault-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nfault = fault:autoload\n")
    script = "import torch; print(torch.ones(2).sum().item())"
    done = python(script, "-W", "always", first=tmp_path)
    assert done.stdout == "2.0\n"
    assert done.stderr.count("RuntimeWarning: gradwire could not register its backend") == 1
    assert "RuntimeError: injected: the registry is full" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_module_of_gradwire_does_not_break_torch(tmp_path: Path) -> None:
    """Each file but the three that the entry point needs raises when it is imported."""
    copy = tmp_path / "gradwire"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "libraries"))
    kept = {
        copy / "__init__.py",
        copy / "backend" / "__init__.py",
        copy / "backend" / "entry.py",
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
