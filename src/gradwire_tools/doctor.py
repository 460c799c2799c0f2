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
from gradwire.errors import ConfigError
from gradwire.lang import jit, kernel_cache, native, prebuilt
from gradwire.lang.kernels import MEND
from gradwire.transport import shm, shm_library

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


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def examine() -> Iterator[dict[str, Any]]:
    """Yield rows: part, available, detail (a version, or the reason why not)."""
    yield _row("gradwire", True, f"{__version__}, Python {platform.python_version()}")
    yield _row("torch", True, f"{torch.__version__}, {_counted(torch.get_num_threads(), 'thread')}")
    yield _row("machine", True, f"{_counted(os.cpu_count() or 1, 'core')}, {platform.machine()}")
    yield _row("target eager", True, "torch on the CPU")
    yield _tried("compiler", jit.compiler)
    library, said = prebuilt.loaded()
    count = f"{len(prebuilt.listing())} in " if library is not None else ""
    yield _row("prebuilt kernels", library is not None, count + said)
    compiled = _tried("target c", _load_a_codec)
    if not compiled["available"]:
        compiled["detail"] += f"; attach sends bf16 in place of codecs on the CPU: {MEND}"
    yield compiled
    yield _triton()
    yield _row("transport loopback", True, "threads of one process, for tests")
    gloo = dist.is_available() and dist.is_gloo_available()
    yield _row("transport torch_p2p", gloo, "gloo" if gloo else "this torch has no gloo")
    reason = shm_library.unavailable()
    rings = f"rings of up to {shm.ring_bytes_for(1) >> 10} KiB between ranks of one machine"
    yield _row("transport shm", reason is None, reason or rings)
    yield from _lab()
    for part, extra, modules in (*_EXTRAS, *((f"gw.{one}", one, (one,)) for one in _TRAINERS)):
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        lacks = f'{" and ".join(missing)} not installed: pip install "gradwire[{extra}]"'
        yield _row(part, not missing, lacks if missing else ", ".join(modules))


def _triton() -> dict[str, Any]:
    from gradwire.lang import gpu

    reason = gpu.missing()
    if reason is not None:
        return _row("target triton", False, reason)
    return _row("target triton", True, "interpreted" if gpu.interpreting() else "compiled")


def _row(part: str, available: bool, detail: str) -> dict[str, Any]:
    return {"part": part, "available": available, "detail": detail}


def _tried(part: str, attempt: Callable[[], str]) -> dict[str, Any]:
    try:
        return _row(part, True, attempt())
    except (ConfigError, jit.CompileError) as error:
        return _row(part, False, str(error))


def _load_a_codec() -> str:
    from gradwire.codecs import QSGD

    made = native.Library(QSGD(), torch.float32)
    made.ready(["encode"])
    return "prebuilt" if made.prebuilt else f"kernels are kept in {kernel_cache.folder()}"


def _lab() -> Iterator[dict[str, Any]]:
    from gradwire_tools.lab import available

    reason = available()
    yield _row("lab", reason is None, "network namespaces" if reason is None else reason)
