"""The training run of one method on one rank under FSDP2: `bench train --sharded`.

`fully_shard` wraps every entry of a ModuleList (the blocks of a transformer), every other layer of
`LARGE` values or more, then the root. FSDP2's defaults hold: the root's weights are gathered once
per step, those of others twice. With `accumulate`, a step has several micro-batches: weights are
gathered in each, gradients are reduced after the last.

Evaluation gathers weights as a forward does, so it scores the weights that a method computes with.
Its bytes do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire_tools.bench.sharded.sharded_comms import TorchGather, TorchScatter
from gradwire_tools.bench.sharded.sharded_methods import LEARN_AT, ShardedMethod
from gradwire_tools.bench.tasks import Score, Task
from gradwire_tools.bench.train.method_run import MethodRun
from gradwire_tools.bench.train.methods import compiled
from gradwire_tools.bench.train.torch_hooks import Applied, Traffic, of_handle

LARGE = 1 << 16  # values of a layer that is a group of its own

_POLICY = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)


@dataclass(kw_only=True)
class ShardedRun(MethodRun):
    """State of one method's run with one seed.

    Attributes:
        replica: of the whole model, for evaluation.
        accumulate: micro-batches per step.
        learned: whether levels are learned.
    """

    replica: nn.Module
    accumulate: int = 1
    learned: bool = False

    @classmethod
    def start(  # type: ignore[override]
        cls, method: ShardedMethod, task: Task, seed: int, accumulate: int
    ) -> ShardedRun:
        """A new run of `method`; the initial weights are equal for every method.

        Raises:
            ConfigError: gradwire cannot attach it.
        """
        model = sharded(task.model(seed))
        applied = _applied(method, model)
        return cls(
            name=method.name, seed=seed, task=task, model=model, optimizer=task.optimizer(model),
            applied=applied, replica=task.model(seed), accumulate=accumulate,
            learned=method.learned,
        )  # fmt: skip

    def stepped(self) -> None:
        if self.learned and self.step + 1 in LEARN_AT:
            assert self.applied.handle is not None
            self.applied.handle.learn_levels()

    def evaluate(self) -> Score:
        """The score of the gathered weights, with rank 0's buffers; every rank evaluates a
        share."""
        before = self.sent()
        self._gather_into_replica()
        self.count_from(before)
        return self.score(self.replica)

    def ideal_step(self) -> float:
        self.close()
        self.applied = replace(self.applied, remove=lambda: None)
        for module in _groups(self.model):
            module.set_custom_all_gather(TorchGather(sends=False))
            module.set_custom_reduce_scatter(TorchScatter(sends=False))
        return self.timed_step()

    def model_state(self) -> dict[str, Any]:
        """This rank's shards."""
        moments = self.optimizer.state_dict()
        return {
            "model": {name: _local(t).clone() for name, t in self.model.state_dict().items()},
            "optimizer": moments | {"state": _each(moments["state"], _unwrapped)},
        }

    @torch.no_grad()
    def load_model(self, own: dict[str, Any], replicas: dict[str, Any]) -> None:
        for name, t in self.model.state_dict().items():
            _local(t).copy_(own["model"][name])
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

        def wrapped(index: int, value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            of = parameters[index]
            mesh, placements = of.device_mesh, of.placements
            return DTensor.from_local(
                value["shard"], mesh, placements, run_check=False, shape=of.shape,
                stride=of.stride(),
            )  # fmt: skip

        moments = own["optimizer"]
        self.optimizer.load_state_dict(moments | {"state": _each(moments["state"], wrapped)})

    def backward(self) -> None:
        for part in range(self.accumulate):
            self.model.set_requires_gradient_sync(part == self.accumulate - 1)
            number = self.step * self.accumulate + part
            batch = self.task.batch(self.seed, dist.get_rank(), number, dist.get_world_size())
            (self.task.loss(self.model, batch) / self.accumulate).backward()

    @torch.no_grad()
    def _gather_into_replica(self) -> None:
        whole = dict(self.replica.named_parameters())
        for prefix, module in self.model.named_modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                for name, p in self.model.get_submodule(prefix).named_parameters(prefix):
                    if not isinstance(p, DTensor):  # those of groups within are sharded
                        whole[name].copy_(p)
                module.reshard()
        for mine, of in zip(self.replica.buffers(), self.model.buffers(), strict=True):
            mine.copy_(of)


def sharded(model: nn.Module) -> nn.Module:
    """The model under FSDP2, over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in layers(model):
        fully_shard(module, mesh=mesh, mp_policy=_POLICY)
    fully_shard(model, mesh=mesh, mp_policy=_POLICY)
    return model


def layers(model: nn.Module) -> list[nn.Module]:
    """What is sharded by itself; tied weights are left to the root."""
    uses = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
                continue
            own = list(child.parameters(recurse=False))
            tied = any(uses[p] > 1 for p in own)
            if sum(p.numel() for p in own) >= LARGE and not tied:
                found.append(child)
            visit(child)

    visit(model)
    return found


def _groups(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _applied(method: ShardedMethod, model: nn.Module) -> Applied:
    """The method at work on a model. Gathers that gradwire leaves to torch are counted, too."""
    gather, scatter = TorchGather(), TorchScatter()
    if method.ratios is not None:
        gather.ratio, scatter.ratio = method.ratios
    elif not method.ours:
        gather, scatter = TorchGather(str(method.weights)), TorchScatter(str(method.gradients))
    for module in _groups(model):
        if method.weights is None or not method.ours:
            module.set_custom_all_gather(gather)
        if not method.ours:
            module.set_custom_reduce_scatter(scatter)
    if not method.ours:
        return Applied(
            lambda steps: Traffic(gather.wire_bytes + scatter.wire_bytes, None, gather.wire_bytes)
        )
    handle = compiled(
        gradwire.attach(model, method.gradients, weights=method.weights, **method.options)
    )

    def traffic(steps: int) -> Traffic:
        stats = handle.stats()
        weights = gather.wire_bytes + int(stats["weights_wire_bytes"])
        return Traffic(weights + int(stats["wire_bytes"]), None, weights)

    return replace(of_handle(handle), traffic=traffic)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _unwrapped(index: int, value: Any) -> Any:
    return {"shard": value.to_local().clone()} if isinstance(value, DTensor) else value


def _each(state: dict[int, dict[str, Any]], change: Any) -> dict[int, dict[str, Any]]:
    """An optimizer's state, every value changed by `change(index of parameter, value)`."""
    return {
        index: {name: change(index, value) for name, value in of.items()}
        for index, of in state.items()
    }
