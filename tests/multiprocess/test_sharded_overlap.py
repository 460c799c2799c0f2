"""Gathers of weights overlap with compute on the CPU, where FSDP2's own block.

Rank 1 joins the gather of the next block once rank 0 computes the current one, whose compute lasts
until that gather has ended. So a gather that blocks where FSDP2 calls it hangs; one that moves
while FSDP2 waits for it alone does, too.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from scenario import by_layer
from torch import nn

import gradwire as gw
from gradwire.planner.weights import KEEP
from leftovers import until
from ranks import on
from training import OnTheWayBack

BLOCKS = 4
WEIGHTS = {"*": "randomshift:bits=8"}


class Schedule:
    """Which gather waits for which compute, and the other way round.

    Attributes:
        works: of the gather of each block in the running pass; None: it ended within its call.
        gated: the passes ("forward", "backward") in which they wait.
        overlapped: the gathers that ended during the compute of the block before.
        faults: what was waited for in vain, up to `patience` seconds.
    """

    def __init__(self, gated: tuple[str, ...], name: str, patience: float = 60.0) -> None:
        self.works: dict[int, dist.Work | None] = {}
        self.overlapped: list[str] = []
        self.faults: list[str] = []
        self.gated, self.patience = gated, patience
        self.running = "forward"
        self._name = name  # unlike that of other schedules
        self._store = dist.distributed_c10d._get_default_store().clone()

    def neighbour(self, block: int, ahead: int) -> int | None:
        """The block that is computed after this one (1) or before it (-1), if they wait."""
        found = block + ahead if self.running == "forward" else block - ahead
        return found if self.running in self.gated and 0 <= found < BLOCKS else None

    def gather(self, block: int, call: Callable[[], dist.Work | None]) -> dist.Work | None:
        before = self.neighbour(block, -1)
        if before is not None and dist.get_rank() == 1:
            computes = f"{self._name} {self.running} {before}"
            try:
                self._store.wait([computes], timedelta(seconds=self.patience))
            except dist.DistStoreError:
                self._give_up(f"rank 0 does not compute {before}")
        self.works[block] = call()
        return self.works[block]

    def compute(self, block: int) -> None:
        if dist.get_rank() == 0:
            self._store.set(f"{self._name} {self.running} {block}", "")
        after = self.neighbour(block, 1)
        if after is not None:
            work = self.works[after]  # it has begun
            if work is not None and not until(work.is_completed, self.patience):
                self._give_up(f"the gather of {after} does not end unless it is awaited")
            self.overlapped.append(f"{self.running} {after}")

    def _give_up(self, fault: str) -> None:
        self.faults.append(fault)
        self.patience = 0.1  # the test has failed


class Block(nn.Module):
    def __init__(self, schedule: Schedule, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.schedule, self.at = schedule, at

    def forward(self, x: torch.Tensor) -> Any:
        computes = partial(self.schedule.compute, self.at)
        computes()
        return OnTheWayBack.apply(self.linear(x), computes)  # type: ignore[no-untyped-call]


def model_on(schedule: Schedule) -> nn.Sequential:
    model = nn.Sequential(*(Block(schedule, at) for at in range(BLOCKS)))
    by_layer(model, reshard_after_forward=True)
    for block, following in pairwise(model):
        block.set_modules_to_forward_prefetch([following])
    return model


def watch(model: nn.Sequential) -> None:
    """Put what gathers each block's weights on the schedule."""
    for block in model:
        gather = block._get_fsdp_state()._fsdp_param_group._all_gather_comm

        class Noted(type(gather)):  # type: ignore[misc]
            def __init__(self, inner: Any, block: Block) -> None:
                self.inner, self.block = inner, block

            def allocate(self, *size: Any, **kind: Any) -> torch.Tensor:
                return self.inner.allocate(*size, **kind)

            def __call__(self, **of: Any) -> dist.Work | None:
                return self.block.schedule.gather(self.block.at, lambda: self.inner(**of))

        block.set_custom_all_gather(Noted(gather, block))


@on(2, *KEEP)
def test_the_next_blocks_gather_ends_while_the_current_one_computes(rank: int, keep: str) -> None:
    gathers_twice = keep in ("none", "redraw")
    gated = ("forward", "backward") if gathers_twice else ("forward",)
    schedule = Schedule(gated, f"keep={keep!r}")
    model = model_on(schedule)
    gw.attach(model, weights=WEIGHTS, options=gw.Options(keep=keep))
    watch(model)
    loss = model(torch.randn(8, 64)).square().mean()
    schedule.running = "backward"
    schedule.works.clear()
    loss.backward()
    assert not schedule.faults
    backward = ["backward 2", "backward 1", "backward 0"]
    forward = ["forward 1", "forward 2", "forward 3"]
    assert schedule.overlapped == forward + backward * gathers_twice


def test_fsdp2s_own_gathers_block(rank: int) -> None:
    """So the check above can fail: here rank 1 waits in vain for rank 0's compute."""
    schedule = Schedule(("forward",), "FSDP2", patience=0.2)
    model = model_on(schedule)
    watch(model)
    model(torch.randn(8, 64))
    assert ("rank 0 does not compute 0" in schedule.faults) == (rank == 1), schedule.faults
