"""What tests of DDP and FSDP2 are made of: models, ways to wrap them, scripts, and checks.

`Model` has many kinds of parameters; `layers` have gradients of other sizes, for policies.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import gradwire as gw
from gradwire.lang import layout
from rooms.decide import Decider
from rooms.handles import Switch
from training import everywhere

# Codecs of weights. The tests' weights are small: patterns ask for them by name.
ALL = {"*.weight": "randomshift:bits=8", "embedding": "randomshift:bits=8"}
OFTEN = gw.Replan(every=6, first=4, average=2, share=1.0)
FOUR = "qsgd:bits=4:block=1024"  # under DDP the kernels that FSDP2 has by default, too
MATRICES = ("0.weight", "2.weight", "4.weight")  # of layers()

# ---- models


class Model(nn.Module):
    """Tied weights, a frozen layer, a parameter unused in some steps, few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(5, 30))  # fewer rows than some world sizes
        self.first = nn.Linear(30, 67)
        self.frozen = nn.Linear(67, 67).requires_grad_(False)
        self.second = nn.Linear(67, 30)
        self.spare = nn.Linear(30, 30)
        self.again = nn.Linear(30, 5, bias=False)
        self.again.weight = self.embedding  # both in the root's group

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        x = x @ self.embedding.T @ self.embedding
        x = self.second(self.frozen(self.first(x).relu()).relu())
        if spare:
            x = x + self.spare(x)
        return self.again(x)


class Scaled(nn.Linear):
    """A layer whose gradients are `scale` times as large as its neighbours'."""

    def __init__(self, wide: int, high: int, scale: float) -> None:
        super().__init__(wide, high)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight * self.scale - (self.scale - 1) * self.weight.detach()
        return nn.functional.linear(x, weight, self.bias)


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        Scaled(64, 128, 100.0), nn.ReLU(), Scaled(128, 256, 1.0), nn.ReLU(), Scaled(256, 64, 0.01)
    )


# ---- wraps


def sharded(policy: MixedPrecisionPolicy | None = None, **options: Any) -> Model:
    model = Model()
    how = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), **options}
    if policy is not None:
        how["mp_policy"] = policy
    for module in (model.first, model.frozen, model.spare, model):
        fully_shard(module, **how)
    return model


def own_mesh() -> DeviceMesh:
    """Handles of one group draw different random numbers; those of several, the same."""
    return DeviceMesh.from_group(dist.new_group(), "cpu")


def by_layer(model: Any, **how: Any) -> Any:
    """A group of each layer, and of the module; over a mesh of its own unless `how` has one."""
    how = {"mesh": own_mesh(), **how}
    for module in (*model.children(), model):
        fully_shard(module, **how)
    return model


def replicated(replicas: int) -> DeviceMesh:
    """A mesh of all ranks, for HSDP."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))


def replicas_of_shards(replicas: int, **how: Any) -> Any:
    """By HSDP; one: by FSDP2."""
    return sharded(**how, **({"mesh": replicated(replicas)} if replicas > 1 else {}))


def model_of(kind: str, group: Any = None, replicas: int = 2) -> Any:
    """Layers under "ddp" or "fsdp2", in a group of their own unless given; or under "hsdp"."""
    if kind == "hsdp":
        return fully_shard(layers(), mesh=replicated(replicas))
    group = group or dist.new_group()
    if kind == "fsdp2":
        return fully_shard(layers(), mesh=DeviceMesh.from_group(group, "cpu"))
    return nn.parallel.DistributedDataParallel(layers(), process_group=group)


# ---- scripts

Gradients = Mapping[str, torch.Tensor | None]


def batch(step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 30, generator=made)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Each parameter's, of this rank's shard."""
    return {
        name: None if p.grad is None else p.grad.to_local().clone()
        for name, p in model.named_parameters()
    }


def backward(model: nn.Module, step: int, spare: bool = False) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(batch(step), spare=spare).square().mean().backward()
    return gradients(model)


def steps(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Losses."""
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = model(batch(step), spare=True).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The cheapest optimizer for many small DTensors."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)


def train(model: Any, count: int) -> list[float]:
    """Losses."""
    return steps(model, sgd(model), 0, count)


def passes(model: Any, first: int, last: int) -> None:
    """Of layers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(first, last):
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(16, 64, generator=made)).square().mean().backward()
        optimizer.step()


