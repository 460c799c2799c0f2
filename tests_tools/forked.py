"""Ranks on loopback, forked from a server that has imported torch.

A rank that starts as a fresh interpreter spends seconds on imports, many times what a tiny model
trains for. `make test-all` has a run whose ranks start as users start them (bench/test_train.py).
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ends import forkserver
from gradwire_tools import lab

prepare: Callable[[], object] | None = None  # a function of a module, which each rank calls first


class Rank:
    """A process of a `Loopback`, as `lab.NodeProcess` is one of a lab."""

    def __init__(self, rank: int, process: Any) -> None:
        self.rank, self.process = rank, process
        self.ended = SimpleNamespace(wait=lambda seconds: wait([process.sentinel], seconds))

    def poll(self) -> int | None:
        code: int | None = self.process.exitcode
        return code

    def wait(self) -> int:
        self.process.join()
        return int(self.process.exitcode)

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


class Loopback:
    """Does what `lab.Lab` does on `net none`. It hosts the store, so no other takes its port."""

    net = lab.Network.parse("none")
    schedule = lab.Schedule.fixed(net)

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.ranks: list[Rank] = []

    def __enter__(self) -> Loopback:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()

    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.poll() is None]

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
        self, node: int, argv: Sequence[str], environment: Mapping[str, str], cwd: Any = None,
        stdout: Any = None, stderr: Any = None,
    ) -> Rank:  # fmt: skip
        """Only Python, with `-m MODULE` or a script, and its arguments."""
        assert argv[0] in (sys.executable, "python"), argv
        ends = [Connection(os.dup(getattr(end, "fileno", lambda e=end: e)()), readable=False)
                for end in (stdout, stderr)]  # fmt: skip
        arguments = (list(argv[1:]), dict(environment), str(cwd or Path.cwd()), ends, prepare)
        process = forkserver().Process(target=_rank, args=arguments)
        process.start()
        self.ranks.append(Rank(node, process))
        return self.ranks[-1]


_made: list[dict[str, Any]] = []


def _rank(
    argv: list[str],
    environment: dict[str, str],
    folder: str,
    ends: list[Connection],
    before: Callable[[], object] | None,
) -> None:
    """`python` with these arguments; it ends with its parent, as in a lab."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for number, end in enumerate(ends, 1):
        os.dup2(end.fileno(), number)
        end.close()
    torch.set_num_threads(1)
    if before is not None:
        before()
    # What a program has made lives until the process ends: torch frees a DDP module, and so its
    # group, while it holds Python's lock, for which the group's threads may wait.
    if argv[0] == "-m":
        sys.argv = ["", *argv[2:]]
        _made.append(runpy.run_module(argv[1], run_name="__main__", alter_sys=True))
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).parent.resolve()))
        _made.append(runpy.run_path(argv[0], run_name="__main__"))


def _end_with_parent() -> None:
    parent: Any = parent_process()
    wait([parent.sentinel])
    os._exit(1)


def lab_of(nodes: int, net: lab.Network | lab.Schedule) -> Any:
    """In place of `lab.Lab`: the real one where a network is emulated."""
    first = net.first if isinstance(net, lab.Schedule) else net
    return lab.Lab(nodes, net) if first.shaped else Loopback(nodes)


STAND_IN = SimpleNamespace(Lab=lab_of)  # for `lab` in `gradwire_tools.bench.workers`
