"""Flexible: density and collective follow training and network; a checkpoint in memory."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scenario import unlike
from torch import nn

import gradwire as gw
from gradwire.planner.links import Links
from ranks import on, refuses
from rooms.flexible import MemoryCheckpoint
from rooms.flexible import flexible as flexible_module
from training import alike


class Batches:
    """A position in the data, with random numbers of three kinds beside it."""

    def __init__(self) -> None:
        self.position = 0
        self.seen: list[int] = []

    def next(self) -> torch.Tensor:
        self.seen.append(self.position)
        generator = torch.Generator().manual_seed(100 * self.position + dist.get_rank())
        self.position += 1
        noise = torch.randn(16, 32) + random.random() + float(np.random.rand())
        return torch.randn(16, 32, generator=generator) + 0.1 * noise

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def parts(codec: str = "artopk:density=0.1", group: Any = None) -> Any:
    torch.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    random.seed(dist.get_rank())
    model = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32)
    )
    made = nn.parallel.DistributedDataParallel(model, process_group=group or dist.new_group())
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    return gw.attach(made, codec), made, optimizer, Batches()


def train_step(model: Any, optimizer: Any, batches: Batches) -> None:
    optimizer.zero_grad()
    model(batches.next()).square().mean().backward()
    optimizer.step()


def all_of(handle: Any, model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Weights, buffers, moments and residuals."""
    found = [*model.parameters(), *model.buffers()]
    found += [v for state in optimizer.state.values() for v in state.values()]
    saved = handle.state_dict()["aggregators"]
    found += [t for state in saved.values() for t in state.values()]
    return [t.detach().clone() for t in found]


@on(2, False, True)
def test_training_goes_on_bit_for_bit_after_steps_that_are_thrown_away(
    rank: int, leave_out: bool
) -> None:
    """Not where the position in the data is left out."""
    handle, model, optimizer, batches = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    ends = []
    kept: Any = None
    for trial in (False, True):
        if trial:
            kept.restore()
            for _ in range(8):
                train_step(model, optimizer, batches)
                schedule.step()
            kept.restore()
        else:
            for _ in range(3):
                train_step(model, optimizer, batches)
                schedule.step()
            stateful = (schedule,) if leave_out else (batches, schedule)
            kept = MemoryCheckpoint(handle, model, optimizer, stateful)
        for _ in range(4):
            train_step(model, optimizer, batches)
            schedule.step()
        ends.append(all_of(handle, model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)) != leave_out


class KnownLinks:
    """In place of a watch: links that a test sets."""

    newest: Links | None = None

    def __init__(self, comm: Any, links: Links, share: float) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def links(alpha: float, beta: float) -> Links:
    return Links(((0, alpha), (alpha, 0)), ((0, beta), (beta, 0)))


def test_it_follows_the_network_and_the_gain(rank: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(flexible_module, "LinkWatch", KnownLinks)
        monkeypatch.setattr(KnownLinks, "newest", links(1e-3, 1e-8))
        handle, model, optimizer, batches = parts()
        triggers = gw.flexible.Triggers(check=4, rest=24, gain=1e-6)
        made = gw.Flexible(
            handle, model, optimizer, (batches,), (0.3, 0.1), 3, triggers, seconds=0.2
        )  # fmt: skip
        counted = []
        while made.steps < 12:
            train_step(model, optimizer, batches)
            counted.append(made.step())
        assert handle.plan.parameters[0].inner.density == made.choice.density
        # Batches that count are those of a training without trials.
        used = [place for place, counts in zip(batches.seen, counted, strict=True) if counts]
        assert used == list(range(12))
        assert counted[0]
        assert counted.count(False) >= 2 * (3 + 1) + 1
        first, start = made.choice, len(made.history)
        # Latency that makes fewer steps pay: another collective.
        KnownLinks.newest = links(1.0, 1e-12)
        while made.steps < 30 and len(made.history) == start:
            train_step(model, optimizer, batches)
            assert made.step()
        second = made.choice
        assert made.steps < 40
        # Any gain is a change, once candidates have rested.
        while made.steps < 80 and len(made.history) < start + 3:
            train_step(model, optimizer, batches)
            made.step()
        lines = [note["line"] for note in made.history]
        assert alike(lines)
        assert not unlike(dict(model.named_parameters()))
        made.close()
        assert made._watch.closed
        refuses("", made.step)
        handle.detach()
    assert lines[0] == "the start: tries 2 densities, 3 steps each"
    assert "gains by density 0.3: " in lines[1]
    assert lines[1].endswith(f"chooses {first}")
    assert lines[2].startswith(
        "the links have changed from 1 ms and 800 Mbit/s to 1e+03 ms and 8e+06 Mbit/s: searches"
    )
    assert lines[2].endswith(str(second))
    assert "by all_gather" in str(second)
    assert lines[3].startswith("the gain has changed from ")
    assert len(lines) == 5


def test_a_trial_that_is_closed_goes_back(rank: int) -> None:
    handle, model, optimizer, batches = parts()
    made = gw.Flexible(handle, model, optimizer, (batches,), (0.3, 0.1), 3, seconds=0.2)
    train_step(model, optimizer, batches)
    before = all_of(handle, model, optimizer)
    assert made.step()
    for _ in range(4):
        train_step(model, optimizer, batches)
        assert not made.step()
    made.close()
    made.close()
    assert not made._watch.running
    after = all_of(handle, model, optimizer)
    assert not made.trying
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_makes_no_sense_is_refused(rank: int) -> None:
    handle, model, optimizer, _ = parts("qsgd:bits=4")
    said = "attach with one codec, artopk or lwtopk"
    refuses(said, lambda: gw.Flexible(handle, model, optimizer))
    handle.detach()
    flexible = partial(gw.Flexible, *parts()[:3])
    for said, call in (
        ("has no state_dict", lambda: flexible((object(),))),
        ("two candidate densities", lambda: flexible(densities=(0.1,))),
        ("density=2", lambda: flexible(densities=(0.1, 2.0))),
        ("steps=0", lambda: flexible(steps=0)),
        ("check=0", lambda: gw.flexible.Triggers(check=0)),
    ):
        refuses(said, call)


def test_one_rank_has_nothing_to_choose(rank: int) -> None:
    mine, _ = dist.new_subgroups(1)
    handle, model, optimizer, batches = parts(group=mine)
    made = gw.Flexible(handle, model, optimizer, (batches,))
    train_step(model, optimizer, batches)
    assert made.step()
    made.close()
    (note,) = made.history
    assert note["line"] == "one rank sends nothing: there is nothing to choose"