def until_decided(model: Any, handle: Any, count: int, version: int) -> None:
    """Train until so many decisions have been made on every rank, and a plan is in force. After
    each pass, wait for the decision that it began."""
    for step in range(200):
        passes(model, step, step + 1)
        handle._reductions.runner.wait()
        decided = len(handle._reductions.adaptation.history) - count
        seen = torch.tensor([decided, handle.plan.version - version])
        dist.all_reduce(seen, dist.ReduceOp.MIN)
        if seen.min() >= 0:
            return
    raise AssertionError("no decision came")


@contextlib.contextmanager
def held(before: Callable[[], Any] = int, after: Callable[[], Any] = int) -> Iterator[None]:
    """In the background this rank calls `before` before it makes tables, and `after` once it has
    prepared a plan, of which its switch does not know yet."""
    make, prepare = Decider._tables, Switch._prepare

    def held_tables(self: Any, window: Any) -> Any:
        before()
        return make(self, window)

    def held_prepare(self: Any, plan: Any) -> None:
        prepare(self, plan)
        after()

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(Decider, "_tables", held_tables)
        monkey.setattr(Switch, "_prepare", held_prepare)
        yield


def prepared(handle: Any, **changes: Any) -> Any:
    """An update, which all ranks have prepared."""
    update = handle.update(**changes)
    update.wait(60)
    everywhere("prepared")
    return update


# ---- weights


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the whole weights, as a forward gathers them."""
    found, names = {}, {p: name for name, p in model.named_parameters()}
    for module in model.modules():
        group = isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group
        if group:  # has parameters of its own
            of_group = group.fsdp_params
            named = [names[p.sharded_param] for p in of_group]
            module.unshard()
            for name, p in zip(named, of_group, strict=True):
                found[name] = p._unsharded_param.detach().clone()
            module.reshard()
    return found


def exact(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the whole weights, as the optimizer has them."""
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def shards(model: nn.Module) -> torch.Tensor:
    """Of all parameters, as the optimizer has them."""
    return torch.cat([p.to_local().detach().flatten() for p in model.parameters()])


def message_bytes(model: nn.Module, codec_of: Any, without: Collection[str] = ()) -> int:
    """What this rank sends of its weights to each other rank, by the formula.

    Args:
        codec_of: by the name of a parameter; None: it is sent as it is.
        without: groups that are not sent.
    """
    payloads: dict[str, int] = {}
    for name, p in model.named_parameters():
        own, codec = p.to_local().numel(), codec_of(name)
        group = name.split(".")[0] if name.startswith(("first", "frozen", "spare")) else ""
        if group in without:
            continue
        payloads.setdefault(group, 0)
        payloads[group] += 4 * own if codec is None else layout(codec).nbytes(own)
    # A message has a header of 48 bytes, and begins at a multiple of 16 bytes.
    return sum(-(-(48 + n) // 16) * 16 for n in payloads.values())


# ---- checks


def methods(handle: Any) -> dict[str, str]:
    """Those in force, by parameter."""
    return {p.name: str(p.inner) for p in handle.plan.parameters}


def same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or torch.equal(a, b)


def digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.sha1(values.numpy().tobytes()).hexdigest()


def unlike(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not the same, bit for bit, on all ranks."""
    mine = {name: digest(tensor) for name, tensor in tensors.items()}
    every = everywhere(mine)
    assert all(list(one) == list(mine) for one in every)
    return [name for name in mine if len({one[name] for one in every}) > 1]


def assert_as_asked(
    expected: Gradients,
    found: Gradients,
    compressed: Collection[str],
    near: float = 0.6,
    close: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Of compressed parameters gradients are near FSDP2's, others are the same, bit for bit, or but
    for relative and absolute differences."""
    assert list(expected) == list(found)
    for name, gradient in expected.items():
        if gradient is None or not gradient.numel():
            assert same(gradient, found[name]), name
        elif name in compressed:
            assert not torch.equal(gradient, found[name]), name
            assert (gradient - found[name]).norm() < near * gradient.norm(), name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=close[0], atol=close[1])


def added(total: dict[str, torch.Tensor], gradients: Gradients) -> None:
    """Add gradients to those of other steps."""
    for name, gradient in gradients.items():
        if gradient is not None:
            total[name] = total.get(name, 0.0) + gradient.double()


# ---- states


def owed(full: Any) -> dict[str, torch.Tensor]:
    """The mean over ranks of what was not sent, by parameter."""
    total: dict[str, Any] = {}
    for state in full["ranks"]:
        for name, tensors in state["aggregators"].items():
            for key in ("residual", "owed"):
                if key in tensors:
                    total[name] = total.get(name, 0.0) + tensors[key].double()
    return {name: residual / full["world_size"] for name, residual in total.items()}
