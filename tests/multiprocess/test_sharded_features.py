"""Features of FSDP2 while weights are gathered through codecs: each with each way to keep them.

In each, all ranks gather the same bits, the optimizer's shards stay as they are, and with codec
identity losses are those of plain FSDP2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenario import Model, batch, own_mesh, replicated
from torch import nn
from torch.distributed._composable.fsdp import CPUOffloadPolicy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from ranks import on
from training import alike

# The tests' weights are small: a pattern asks for all.
EIGHT = {"*": "randomshift:bits=8"}
KEEPS = ("none", "payload", "reference")


def evenly(parameter: nn.Parameter) -> Shard | None:
    """Columns, where they can be divided: FSDP2 pads rows alone."""
    wide = parameter.dim() == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if wide else None


@dataclass(frozen=True)
class Feature:
    """A way to shard a model and to train it.

    Attributes:
        ranks: how many it needs.
        options: of `fully_shard`.
        replicas: sets of shards.
        prepare: called with the model before it is sharded.
        adapt: called with the sharded model.
        call: runs the model.
        before: called with the model and an index, before each micro-batch.
        micro: micro-batches per step.
        late: attach after the first step.
        compiled: whether torch compiles a part of the model.
        optimizer: options of AdamW.
    """

    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    prepare: Callable[[Model], Any] = lambda model: None
    adapt: Callable[[Any], Any] = lambda model: None
    call: Callable[..., torch.Tensor] = lambda model, x, spare: model(x, spare)
    before: Callable[[Any, int], Any] = lambda model, micro: None
    micro: int = 1
    late: bool = False
    compiled: bool = False
    optimizer: dict[str, Any] = field(default_factory=dict)


def counting(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A back end of torch.compile that counts its graphs: torch compiles some modules silently not
    at all."""
    counting.graphs += 1
    return graph  # type: ignore[no-any-return]


counting.graphs = 0


def compile_layers(model: Model) -> None:
    for name in ("first", "second"):
        setattr(model, name, torch.compile(getattr(model, name), backend=counting))


def checkpointed(model: Model) -> None:
    for name in ("first", "second"):
        setattr(model, name, checkpoint_wrapper(getattr(model, name)))


def several_dtypes(model: Model) -> None:
    """In the root's group: FSDP2 then gathers bytes, which are left to it."""
    bf16 = torch.ones(30, 30, dtype=torch.bfloat16)
    model.second.register_parameter("offset", nn.Parameter(bf16, requires_grad=False))


def evaluate(model: Any, micro: int) -> None:
    if micro:  # FSDP2 allocates in the first forward what it uses in others
        with torch.inference_mode():
            model(batch(99))


def prefetched(model: Any) -> None:
    inner = model.inner
    model.set_modules_to_forward_prefetch([inner, inner.first])
    inner.first.set_modules_to_forward_prefetch([inner.frozen])
    inner.frozen.set_modules_to_backward_prefetch([inner.first])


def called_early(model: Any, x: torch.Tensor, spare: bool) -> torch.Tensor:
    handle = model.inner.first.unshard(async_op=True)
    found = model(x, spare)
    handle.wait()
    return found


def last_reduces(model: Any, micro: int) -> None:
    model.set_requires_gradient_sync(micro % 2 == 1)


def stays(model: Any, micro: int) -> None:
    last_reduces(model, micro)
    model.set_reshard_after_backward(micro % 2 == 1)


