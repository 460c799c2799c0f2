"""Target triton in whole collectives: with and without separate kernel memory, and in order, as
over NCCL (law 6).

Run as a script, a process of its own, since Triton reads TRITON_INTERPRET when it is imported, it
prints whether collectives with interpreted kernels are target c's, and who is told of bad payloads.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fifo import FifoBatch, FifoHub
from gradwire import Options, all_reduce
from gradwire.engine import HEADER_BYTES, Communicator
from gradwire.lang import gpu
from gradwire.transport import Hub
from products import EXHAUSTIVE
from ranks import as_threads, caught
from rooms.collectives import job as job_module
from rooms.collectives import placement as arena_module

RANKS = 4
LANG = str(Path(__file__).parents[1] / "lang")
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
        for codec in ("qsgd", "qsgd:rounding=stochastic", "topk"):
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
    from triton_checks import patch_once  # of tests/lang

    patch_once()
    gpu.Device.run = run  # type: ignore[method-assign]
    arena_module.BORROWED_BYTES = 1
    expected = reduce_with("c")
    for staged in (False, True):
        job_module.is_staged = lambda device, staged=staged: staged  # type: ignore[assignment, misc]
        say("staged" if staged else "plain", reduce_with("triton"), expected)
    say("in order", reduce_with("triton", FifoHub(RANKS)), expected)
    for raised in told():
        print(*raised)


class Spoiling(FifoHub):
    """Every message's payload claims more entries than possible."""

    def begin(self, rank: int, batch: FifoBatch) -> None:
        for message in batch.messages:
            if not message.incoming:
                message.memory[HEADER_BYTES : HEADER_BYTES + 2] = 255
        super().begin(rank, batch)


def told() -> list[list[str]]:
    """By rank: the errors of calls on two groups, of which one gets bad payloads. In order, only a
    later call on the same group fails, although both use the same kernels."""
    hub, link = Hub(2), FifoHub(2)
    others = [
        Communicator(hub.transport(r), links=lambda device, r=r: link.link(r)) for r in range(2)
    ]

    def body(comm: Communicator) -> list[str]:
        def call(group: Communicator, step: int) -> str:
            values, options = torch.ones(800), Options(target="triton")
            error = caught(
                lambda: all_reduce(values, "topk", group=group, step=step, options=options)
            )
            return type(error).__name__

        other = others[comm.rank]
        return [call(comm, 0), call(other, 0), call(other, 1), call(comm, 1), call(other, 2)]

    try:
        return as_threads(2, body, timeout=300, fifo=Spoiling(2))
    finally:
        for other in others:
            other.close()


def say(way: str, found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    same = all(all(map(torch.equal, a, b)) for a, b in zip(found, expected, strict=True))
    print(way, "same" if same else "other")


@EXHAUSTIVE
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_collectives_of_target_triton_are_those_of_target_c() -> None:
    path = os.pathsep.join([LANG, *sys.path])
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    *same, one, other = done.stdout.splitlines()
    assert same == ["plain same", "staged same", "in order same"], done.stderr[-3000:]
    # The bad group's second call; a rank may hear of it from its peer first.
    raised = {line.replace("NoneType ", "", 3).split()[0] for line in (one, other)}
    assert "CodecError" in raised, (one, other, done.stderr[-3000:])
    assert raised <= {"CodecError", "TransportError"}
    for line in (one, other):
        assert [kind == "NoneType" for kind in line.split()] == [True, True, True, False, True]


if __name__ == "__main__":
    main()
