"""Ranks of benchmarks on `net none`, forked from a server that has imported torch.

A rank that starts as a fresh interpreter spends seconds on imports, many times what a tiny model
trains for. `make test-all` has a run whose ranks start as users start them (test_train.py).
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ends import forkserver
from gradwire_tools import lab

prepare: Callable[[], object] | None = None  # a function of a module, which each rank calls first


class Loopback:
    """Does what `lab.Lab` does on `net none`. It hosts the store, so no other takes its port."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.ranks: list[Any] = []

    def __enter__(self) -> Loopback:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def describe(self) -> str:
        return f"{self.nodes} nodes on loopback, forked"

    def torchrun_env(self, per_node: int = 1) -> list[dict[str, str]]:
        size = self.nodes * per_node
        shared = {
            "WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{per_node}",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{self._store.port}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return [
            {**shared, "RANK": f"{r}", "LOCAL_RANK": f"{r % per_node}",
             "GROUP_RANK": f"{r // per_node}"}
            for r in range(size)
        ]  # fmt: skip

    def spawn(
        self, node: int, argv: Sequence[str], environment: Mapping[str, str], stdout: Any,
        stderr: Any,
    ) -> Any:  # fmt: skip
        assert stdout is stderr
        assert list(argv[:2]) == [sys.executable, "-m"]
        arguments = (argv[2:], dict(environment), stdout.name, prepare)
        process = forkserver().Process(target=_rank, args=arguments)
        process.start()
        self.ranks.append(process)
        return SimpleNamespace(poll=lambda: process.exitcode)


def _rank(
    argv: list[str], environment: dict[str, str], log: str, before: Callable[[], object] | None
) -> None:
    """`python -m` with these arguments; it ends with its parent, as in a lab."""
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    if before is not None:
        before()
    sys.argv = ["", *argv[1:]]
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    parent: Any = parent_process()
    wait([parent.sentinel])
    os._exit(1)


def lab_of(nodes: int, net: lab.Network | lab.Schedule) -> Any:
    """In place of `lab.Lab`: the real one where a network is emulated."""
    first = net.first if isinstance(net, lab.Schedule) else net
    return lab.Lab(nodes, net) if first.shaped else Loopback(nodes)


STAND_IN = SimpleNamespace(Lab=lab_of)  # for `lab` in `gradwire_tools.bench.workers`
