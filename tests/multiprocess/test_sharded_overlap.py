"""Gathers of weights overlap with compute on the CPU, where FSDP2's own block.

Rank 1 joins the gather of the next block once rank 0 computes the current one. So a gather that
blocks where FSDP2 calls it hangs; one that moves while FSDP2 waits for it alone does, too. With -s,
the test prints rank 0's time line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess

BLOCKS, PATIENCE = 4, 20.0
WEIGHTS = {"*": "randomshift:bits=8"}


class TimeLine:
    """What happens on this rank, and what it waits for.

    Attributes:
        events: (seconds, what happened).
        works: of the last gather of each block; None: it had ended when its call returned.
        gated: the passes ("forward", "backward") in which rank 1 joins late.
    """

    def __init__(self, gated: tuple[str, ...], patience: float) -> None:
        self.events: list[tuple[float, str]] = []
        self.works: dict[int, dist.Work | None] = {}
        self.gated = gated
        self.running = "forward"
        self._patience = patience
        self._begun = time.perf_counter()
        self._store = dist.distributed_c10d._get_default_store()

    def note(self, what: str) -> None:
        self.events.append((time.perf_counter() - self._begun, f"{self.running}: {what}"))

    def at(self, what: str) -> float:
        """When it first happened."""
        return next(seconds for seconds, event in self.events if event == what)

    def neighbour(self, block: int, ahead: int) -> int:
        """The block that is computed after this one (1) or before it (-1) in the running pass."""
        return block + ahead if self.running == "forward" else block - ahead

    def gather(self, block: int, call: Callable[[], dist.Work | None]) -> dist.Work | None:
        before = self.neighbour(block, -1)
        if self.running in self.gated and dist.get_rank() == 1 and 0 <= before < BLOCKS:
            self._store.wait([f"{self.running} {before}"], timedelta(seconds=self._patience))
        self.note(f"gather {block} begins")
        self.works[block] = call()
        return self.works[block]

    def compute(self, block: int) -> None:
        """As long as the gather of the next block lasts."""
        self.note(f"compute {block} begins")
        if dist.get_rank() == 0:
            self._store.set(f"{self.running} {block}", "")
        after = self.neighbour(block, 1)
        if self.running in self.gated and 0 <= after < BLOCKS:
            work, end = self.works[after], time.monotonic() + self._patience
            while work is not None and not work.is_completed():
                assert time.monotonic() < end, f"the gather of block {after} needs to be awaited"
                time.sleep(1e-3)
            self.note(f"gather {after} has ended")
        self.note(f"compute {block} ends")


class Computes(torch.autograd.Function):
    """Stands for the compute of a block, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: TimeLine, block: int) -> torch.Tensor:
        ctx.of = line, block
        line.compute(block)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        line, block = ctx.of
        line.compute(block)
        return gradient, None, None


class Block(nn.Module):
    def __init__(self, line: TimeLine, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.line, self.at = line, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Computes.apply(self.linear(x), self.line, self.at)


def model_on(line: TimeLine) -> nn.Sequential:
    model = nn.Sequential(*(Block(line, at) for at in range(BLOCKS)))
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    for block, following in pairwise(model):
        block.set_modules_to_forward_prefetch([following])
    return model


def watch(model: nn.Sequential) -> None:
    """Put what gathers each block's weights on the time line."""
    for block in model:
        gather = block._get_fsdp_state()._fsdp_param_group._all_gather_comm

        class Noted(type(gather)):  # type: ignore[misc]
            def __init__(self, inner: Any, block: Block) -> None:
                self.inner, self.block = inner, block

            def allocate(self, *size: Any, **kind: Any) -> torch.Tensor:
                return self.inner.allocate(*size, **kind)

            def __call__(self, **of: Any) -> dist.Work | None:
                return self.block.line.gather(self.block.at, lambda: self.inner(**of))

        block.set_custom_all_gather(Noted(gather, block))


def overlaps(rank: int, keep: str) -> list[tuple[float, str]]:
    gathers_twice = keep in ("none", "redraw")
    line = TimeLine(("forward", "backward") if gathers_twice else ("forward",), PATIENCE)
    model = model_on(line)
    gw.attach(model, weights=WEIGHTS, keep=keep)
    watch(model)
    loss = model(torch.randn(8, 64)).square().mean()
    line.running = "backward"
    loss.backward()
    for at in range(BLOCKS - 1):
        begins = line.at(f"forward: gather {at + 1} begins")
        assert begins < line.at(f"forward: compute {at} begins")
        assert line.at(f"forward: gather {at + 1} has ended") < line.at(
            f"forward: compute {at} ends"
        )
        if gathers_twice:
            begins = line.at(f"backward: gather {at} begins")
            ended = line.at(f"backward: gather {at} has ended")
            assert begins < ended < line.at(f"backward: compute {at + 1} ends")
    return line.events


@pytest.mark.parametrize("keep", ["none", "payload", "redraw", "reference"])
def test_the_next_blocks_gather_ends_while_the_current_one_computes(keep: str) -> None:
    (events, _) = as_processes(2, overlaps, keep)
    print(*(f"{1e3 * seconds:8.1f} ms  {what}" for seconds, what in events), sep="\n")


def blocks(rank: int) -> str:
    line = TimeLine(("forward",), 2.0)
    model = model_on(line)
    watch(model)
    return type(caught(lambda: model(torch.randn(8, 64)))).__name__


def test_fsdp2s_own_gathers_block() -> None:
    """So the test above can fail: here rank 1 waits in vain for rank 0's compute."""
    (_, found) = as_processes(2, blocks, timeout=8)
    assert found == "DistStoreError"
