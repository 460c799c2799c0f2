"""`gradwire doctor`: what is available on this machine, and what is not and why."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from gradwire import __version__
from gradwire.codecs import QSGD
from gradwire.errors import ConfigError
from gradwire.lang import gpu
from gradwire.lang.kernels import MEND, Library
from gradwire.lang.native import cache, jit, prebuilt
from gradwire.transport import shm, shm_library
from gradwire_tools import lab

# An optional part, the extra that brings it, and the modules it needs.
_EXTRAS = (
    ("command line", "cli", ("typer", "rich")),
    ("schedules in files", "cli", ("yaml",)),
    ("report", "report", ("jinja2", "matplotlib")),
    ("--plot", "report", ("matplotlib",)),
    ("bench train --task image", "bench", ("sklearn",)),
    ("policies bayes, flexible", "adapt", ("optuna", "pymoo")),
)
_TRAINERS = ("lightning", "accelerate", "transformers", "ray", "keras")  # extras and modules


def examine() -> Iterator[dict[str, Any]]:
    """Yield rows: part, available, detail (a version, or the reason why not)."""
    yield _row("gradwire", f"{__version__}, Python {platform.python_version()}")
    yield _row("torch", f"{torch.__version__}, {_counted(torch.get_num_threads(), 'thread')}")
    yield _row("machine", f"{_counted(os.cpu_count() or 1, 'core')}, {platform.machine()}")
    yield _row("target eager", "torch on the CPU")
    yield _tried("compiler", jit.compiler)
    library, said = prebuilt.loaded()
    count = f"{len(prebuilt.listing())} in {said}"
    yield _row("prebuilt kernels", count, None if library is not None else said)
    compiled = _tried("target c", _load_a_codec)
    if not compiled["available"]:
        compiled["detail"] += f"; attach sends bf16 in place of codecs on the CPU: {MEND}"
    yield compiled
    how = "compiled" if (reason := gpu.missing()) or not gpu.interpreting() else "interpreted"
    yield _row("target triton", how, reason)
    yield _row("transport loopback", "threads of one process, for tests")
    gloo = dist.is_available() and dist.is_gloo_available()
    yield _row("transport torch_p2p", "gloo", None if gloo else "this torch has no gloo")
    rings = f"rings of up to {shm.ring_bytes_for(1) >> 10} KiB between ranks of one machine"
    yield _row("transport shm", rings, shm_library.unavailable())
    yield _row("lab", "network namespaces", lab.available())
    for part, extra, modules in (*_EXTRAS, *((f"gw.{one}", one, (one,)) for one in _TRAINERS)):
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        lacks = f'{" and ".join(missing)} not installed: pip install "gradwire[{extra}]"'
        yield _row(part, ", ".join(modules), lacks if missing else None)


def _row(part: str, detail: str, reason: str | None = None) -> dict[str, Any]:
    """What is available; or not, and the reason."""
    return {"part": part, "available": reason is None, "detail": reason or detail}


def _tried(part: str, attempt: Callable[[], str]) -> dict[str, Any]:
    try:
        return _row(part, attempt())
    except (ConfigError, jit.CompileError) as error:
        return _row(part, "", str(error))


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _load_a_codec() -> str:
    made = Library(QSGD(), torch.float32, "c")
    made.ready(["encode"])
    return "prebuilt" if made.prebuilt else f"kernels are kept in {cache.folder()}"
