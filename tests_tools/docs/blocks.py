"""Run the Python blocks of pages, as their readers would.

The blocks of a page are one program, in their order, run by two ranks at once in one folder. A
block's info string may say otherwise:

    ```python continues      as without; it says so to who reads the source
    ```python new            begins another program: new names, no process group
    ```python ranks=1        rank 0 alone runs it
    ```python slow           other tests run its feature: a run without slow blocks compiles it only
    ```python needs=NAME     without that package it is compiled only
    ```python fails=NAME     it must raise that error
    ```python NAME.py        a program of its own, kept under that name so that others import it;
                             args=... are its arguments, separated by commas; it begins and ends
                             without a process group

All may import from examples/, as a reader does who saves a block there.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pages import ROOT, Block, Page

from ranks import as_processes

RANKS = 2


def run(
    pages: Sequence[Page],
    inspect: Callable[[int, dict[str, Any]], Any] | None = None,
    slow: bool = True,
) -> list[list[list[Any]]]:
    """Run the blocks of pages, one page after the other in the same two processes.

    Returns:
        What `inspect(rank, names)` says at the end of each program, by page and rank.

    Raises:
        AssertionError: a block fails; the error names its page and line.
    """
    given = [[block for block in page.blocks if block.kind == "python"] for page in pages]
    given = [[block for block in blocks if _runs(block, slow)] for blocks in given]
    # This process hosts the store of each program, as the launcher does under torchrun.
    hosts = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(sum(1 + len(blocks) for blocks in given))
    ]
    ports = [host.port for host in hosts]
    with tempfile.TemporaryDirectory() as folder:
        named = [
            (page.path.name, f"{folder}/{at}", blocks)
            for at, (page, blocks) in enumerate(zip(pages, given, strict=True))
        ]
        # No group: a rank that destroys one as soon as it is made closes connections that another
        # rank still waits for ("connectFullMesh failed: Connection closed by peer").
        found = as_processes(RANKS, _rank, named, ports, inspect, deadline=280.0, backend=None)
    return [list(of_page) for of_page in zip(*found, strict=True)]


def _runs(block: Block, slow: bool) -> bool:
    compile(block.text, f"block{block.line}.py", "exec")
    needs = [word.removeprefix("needs=") for word in block.words if word.startswith("needs=")]
    missing = any(importlib.util.find_spec(name) is None for name in needs)
    return not missing and (slow or "slow" not in block.words)


def _rank(
    rank: int,
    pages: list[tuple[str, str, list[Block]]],
    ports: list[int],
    inspect: Callable[[int, dict[str, Any]], Any] | None,
) -> list[list[Any]]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    sys.dont_write_bytecode = True
    sys.path.append(str(ROOT / "examples"))
    fresh = iter(ports)
    return [
        _page(rank, name, Path(folder), blocks, fresh, inspect) for name, folder, blocks in pages
    ]


def _page(
    rank: int,
    page: str,
    folder: Path,
    blocks: list[Block],
    fresh: Any,
    inspect: Callable[[int, dict[str, Any]], Any] | None,
) -> list[Any]:
    said: list[Any] = []
    folder.mkdir(exist_ok=True)  # of both ranks
    os.chdir(folder)
    torch.manual_seed(0)
    before = set(sys.modules)
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
        sys.path.remove(own)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(own):
                del sys.modules[name]
    return said


def _begin(ports: Any) -> dict[str, Any]:
    """A new program: no process group, and an address for the one it makes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(MASTER_PORT=str(next(ports)), WORLD_SIZE=str(RANKS))  # Lightning removes it
    return {"__name__": "__main__"}


def _execute(block: Block, names: dict[str, Any], own: Path, where: str, ports: Any) -> None:
    given = dict(word.split("=", 1) for word in block.words if "=" in word)
    file = next((word for word in block.words if word.endswith(".py")), None)
    path = own / (file or f"block{block.line}.py")
    path.write_text(block.text, "utf-8")
    linecache.checkcache()
    importlib.invalidate_caches()
    # Ray's workers take over the environment, and have a store of their own.
    if given.get("needs") == "ray":
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
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
    finally:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert "fails" not in given, f"{where}: the block does not raise {given['fails']}"
