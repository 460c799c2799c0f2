"""Run the Python blocks of a page, as its reader would.

The blocks of a page are one program, in their order, run by two ranks at once in one folder. A
block's info string may say otherwise:

    ```python continues      as without; it says so to who reads the source
    ```python new            begins another program: new names, no process group
    ```python ranks=1        rank 0 alone runs it
    ```python fails=NAME     it must raise that error
    ```python NAME.py        a program of its own, kept under that name so that others import it;
                             args=... are its arguments, separated by commas; it begins and ends
                             without a process group
"""

from __future__ import annotations

import importlib
import linecache
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pages import Block, Page

from gradwire.lab.ports import free_port
from ranks import as_processes

RANKS = 2


def run(page: Page, inspect: Callable[[int, dict[str, Any]], Any] | None = None) -> list[Any]:
    """Run a page's blocks; what `inspect(rank, names)` says at the end of each program, by rank."""
    blocks = [block for block in page.blocks if block.kind == "python"]
    ports = [free_port() for _ in range(1 + len(blocks))]
    with tempfile.TemporaryDirectory() as folder:
        given = (page.path.name, folder, blocks, ports, inspect)
        # No group: a rank that destroys one as soon as it is made closes connections that another
        # rank still waits for ("connectFullMesh failed: Connection closed by peer").
        return as_processes(RANKS, _rank, *given, deadline=240.0, backend=None)


def _rank(
    rank: int,
    page: str,
    folder: str,
    blocks: list[Block],
    ports: list[int],
    inspect: Callable[[int, dict[str, Any]], Any] | None,
) -> list[Any]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    fresh = iter(ports)
    said: list[Any] = []
    sys.dont_write_bytecode = True
    os.chdir(folder)
    with tempfile.TemporaryDirectory() as own:  # of its modules
        sys.path.insert(0, own)
        names: dict[str, Any] = _begin(fresh)
        for block in blocks:
            if "new" in block.words:
                said += [inspect(rank, names)] if inspect else []
                names = _begin(fresh)
            if rank == 0 or "ranks=1" not in block.words:
                _execute(block, names, Path(own), f"{page}:{block.line}", fresh)
        said += [inspect(rank, names)] if inspect else []
    return said


def _begin(ports: Any) -> dict[str, Any]:
    """A new program: no process group, and an address for the one it makes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(next(ports))
    return {"__name__": "__main__"}


def _execute(block: Block, names: dict[str, Any], own: Path, where: str, ports: Any) -> None:
    given = dict(word.split("=", 1) for word in block.words if "=" in word)
    file = next((word for word in block.words if word.endswith(".py")), None)
    path = own / (file or f"block{block.line}.py")
    path.write_text(block.text, "utf-8")
    linecache.checkcache()
    importlib.invalidate_caches()
    try:
        if file is None:
            exec(compile(block.text, str(path), "exec"), names)
        else:
            _begin(ports)
            sys.argv = [file, *filter(None, given.get("args", "").split(","))]
            sys.modules.pop(path.stem, None)
            runpy.run_path(str(path), run_name="__main__")
    except Exception as error:
        if type(error).__name__ == given.get("fails"):
            return
        said = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{where}: the block fails: {said}") from error
    assert "fails" not in given, f"{where}: the block does not raise {given['fails']}"
