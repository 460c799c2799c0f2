"""Gathers of weights overlap with compute on the CPU, where FSDP2's own block.

Rank 1 joins the gather of the next block once rank 0 computes the current one. So a gather that
blocks where FSDP2 calls it hangs; one that moves while FSDP2 waits for it alone does, too. With -s,
rank 0 prints its time lines.
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
from gradwire.planner.weights import KEEP
from ranks import each, together

pytestmark = pytest.mark.multiprocess

BLOCKS = 4
WEIGHTS = {"*": "randomshift:bits=8"}


class TimeLine:
    """What happens on this rank, in order, and what it waits for.

    Attributes:
        events: what happened.
        works: of the last gather of each block; None: it had ended when its call returned.
        gated: the passes ("forward", "backward") in which rank 1 joins late.
        patience: seconds that rank 1 waits for rank 0's compute; then it notes that it gave up.
    """

    def __init__(self, gated: tuple[str, ...], name: str, patience: float = 60.0) -> None:
        self.events: list[str] = []
        self.works: dict[int, dist.Work | None] = {}
        self.gated = gated
        self.running = "forward"
        self.patience = patience
        self._name = name  # unlike that of other time lines
        self._times: list[float] = []
        self._store = dist.distributed_c10d._get_default_store().clone()

    def note(self, what: str) -> None:
        self.events.append(f"{self.running}: {what}")
        self._times.append(time.perf_counter())

    def ordered(self, *events: str) -> bool:
        """Whether these have happened, in this order."""
        places = [self.events.index(event) for event in events]
        return places == sorted(places)

    def print(self) -> None:
        timed = zip(self._times, self.events, strict=True)
        lines = (f"{1e3 * (at - self._times[0]):8.1f} ms  {what}" for at, what in timed)
        print(self._name, *lines, sep="\n", flush=True)

    def give_up(self, what: str) -> None:
        self.note(what)
        self.patience = 0.1  # the test has failed

    def neighbour(self, block: int, ahead: int) -> int:
        """The block that is computed after this one (1) or before it (-1) in the running pass."""
        return block + ahead if self.running == "forward" else block - ahead

    def gather(self, block: int, call: Callable[[], dist.Work | None]) -> dist.Work | None:
        before = self.neighbour(block, -1)
        if self.running in self.gated and dist.get_rank() == 1 and 0 <= before < BLOCKS:
            try:
                patience = timedelta(seconds=self.patience)
                self._store.wait([f"{self._name} {self.running} {before}"], patience)
            except dist.DistStoreError:
                self.give_up(f"rank 0 does not compute {before}")
        self.note(f"gather {block} begins")
        self.works[block] = call()
        return self.works[block]

    def compute(self, block: int) -> None:
        """As long as the gather of the next block lasts."""
        self.note(f"compute {block} begins")
        if dist.get_rank() == 0:
            self._store.set(f"{self._name} {self.running} {block}", "")
        after = self.neighbour(block, 1)
        if self.running in self.gated and 0 <= after < BLOCKS:
            work, end = self.works[after], time.monotonic() + self.patience
            while work is not None and not work.is_completed():
                if time.monotonic() > end:
                    self.give_up(f"the gather of {after} does not end unless it is awaited")
                    break
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


def the_next_blocks_gather_ends_while_the_current_one_computes(rank: int, keep: str) -> None:
    gathers_twice = keep in ("none", "redraw")
    line = TimeLine(("forward", "backward") if gathers_twice else ("forward",), f"keep={keep!r}")
    model = model_on(line)
    gw.attach(model, weights=WEIGHTS, keep=keep)
    watch(model)
    loss = model(torch.randn(8, 64)).square().mean()
    line.running = "backward"
    loss.backward()
    if rank == 0:
        line.print()
    assert not [event for event in line.events if "does not" in event], line.events
    for at in range(BLOCKS - 1):
        assert line.ordered(
            f"forward: gather {at + 1} begins",
            f"forward: compute {at} begins",
            f"forward: gather {at + 1} has ended",
            f"forward: compute {at} ends",
        ), line.events
        if gathers_twice:
            assert line.ordered(
                f"backward: gather {at} begins",
                f"backward: gather {at} has ended",
                f"backward: compute {at + 1} ends",
            ), line.events


def fsdp2s_own_gathers_block(rank: int) -> None:
    """So the check above can fail: here rank 1 waits in vain for rank 0's compute."""
    line = TimeLine(("forward",), "FSDP2", patience=0.2)
    model = model_on(line)
    watch(model)
    model(torch.randn(8, 64))
    assert ("forward: rank 0 does not compute 0" in line.events) == (rank == 1), line.events


def test_the_next_blocks_gather_ends_while_the_current_one_computes() -> None:
    overlaps = the_next_blocks_gather_ends_while_the_current_one_computes
    together(2, *each(overlaps, *KEEP), fsdp2s_own_gathers_block)