FEATURES = {
    "plain": Feature(),
    "compiled model": Feature(adapt=lambda model: model.compile(backend=counting), compiled=True),
    "compiled layers": Feature(prepare=compile_layers, compiled=True),
    "offload": Feature(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "fused": Feature(optimizer={"fused": True}),
    "columns": Feature(options={"shard_placement_fn": evenly}),
    "hsdp": Feature(4, replicas=2),
    "few rows": Feature(4),
    "checkpointed": Feature(prepare=checkpointed),
    "reentrant": Feature(
        call=lambda model, x, spare: checkpoint(
            model, x.requires_grad_(), spare, use_reentrant=True
        )
    ),
    "accumulated": Feature(micro=2, before=last_reduces),
    "kept between micro-batches": Feature(micro=2, before=stays),
    "not resharded": Feature(options={"reshard_after_forward": False}),
    "resharded": Feature(options={"reshard_after_forward": True}),
    "resharded to two": Feature(4, {"reshard_after_forward": 2}),
    "bf16": Feature(options={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    "several dtypes": Feature(prepare=several_dtypes),
    "late": Feature(late=True),
    "evaluated": Feature(before=evaluate),
    "prefetched": Feature(adapt=prefetched),
    "unsharded early": Feature(call=called_early),
}


class Nested(nn.Module):
    """The model in a sharded module, whose own parameter is a group of one row."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 5))
        self.inner = model

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        return self.inner(x, spare) * self.scale


def built(feature: Feature) -> Any:
    model = Model()
    feature.prepare(model)
    # Each training draws the same random numbers, whatever was before it.
    mesh = replicated(feature.replicas) if feature.replicas > 1 else own_mesh()
    outer = Nested(model)
    for module in (model.first, model.frozen, model.spare, model, outer):
        fully_shard(module, mesh=mesh, **feature.options)
    feature.adapt(outer)
    return outer


def each_with_each(test: Any) -> Any:
    """Features and ways to keep weights; `make test`: each feature of two ranks in one way."""
    for (name, feature), sampled in zip(FEATURES.items(), cycle(KEEPS), strict=False):
        for keep in KEEPS:
            more = feature.ranks > 2 or keep != sampled
            test = on(feature.ranks, (name, keep), exhaustive=more)(test)
    return test


Gathers = list[tuple[int, int, bytes]]


@contextmanager
def watched(gathers: Gathers, step: Callable[[], int]) -> Iterator[None]:
    """Note (step, group, digest) of all that FSDP2 gathers: of values, without padding."""
    copy_out = _fsdp_param_group.foreach_all_gather_copy_out

    def noted(result: Any, parameters: Any, group: Any) -> None:
        copy_out(result, parameters, group)
        whole = hashlib.sha1()
        for p in parameters:
            (values,) = p.all_gather_outputs
            copied = values[: p._orig_size.numel()].clone()
            whole.update(copied.view(torch.uint8).numpy().tobytes())
        gathers.append((step(), id(parameters), whole.digest()))

    _fsdp_param_group.foreach_all_gather_copy_out = noted
    try:
        yield
    finally:
        _fsdp_param_group.foreach_all_gather_copy_out = copy_out


def train(
    feature: Feature, steps: int, **attached: Any
) -> tuple[list[float], Gathers, dict[str, Any]]:
    """Train a new model; `attached` are the arguments of `attach`, if any.

    Returns:
        losses, the digests of what was gathered, and the handle's stats.
    """
    torch._dynamo.reset()
    counting.graphs = 0
    model = built(feature)
    handle = gw.attach(model, **attached) if attached and not feature.late else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **feature.optimizer)
    losses: list[float] = []
    gathers: Gathers = []
    with watched(gathers, lambda: len(losses)):
        for step in range(steps):
            shards = exact(model)
            for part in range(feature.micro):
                feature.before(model, micro := feature.micro * step + part)
                x = batch(micro)
                loss = feature.call(model, x, step % 2 == 1).square().mean()
                loss.backward()
            for before, after in zip(shards, exact(model), strict=True):
                assert torch.equal(before, after)
                assert after.dtype == before.dtype
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if attached and handle is None:
                handle = gw.attach(model, **attached)
    assert bool(counting.graphs) == feature.compiled
    return losses, gathers, {} if handle is None else handle.stats()


def exact(model: Any) -> list[torch.Tensor]:
    """Copies of the optimizer's shards."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in modules]
    parameters = [p for group in groups for p in group.fsdp_params]
    return [p.sharded_param.to_local().detach().clone() for p in parameters]


@each_with_each
def test_weights_are_alike_and_losses_those_of_fsdp(rank: int, feature: str, keep: str) -> None:
    chosen = FEATURES[feature]
    # What is sent as differences begins with the weights as they are.
    steps = 2 + chosen.late + 2 * (keep == "reference")
    plain, *_ = train(chosen, steps)
    kept = gw.Options(keep=keep)
    same, _, stats = train(chosen, steps, codec="identity", weights={"*": "identity"}, options=kept)
    assert stats["weights_calls"] > 0
    # Sums of more than two ranks differ in their last bits.
    assert same == (plain if chosen.ranks == 2 else pytest.approx(plain, rel=1e-4))
    coded, gathers, _ = train(chosen, steps, codec="qsgd:bits=8", weights=EIGHT, options=kept)
    assert coded == pytest.approx(plain, rel=0.1)
    assert coded != plain
    assert alike([(step, digest) for step, _, digest in gathers])
    for step in range(steps):
        versions = {(group, digest) for at, group, digest in gathers if at == step}
        assert len(versions) == len({group for group, _ in versions}), step
