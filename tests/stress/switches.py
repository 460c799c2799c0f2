"""Random switches of plans while a DDP module trains, on processes; in some runs a rank dies.

Every rank asks for the same updates in the same order, each at a step of its own. Then
- no pass has two plans: the versions that ranks had in force, pass by pass, are the same;
- replicas are identical; no rank raises;
- where a rank dies, every survivor ends in a TransportError that names it;
- a state saved on the way resumes to the same bits, as often as it is loaded.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ends import End, ends
from stress.slow import slow_groups
from stress.worlds import of_transport
from training import backward, flat, mlp

TIMEOUT_S = 60.0
AFTER = 6  # steps of a resumed run

# The updates to draw from; each leaves other settings unchanged.
CHANGES: list[dict[str, Any]] = [
    {"codec": "qsgd", "bits": 2},
    {"codec": "qsgd", "bits": 4},
    {"codec": "qsgd", "bits": 8, "block": 64},
    {"codec": "topk", "density": 0.1},
    {"codec": "powersgd", "rank": 2},
    {"codec": "artopk", "density": 0.05},
    {"codec": None},
    {"codecs": {"2.weight": "terngrad"}},
    {"codecs": {"2.weight": None}},
    {"include": ["*.bias"]},
    {"include": []},
    {"options": gw.Options(algorithm="ring")},
    {"options": gw.Options()},
    {"options": gw.Options(algorithm="tree")},
    {"options": gw.Options(coalesce_bytes=0)},
    {"options": gw.Options(coalesce_bytes=1 << 18)},
    {"error_feedback": True},
    {"error_feedback": False},
]


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        updates: how many are requested, spread over the steps.
        dies: the rank that dies, at step `at`; None: none.
    """

    seed: int
    ranks: int
    steps: int
    updates: int
    dies: int | None = None
    at: int = 0

    @staticmethod
    def of(seed: int, ranks: int, steps: int, updates: int, kills: bool = False) -> Run:
        draw = random.Random(f"switches {seed} {ranks}")
        dies = draw.randrange(ranks) if kills else None
        return Run(seed, ranks, steps, updates, dies, draw.randrange(steps // 2, steps))

    def changes(self) -> list[dict[str, Any]]:
        draw = random.Random(f"changes {self.seed}")
        return [draw.choice(CHANGES) for _ in range(self.updates)]

    def asked(self, rank: int) -> dict[int, list[int]]:
        """Step -> the updates that `rank` requests at it, in order."""
        draw = random.Random(f"asked {self.seed} {rank}")
        every = max(1, self.steps // max(self.updates, 1))
        found: dict[int, list[int]] = {}
        at = 0
        for update in range(self.updates):
            at = max(at, update * every + draw.randrange(3 * every))
            found.setdefault(min(at, self.steps - 1), []).append(update)
        return found


@dataclass(frozen=True)
class Report:
    """What one rank saw.

    Attributes:
        versions: in force, pass by pass.
        bits: digest of the parameters at the end.
        resumed: digests after the same state was loaded twice and trained on.
    """

    versions: list[int]
    bits: str
    resumed: list[str]


def train(model: DDP, number: int) -> None:
    """One step."""
    made = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    backward(model, torch.randn(8, 32, generator=made))
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.02 * p.grad


def digest(model: DDP) -> str:
    return str(hash(flat(model).numpy().tobytes()))


def body(rank: int, run: Run) -> Report:
    draw = random.Random(f"delays {run.seed} {rank}")
    slow_groups(f"{run.seed} {rank}", sends=0.01)
    model = DDP(mlp(32, 64, 64, 8), bucket_cap_mb=0.01)
    handle = gw.attach(model, bits=4, options=gw.Options(coalesce_bytes=0))
    changes, asked = run.changes(), run.asked(rank)
    versions = []
    for number in range(run.steps):
        if (rank, number) == (run.dies, run.at):
            os._exit(1)
        for update in asked.get(number, ()):
            handle.update(**changes[update])
        if draw.random() < 0.1:
            time.sleep(draw.uniform(0, 0.02))
        train(model, number)
        versions.append(handle.plan.version)
    number = run.steps
    while handle.plan.version < run.updates:  # alike on all ranks, pass by pass
        train(model, number)
        versions.append(handle.plan.version)
        number += 1
        time.sleep(0.01)
    bits = digest(model)
    return Report(versions, bits, [resumed(model, handle, number) for _ in range(2)])


def resumed(model: DDP, handle: gw.Handle, number: int) -> str:
    """The parameters after some more steps from here, which leave things as they were."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = handle.state_dict()
    for more in range(AFTER):
        train(model, number + more)
    found = digest(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    handle.load_state_dict(state)
    return found


def found_of(run: Run, shm: bool) -> list[End]:
    return ends(
        run.ranks, body, run, timeout=TIMEOUT_S, deadline=120 + run.steps,
        environment={**of_transport(shm), "PYTHONHASHSEED": "0"},
    )  # fmt: skip


def wrong(run: Run, found: list[End]) -> str | None:
    """What is wrong with a run, or None."""
    if run.dies is not None:
        for rank, end in enumerate(found):
            if rank == run.dies:
                continue
            if end.error != "TransportError" or end.peer != run.dies:
                return f"rank {rank} should name rank {run.dies}, which died: {end}"
        return None
    for rank, end in enumerate(found):
        if end.error is not None:
            return f"rank {rank}: {end}"
    reports: list[Report] = [end.value for end in found]
    for number, versions in enumerate(zip(*(r.versions for r in reports), strict=True)):
        if len(set(versions)) > 1:
            return f"pass {number} had the plans {versions}"
    if len({r.bits for r in reports}) > 1:
        return "replicas differ"
    resumed = {digest for r in reports for digest in r.resumed}
    if len(resumed) > 1:
        return f"a resumed run has other bits: {[r.resumed for r in reports]}"
    return None
