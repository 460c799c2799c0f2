"""The training run of one method on one rank: model, optimizer, method and clock.

The worker has one run per method and interleaves them, so that a temporary slowdown of the machine
affects all of them. Under FSDP2 a step may have several micro-batches: weights are gathered in
each, gradients are reduced after the last; with replicas (HSDP), gradients are reduced among the
shards in each, and between replicas after the last.

A step is timed from fetching its batch to the end of the optimizer's step. With cross_barrier a
step waits for the averages of the one before in its forward, so its time is from its own beginning
to that of the next step. At the end of a turn `settle` waits for what is late, in the time of the
last step: no other method, evaluation or network has any of it, and the seconds of a turn are those
of its steps. In a turn of one step each step waits for its own averages, as without cross_barrier;
from three on the median is the time of a step between two others.
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
from gradwire_tools.bench.train.applied import Applied
from gradwire_tools.bench.train.methods import Method
from gradwire_tools.bench.train.sharded import (
    ShardedMethod,
    TorchGather,
    TorchHop,
    TorchScatter,
)

LEARN_AT = (50, 200)  # steps after which levels are learned, of methods that learn them

_COUNTED = ("first", "step", "step_seconds", "link_bytes", "parts", "counted_from", "scores")
# of `Handle.stats`; `plan` counts its versions
_PARTS = ("kernel_seconds", "exposed_seconds", "steps", "plan", "raw_bytes", "wire_bytes")


@dataclass
class MethodRun:
    """State of one method's run with one seed.

    Everything that a resumed run needs is in `state`.
    """

    method: Method | ShardedMethod
    seed: int
    task: Task
    model: Any  # under DDP or FSDP2, as the method distributes it
    optimizer: torch.optim.Optimizer
    applied: Applied
    replica: nn.Module | None = None  # under FSDP2, a whole model, for evaluation
    accumulate: int = 1  # micro-batches per step
    first: int = 0  # the step at which this run began: not 0 where it goes on after one that ended
    step: int = 0  # how many are trained
    # Since `first`; see above.
    step_seconds: list[float] = field(default_factory=list)
    link_bytes: int | None = None  # that left this node's interface in steps; None without a lab
    # Sums over measured steps of what `Handle.stats` has of `_PARTS`; empty for torch's methods.
    parts: dict[str, float] = field(default_factory=dict)
    # (loss, metric) of every evaluation, equal on all ranks
    scores: list[tuple[float, float]] = field(default_factory=list)
    counted_from: int = 0  # bytes sent in the first steps, whose times are not averaged
    # By key, bytes to add to what the method counts: of a run before it was resumed, less what does
    # not belong to training.
    apart: dict[str, int] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        method: Method | ShardedMethod,
        task: Task,
        seed: int,
        accumulate: int = 1,
        device: str = "cpu",
    ) -> MethodRun:
        """A new run of `method`; the initial weights are equal for every method and rank.

        Raises:
            ConfigError: the method's codec or options are unknown, or gradwire cannot attach it.
        """
        model: Any = method.distribute(task.model(seed).to(device))
        optimizer = method.optimizer(task, model)
        replica = task.model(seed).to(device) if isinstance(method, ShardedMethod) else None
        applied = method.apply(model, optimizer)
        return cls(method, seed, task, model, optimizer, applied, replica, accumulate)

    @property
    def name(self) -> str:
        return self.method.name

    def train(self, steps: int) -> None:
        """`steps` more steps. Those that are thrown away take time, and are not counted."""
        for _ in range(steps):
            self.step_seconds.append(0.0 if self.step_seconds else self.applied.setup_seconds)
            with self._counted():
                self.one_step()
                while not self.applied.stepped():
                    self.one_step()
            self.step += 1

    def settle(self) -> None:
        """Wait for averages that steps have left late, in the time of the last one."""
        if self.method.cross_barrier and self.step_seconds:
            with self._counted():
                for parameter in self.model.parameters():
                    parameter.detach()  # which waits, as any use of it does
        elif self.applied.settle is not None and self.step_seconds:
            with self._counted():
                self.applied.settle()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Adds what is done within to the last step's seconds, and to the interface's bytes."""
        sent, start = interface_bytes(), time.perf_counter()
        yield
        self.step_seconds[-1] += time.perf_counter() - start
        if sent is not None:
            self.link_bytes = (self.link_bytes or 0) + (interface_bytes() or 0) - sent

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
            last = part == self.accumulate - 1
            if isinstance(self.method, ShardedMethod) and self.method.shards is not None:
                self.model.set_requires_all_reduce(last)
            elif self.replica is not None:
                self.model.set_requires_gradient_sync(last)
            number = self.step * self.accumulate + part
            batch = self.task.batch(self.seed, dist.get_rank(), number, dist.get_world_size())
            (self.task.loss(self.model, batch) / self.accumulate).backward()

    def ideal_step(self) -> float:
        """Seconds of a step without communication. Call it after the last evaluation, since ranks
        diverge."""
        if self.method.meets:
            self.applied.remove()
        if self.replica is not None:
            self.applied.remove()
            nothing = TorchGather(sends=False), TorchScatter(sends=False), TorchHop(sends=False)
            sharded.communicate(self.model, *nothing)
        with nullcontext() if self.replica is not None else self.model.no_sync():
            start = time.perf_counter()
            self.one_step()
            return time.perf_counter() - start

    def _spent(self) -> dict[str, float]:
        handle = self.applied.handle
        stats = {} if handle is None else handle.stats()
        return {name: stats[name] for name in _PARTS if stats}

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Adds what the steps within spend in kernels and in waiting to `parts`."""
        before = self._spent()
        yield
        for name, value in self._spent().items():
            self.parts[name] = self.parts.get(name, 0.0) + value - before[name]

    def means(self) -> dict[str, Any]:
        """Of measured steps: seconds per step in kernels and in waiting, uncompressed bytes of
        gradients over those sent, and changes of plan by a policy; None for torch's methods."""

        def mean(name: str, per: str) -> float | None:
            return self.parts[name] / self.parts[per] if self.parts.get(per) else None

        return {
            "kernel_seconds": mean("kernel_seconds", "steps"),
            "exposed_seconds": mean("exposed_seconds", "steps"),
            "mean_ratio": mean("raw_bytes", "wire_bytes"),
            "plan_changes": int(self.parts["plan"]) if self.parts else None,
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
        if self.replica is not None or self.method.meets or dist.get_rank() == 0:
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
        saved = own if self.replica is not None or self.method.meets else replicas
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
        found = self.applied.traffic(self.step)
        return found | {key: found[key] + more for key, more in self.apart.items()}

    def count_from(self, traffic: dict[str, Any]) -> None:
        """Have the bytes of an earlier `traffic` be those of now, and count on from them."""
        now = self.traffic()
        of_bytes = [key for key in now if key.endswith("wire_bytes")]
        self.apart = {k: self.apart.get(k, 0) + traffic[k] - now[k] for k in of_bytes}


def interface_bytes() -> int | None:
    """Bytes that this node's network interface has sent; None if all ranks share loopback.

    The lab gives each node its own interface, named in GLOO_SOCKET_IFNAME.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if interface == "lo":
        return None
    lines = Path("/proc/self/net/dev").read_text().replace(":", " ").splitlines()
    counters = {name: numbers for name, *numbers in map(str.split, lines)}
    found = counters.get(interface)
    return None if found is None else int(found[8])  # the first eight count received traffic
