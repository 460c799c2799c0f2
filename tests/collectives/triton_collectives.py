"""Collectives whose kernels are target triton's, interpreted: prints whether they are target c's.

A process of its own, since Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gradwire.collectives.arena as arena_module
import gradwire.collectives.job as job_module
from fifo import FifoHub
from gradwire import Options, all_reduce
from gradwire.engine import Communicator
from gradwire.lang import gpu
from gradwire.transport import Hub
from ranks import as_threads

RANKS = 4
_one_at_a_time = threading.Lock()
_run = gpu.Device.run


def run(self: gpu.Device, *arguments: Any) -> None:
    """Triton's interpreter changes its module while a kernel runs, so ranks take turns."""
    with _one_at_a_time:
        _run(self, *arguments)


def reduce_with(target: str, fifo: FifoHub | None = None) -> list[list[torch.Tensor]]:
    """By rank: results and residuals; in order, over `fifo`, if it is given."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        found = []
        for codec in ("qsgd", "topk"):
            generator = torch.Generator().manual_seed(comm.rank)
            values, residual = torch.randn(3000, generator=generator), torch.full((3000,), 0.1)
            options = Options(target=target)
            all_reduce(values, codec, op="avg", residual=residual, group=comm, options=options)
            found += [values, residual]
        return found

    # Of four ranks three payloads are summed, which triton needs at equal distances.
    hub = Hub(RANKS, lends=True)
    return as_threads(RANKS, body, hub, timeout=300, fifo=fifo)


def main() -> None:
    gpu.Device.run = run  # type: ignore[method-assign]
    arena_module.BORROWED_BYTES = 1
    expected = reduce_with("c")
    for staged in (False, True):
        job_module.is_staged = lambda device, staged=staged: staged  # type: ignore[assignment, misc]
        say("staged" if staged else "plain", reduce_with("triton"), expected)
    say("in order", reduce_with("triton", FifoHub(RANKS)), expected)


def say(way: str, found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    same = all(all(map(torch.equal, a, b)) for a, b in zip(found, expected, strict=True))
    print(way, "same" if same else "other")


if __name__ == "__main__":
    main()
