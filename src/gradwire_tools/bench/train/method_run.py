"""The training run of one method on one rank: model, optimizer, method and clock.

The worker has one run per method and interleaves them, so that a temporary slowdown of the machine
affects all of them. Under FSDP2 a step may have several micro-batches: weights are gathered in
each, gradients are reduced after the last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwire_tools.bench.tasks import Score, Task
from gradwire_tools.bench.train import sharded
from gradwire_tools.bench.train.hooks import Applied, TorchGather, TorchScatter
from gradwire_tools.bench.train.methods import Method
from gradwire_tools.bench.train.sharded import ShardedMethod

LEARN_AT = (50, 200)  # steps after which levels are learned, of methods that learn them

_COUNTED = ("first", "step", "step_seconds", "link_bytes", "parts", "counted_from", "scores")
# of `Handle.stats`; `plan` counts its versions
_PARTS = ("kernel_seconds", "exposed_seconds", "steps", "plan", "raw_bytes", "wire_bytes")


@dataclass
class MethodRun:
    """State of one method's run with one seed.

    Everything that a resumed run needs is in `state`.

    Attributes:
        model: under DDP or FSDP2, as the method distributes it.
        replica: under FSDP2, a whole model, for evaluation.
        accumulate: micro-batches per step.
        first: the step at which this run began: not 0 where it goes on after one that has ended.
        step: steps trained.
        step_seconds: per step since `first`, from fetching the batch to the end of the optimizer's
            step.
        link_bytes: bytes that left this node's interface during steps; None without a lab.
        parts: sums over measured steps of what `Handle.stats` has of `_PARTS`; empty for torch.
        scores: (loss, metric) of every evaluation, equal on all ranks.
        counted_from: bytes sent in the first steps, whose times are not averaged.
        apart: by key, bytes to add to what the method counts: of a run before it was resumed, less
            what does not belong to training.
    """

    method: Method | ShardedMethod
    seed: int
    task: Task
    model: Any
    optimizer: torch.optim.Optimizer
    applied: Applied
    replica: nn.Module | None = None
    accumulate: int = 1
    first: int = 0
    step: int = 0
    step_seconds: list[float] = field(default_factory=list)
    link_bytes: int | None = None
    parts: dict[str, float] = field(default_factory=dict)
    scores: list[tuple[float, float]] = field(default_factory=list)
    counted_from: int = 0
    apart: dict[str, int] = field(default_factory=dict)

    @classmethod
    def start(
        cls, method: Method | ShardedMethod, task: Task, seed: int, accumulate: int = 1
    ) -> MethodRun:
        """A new run of `method`; the initial weights are equal for every method and rank.

        Raises:
            ConfigError: the method's codec or options are unknown, or gradwire cannot attach it.
        """
        model: Any = method.distribute(task.model(seed))
        optimizer = task.optimizer(model, 0.0 if method.replaces_momentum else None)
        replica = task.model(seed) if isinstance(method, ShardedMethod) else None
        applied = method.apply(model, optimizer)
        return cls(method, seed, task, model, optimizer, applied, replica, accumulate)

    @property
    def name(self) -> str:
        return self.method.name

    def train(self, steps: int) -> None:
        """`steps` more steps."""
        for _ in range(steps):
            sent_before = interface_bytes()
            setup = 0.0 if self.step_seconds else self.applied.setup_seconds
            self.step_seconds.append(setup + self.timed_step())
            sent_after = interface_bytes()
            if sent_before is not None and sent_after is not None:
                self.link_bytes = (self.link_bytes or 0) + sent_after - sent_before
            self.step += 1

    def timed_step(self) -> float:
        """Take one step of training; its seconds, with those of steps that are thrown away."""
        start = time.perf_counter()
        self.one_step()
        while not self.applied.stepped():
            self.one_step()
        return time.perf_counter() - start

    def one_step(self) -> None:
        """Take one step, which is not counted."""
        self.task.set_learning_rate(self.optimizer, self.step)
        self.backward()
        self.optimizer.step()
        if self.method.learned and self.step + 1 in LEARN_AT:
            assert self.applied.handle is not None
            self.applied.handle.learn_levels()  # while there are gradients
        self.optimizer.zero_grad()

    def backward(self) -> None:
        """The gradients of one step, averaged."""
        for part in range(self.accumulate):
            if self.replica is not None:
                self.model.set_requires_gradient_sync(part == self.accumulate - 1)
            number = self.step * self.accumulate + part
            batch = self.task.batch(self.seed, dist.get_rank(), number, dist.get_world_size())
            (self.task.loss(self.model, batch) / self.accumulate).backward()

    def ideal_step(self) -> float:
        """Seconds of a step without communication. Call it after the last evaluation, since ranks
        diverge."""
        if self.replica is not None:
            self.close()
            sharded.communicate(self.model, TorchGather(sends=False), TorchScatter(sends=False))
        with nullcontext() if self.replica is not None else self.model.no_sync():
            start = time.perf_counter()
            self.one_step()
            return time.perf_counter() - start

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

    def means(self) -> dict[str, Any]:
        """Of measured steps: seconds per step in kernels and in waiting, uncompressed bytes of
        gradients over those sent, and changes of plan by a policy; None for torch's methods."""
        of = self.parts
        return {
            "kernel_seconds": of["kernel_seconds"] / of["steps"] if of.get("steps") else None,
            "exposed_seconds": of["exposed_seconds"] / of["steps"] if of.get("steps") else None,
            "mean_ratio": of["raw_bytes"] / of["wire_bytes"] if of.get("wire_bytes") else None,
            "plan_changes": int(of["plan"]) if of else None,
        }

    def decisions(self) -> list[dict[str, Any]]:
        """What controllers have decided, in order: step, line, and tried, where automatic mode has
        tried settings."""
        handle, flexible = self.applied.handle, self.applied.flexible
        found = [] if handle is None else handle.history()
        found = found + ([] if flexible is None else flexible.history)
        told = ("step", "line", "tried")
        kept: list[dict[str, Any]] = [{key: r[key] for key in told if key in r} for r in found]
        return sorted(kept, key=lambda row: int(row["step"]))

    def evaluate(self) -> Score:
        """The score on the validation data; every rank evaluates a share.

        Under FSDP2 weights are gathered as a forward does, so the weights that the method computes
        with are scored; these bytes do not count.
        """
        model = self.model.module if self.replica is None else self._gathered(self.replica)
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # as DDP does before each step
        model.eval()
        mine = self.task.evaluate(model, dist.get_rank(), dist.get_world_size())
        sums = torch.tensor(astuple(mine), dtype=torch.float64)
        model.train()
        dist.all_reduce(sums)
        dist.broadcast(sums, 0)  # equal bits on all ranks, which decide by them when to stop
        score = Score(*sums.tolist())
        self.scores.append((score.mean_loss, self.task.metric_of(score)))
        return score

    @torch.no_grad()
    def _gathered(self, replica: nn.Module) -> nn.Module:
        """The replica, with the weights as a forward gathers them."""
        before, whole = self.traffic(), dict(replica.named_parameters())
        for prefix, module in sharded.groups(self.model):
            module.unshard()
            for name, p in self.model.get_submodule(prefix).named_parameters(prefix):
                if not isinstance(p, DTensor):  # those of groups within are sharded
                    whole[name].copy_(p)
            module.reshard()
        for mine, of in zip(replica.buffers(), self.model.buffers(), strict=True):
            mine.copy_(of)
        self.count_from(before)
        return replica

    def state(self) -> dict[str, Any]:
        """This rank's state between two steps; under DDP, rank 0's has model and optimizer."""
        own = {name: getattr(self, name) for name in _COUNTED}
        own |= {"sent": self.traffic(), "method": self.applied.state()}
        own["random"] = torch.get_rng_state()
        if self.replica is not None or dist.get_rank() == 0:
            own["trained"] = tree_map_only(DTensor, DTensor.to_local, self._trained())
        return own

    @torch.no_grad()
    def load(self, own: dict[str, Any], replicas: dict[str, Any]) -> None:
        """Continue where `state` was taken, to the bit.

        One step is trained first and undone: after it the optimizer has its moments, and DDP has
        rebuilt its buckets, on which the order of torch's sums depends.

        Args:
            replicas: rank 0's state.
        """
        if own["step"]:
            with torch.enable_grad():
                self.one_step()
        saved = replicas if self.replica is None else own
        mine = tree_map_only(DTensor, DTensor.to_local, self._trained())
        for value, of in zip(tree_leaves(mine), tree_leaves(saved["trained"]), strict=True):
            if isinstance(value, torch.Tensor):
                value.copy_(of)
        self.applied.load(own["method"])
        for name in _COUNTED:
            setattr(self, name, own[name])
        self.count_from(own["sent"])
        torch.set_rng_state(own["random"])

    def _trained(self) -> dict[str, Any]:
        """Whatever of model and optimizer this rank holds."""
        module = self.model.module if self.replica is None else self.model
        return {"model": module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def go_on(self, own: dict[str, Any], replicas: dict[str, Any]) -> None:
        """Begin where another run has ended: `own` and `replicas` as in `load`. Of what it has
        counted only its changes of plan go on."""
        self.load(own, replicas)
        self.first, self.step_seconds = self.step, []
        self.parts = {"plan": self.parts["plan"]} if self.parts else {}

    def traffic(self) -> dict[str, Any]:
        """What rows have of bytes and memory, so far; memory since the last start."""
        found = self.applied.traffic(self.step).keys()
        return {k: n if n is None else n + self.apart.get(k, 0) for k, n in found.items()}

    def count_from(self, traffic: dict[str, Any]) -> None:
        """Have the bytes of an earlier `traffic` be those of now, and count on from them."""
        now = self.traffic()
        of_bytes = [key for key in now if key.endswith("wire_bytes")]
        self.apart = {k: self.apart.get(k, 0) + traffic[k] - now[k] for k in of_bytes}

    def close(self) -> None:
        """Release the method's resources."""
        self.applied.remove()


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
