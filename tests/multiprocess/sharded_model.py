"""A model under FSDP2 with many kinds of parameters, for tests of `gw.attach`."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gradwire.lang import layout
from training import everywhere

# Codecs of weights. The tests' weights are small: patterns ask for them by name.
ALL = {"*.weight": "randomshift:bits=8", "embedding": "randomshift:bits=8"}


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


def replicas_of_shards(replicas: int) -> Any:
    """By HSDP; one: by FSDP2."""
    return sharded(mesh=replicated(replicas)) if replicas > 1 else sharded()


# ---- training

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


# ---- weights


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the whole weights, as a forward gathers them."""
    found, names = {}, {p: name for name, p in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            of_group = module._get_fsdp_state()._fsdp_param_group.fsdp_params
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


# ---- comparisons


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
    sums: float = 0.0,
) -> None:
    """Of compressed parameters gradients are near FSDP2's, others are the same, bit for bit, or but
    for a relative difference of sums."""
    assert list(expected) == list(found)
    for name, gradient in expected.items():
        if gradient is None or not gradient.numel():
            assert same(gradient, found[name]), name
        elif name in compressed:
            assert not torch.equal(gradient, found[name]), name
            assert (gradient - found[name]).norm() < near * gradient.norm(), name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=sums, atol=1e-6 * bool(sums))


def added(total: dict[str, torch.Tensor], gradients: Gradients, times: float = 1.0) -> None:
    """Add gradients to those of other steps."""
    for name, gradient in gradients.items():
        if gradient is not None:
            total[name] = total.get(name, 0.0) + gradient.double() * times


# ---- states


def dumped(state: Any) -> bytes:
    """A copy: a tensor shared by a process does not outlive it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def loaded(state: bytes) -> Any:
    return torch.load(io.BytesIO(state))


def owed(full: Any) -> dict[str, torch.Tensor]:
    """The mean over ranks of what was not sent, by parameter."""
    total: dict[str, Any] = {}
    for state in full["ranks"]:
        for name, tensors in state["aggregators"].items():
            for key in ("residual", "owed"):
                if key in tensors:
                    total[name] = total.get(name, 0.0) + tensors[key].double()
    return {name: residual / full["world_size"] for name, residual in total.items()}
