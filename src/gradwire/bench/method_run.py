"""The training run of one method on one rank: model, optimizer, hook and clock.

The worker has one run per method and interleaves them, so that a temporary slowdown of the machine
affects all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench.methods import Applied, Method, Traffic
from gradwire.bench.tasks import Score, Task

_COUNTED = ("step", "step_seconds", "link_bytes", "last_loss", "parts")
_PARTS = ("kernel_seconds", "exposed_seconds", "steps")  # of `Handle.stats`


@dataclass
class MethodRun:
    """State of one method's run with one seed.

    Everything that a resumed run needs is in `state`.

    Attributes:
        step: steps trained.
        step_seconds: per step, from fetching the batch to the end of the optimizer's step.
        link_bytes: bytes that left this node's interface during steps; None without a lab.
        last_loss: this rank's training loss of the last step.
        parts: sums over measured steps of what `Handle.stats` has of `_PARTS`; empty for torch.
        scores: (loss, metric) of every evaluation, equal on all ranks.
        earlier: what a run sent before it was resumed, beyond what the method counts since.
    """

    name: str
    seed: int
    task: Task
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    applied: Applied
    step: int = 0
    step_seconds: list[float] = field(default_factory=list)
    link_bytes: int | None = None
    last_loss: float = float("nan")
    parts: dict[str, float] = field(default_factory=dict)
    scores: list[tuple[float, float]] = field(default_factory=list)
    earlier: int = 0

    @classmethod
    def start(cls, method: Method, task: Task, seed: int) -> MethodRun:
        """A new run of `method`; the initial weights are equal for every method and rank.

        Raises:
            ConfigError: the method's codec or options are unknown.
        """
        model = method.distribute(task.model(seed))
        momentum = 0.0 if method.replaces_momentum else None
        optimizer = task.optimizer(model.module, momentum)
        return cls(method.name, seed, task, model, optimizer, method.apply(model))

    def train(self, steps: int) -> None:
        """`steps` more steps."""
        for _ in range(steps):
            sent_before = interface_bytes()
            start = time.perf_counter()
            self._one_step()
            self.step_seconds.append(time.perf_counter() - start)
            sent_after = interface_bytes()
            if sent_before is not None and sent_after is not None:
                self.link_bytes = (self.link_bytes or 0) + sent_after - sent_before
            self.step += 1

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Adds what the steps within spend in kernels and in waiting to `parts`."""
        handle = self.applied.handle
        if handle is None:
            yield
            return
        before = handle.stats()
        yield
        after = handle.stats()
        for name in _PARTS:
            self.parts[name] = self.parts.get(name, 0.0) + after[name] - before[name]

    def mean_part(self, name: str) -> float | None:
        """One of `parts` per measured step; None without any."""
        steps = self.parts.get("steps")
        return self.parts[name] / steps if steps else None

    def state(self) -> dict[str, Any]:
        """This rank's state between two steps; rank 0's holds the replicas' model and optimizer."""
        own = {name: getattr(self, name) for name in _COUNTED}
        own["scores"] = [list(score) for score in self.scores]
        own |= {"wire_bytes": self.traffic().wire_bytes, "method": self.applied.state()}
        own["random"] = torch.get_rng_state()
        if dist.get_rank() == 0:
            own["model"] = self.model.module.state_dict()
            own["optimizer"] = self.optimizer.state_dict()
        return own

    def load(self, own: dict[str, Any], replicas: dict[str, Any]) -> None:
        """Continue where `state` was taken, to the bit.

        One step is trained first and undone: after it, DDP rebuilds its buckets, on which the order
        of torch's sums depends.

        Args:
            replicas: rank 0's state.
        """
        if own["step"]:
            self._one_step()
        self.model.module.load_state_dict(replicas["model"])
        self.optimizer.load_state_dict(replicas["optimizer"])
        self.applied.load(own["method"])
        for name in _COUNTED:
            setattr(self, name, own[name])
        self.scores = [(loss, metric) for loss, metric in own["scores"]]
        self.earlier = own["wire_bytes"] - self.applied.traffic(self.step).wire_bytes
        torch.set_rng_state(own["random"])

    def ideal_step(self) -> float:
        """Seconds of a step without communication. Call it after the last evaluation, since ranks
        diverge."""
        start = time.perf_counter()
        with self.model.no_sync():
            self._one_step()
        return time.perf_counter() - start

    def evaluate(self) -> Score:
        """The score on the validation data; every rank evaluates a share.

        Rank 0's buffers are broadcast first, as DDP does before each step, so that all ranks
        evaluate the same model.
        """
        model = self.model.module
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
        model.eval()
        sums = self.task.evaluate(model, dist.get_rank(), dist.get_world_size()).tensor()
        model.train()
        dist.all_reduce(sums)
        dist.broadcast(sums, 0)  # equal bits on all ranks, which decide by them when to stop
        score = Score.from_tensor(sums)
        self.scores.append((score.mean_loss, self.task.metric_of(score)))
        return score

    def traffic(self) -> Traffic:
        """Bytes and memory so far; memory since the last start."""
        since = self.applied.traffic(self.step)
        return replace(since, wire_bytes=self.earlier + since.wire_bytes)

    def close(self) -> None:
        """Release the method's resources."""
        self.applied.remove()

    def _one_step(self) -> None:
        factor = self.task.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        batch = self.task.batch(self.seed, dist.get_rank(), self.step, dist.get_world_size())
        loss = self.task.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last_loss = loss.item()


def interface_bytes() -> int | None:
    """Bytes that this node's network interface has sent; None if all ranks share loopback.

    The lab gives each node its own interface, named in GLOO_SOCKET_IFNAME.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if interface == "lo":
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            return int(counters.split()[8])  # the first eight count received traffic
    return None
