"""FSDP2 with `gw.attach`, beside a twin that torch alone averages: each parameter's gradient goes
through its own codec, and no other."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from scenario import (
    ALL,
    added,
    assert_as_asked,
    backward,
    batch,
    gradients,
    own_mesh,
    prepared,
    replicas_of_shards,
    sharded,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradwire as gw
from gradwire.collectives import Item, ScopeProgram
from ranks import on

TRAINED = ("first", "second", "spare")

# ---- memory: a step keeps no gradients, and a detached handle nothing


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


@on(2, ALL)
@on(2, None, exhaustive=True)
def test_gradients_do_not_outlive_their_step(rank: int, weights: Any) -> None:
    """Of a reduce-scatter, which reads the whole gradient of its group; the first of its processes,
    which have no other collectives."""
    model = sharded(mesh=own_mesh())
    for _ in range(2):
        handle = gw.attach(model, "qsgd:bits=4", error_feedback=True, weights=weights)
        for step in range(2):
            backward(model, step, spare=True)
        dist.barrier()
        assert alive(Item) == 0
        assert alive(ScopeProgram) > 0
        handle.detach()
        del handle
        dist.barrier()
        assert alive(ScopeProgram) == 0


# ---- a module and its twin


@on(2, ("identity", True, 1), ("qsgd", False, 1))
@on(4, ("qsgd", 2, 1), ("qsgd", True, 2))
@on(3, ("qsgd", True, 1), exhaustive=True)
@on(4, ("identity", True, 1), ("identity", True, 2), exhaustive=True)
def test_exactly_what_was_asked_for(
    rank: int, codec: str, reshard: bool | int, replicas: int
) -> None:
    """Excluded weights, biases and parameters without gradients are bit-identical to FSDP2's; once
    detached, all are."""
    plain, ours = (replicas_of_shards(replicas, reshard_after_forward=reshard) for _ in range(2))
    handle = gw.attach(
        ours, codec, exclude=["second.weight"], codecs={"spare.weight": "qsgd:bits=4:block=1024"}
    )
    compressed = {"embedding", "first.weight", "frozen.weight", "spare.weight"}  # once thawed
    told = handle.stats()["parameters"]
    assert {n for n, facts in told.items() if facts["codec"] != "none"} == compressed
    # A sum of two values does not depend on order; ours is in rank order.
    close = (0.0, 0.0) if dist.get_world_size() == 2 * replicas else (1e-4, 1e-6)
    lossy = compressed if codec != "identity" else {"spare.weight"}
    calls = (2 * 2 + 1) * (1 + (replicas > 1))  # of `spare` in the second step
    for step, spare in enumerate((False, True, True)):
        expected, found = backward(plain, step, spare), backward(ours, step, spare)
        assert_as_asked(expected, found, lossy if step < 2 else (), close=close)
        if step == 1:
            assert handle.stats()["calls"] == calls
            handle.detach()
    assert handle.stats()["calls"] == calls


@on(
    2,
    (None, 0.0, "averages"),
    (torch.bfloat16, 1e-2, "averages"),
    (torch.float16, 1e-3, "averages"),
    (torch.float64, 1e-6, "averages"),
    (None, 1e-7, "sums"),
)
@on(4, (None, 0.0, "without the hop"))
def test_accumulated_steps_are_those_of_fsdp2(
    rank: int, dtype: torch.dtype | None, tolerance: float, way: str
) -> None:
    """With reductions in other dtypes, with sums in place of averages, and with replicas that are
    averaged in the last step alone."""
    of, hop = MixedPrecisionPolicy(reduce_dtype=dtype), way == "without the hop"
    plain, ours = (replicas_of_shards(1 + hop, policy=of) for _ in range(2))
    how = ("qsgd", True) if dtype == torch.float64 else ("identity", False)
    handle = gw.attach(ours, how[0], error_feedback=how[1])
    for step in range(3):
        for model in (plain, ours):
            model.set_force_sum_reduction_for_comms(way == "sums")
            model.set_requires_gradient_sync(step != 1 or hop)
            if hop:
                model.set_requires_all_reduce(step == 2)
            model(batch(step), spare=True).square().mean().backward()
        close = (tolerance, tolerance)
        assert_as_asked(gradients(plain), gradients(ours), (), close=close)
    assert handle.stats()["calls"] == (3 * 3 + 3 if hop else 2 * 3)
    assert dtype == torch.float64 or 0 < handle.stats()["kernel_calls"] <= 60


@on(2, (1, 1))
@on(4, (2, 1), (2, 2))
@on((3, 5), (1, 1), exhaustive=True)
@on(6, (2, 1), (3, 1), exhaustive=True)
def test_nothing_is_lost(rank: int, replicas: int, every: int) -> None:
    """Law 2, for unsharded parameters: residuals, of both hops, are sent once the new plan has
    none; with two ways to average, and where replicas are averaged in `every` second pass."""
    for sums in (False, True):
        plain, ours = replicas_of_shards(replicas), replicas_of_shards(replicas)
        if sums:
            for model in (plain, ours):
                model.set_force_sum_reduction_for_comms(True)
                model.set_gradient_divide_factor(3.0)
        handle = gw.attach(ours, "topk", density=0.1, error_feedback=True)
        total: dict[str, Any] = {}
        sent: dict[str, Any] = {}
        for step in range(4 * every):
            for model in (plain, ours):
                model.set_requires_all_reduce(step % every == every - 1)
            if step == 2 * every:
                kept = handle.state_dict()["aggregators"]
                assert sorted(kept) == ["embedding", *(f"{n}.weight" for n in TRAINED)]
                for name, p in ours.named_parameters() if replicas == 1 else ():
                    if name in kept:
                        residual = kept[name]["residual"].view(p.shape)  # without padding
                        rows = -(-p.shape[0] // dist.get_world_size())
                        assert residual.any()
                        own = residual[rank * rows : (rank + 1) * rows]
                        assert not own.any(), "own values are sent exactly"
                prepared(handle, codec=None)
            added(total, backward(plain, step, spare=True))
            added(sent, backward(ours, step, spare=True))
        assert handle.plan.version == 1
        assert len(total) == 7
        for name, expected in total.items():
            torch.testing.assert_close(sent[name], expected, rtol=0, atol=1e-4)


# ---- the plan


def test_blocks_have_1024_values_by_default(rank: int) -> None:
    """The last layer's matrix is the embedding, and goes by every name."""
    model = sharded()
    how: dict[str, Any] = {"exclude": ["again.*"], "weights": {"again.weight": "bf16"}}
    handle = gw.attach(model, "qsgd", bits=4, codecs={"first.*": "qsgd:block=64"}, **how)
    of = {p.name: p for p in handle.plan.parameters}
    assert of["second.weight"].codec == gw.QSGD(bits=4, block=1024)
    assert of["first.weight"].codec == gw.QSGD(block=64)
    assert (of["embedding"].codec, of["embedding"].weight) == (None, gw.codecs.get("bf16"))
    assert "again.weight" not in of
    changed = prepared(handle, codec="qsgd:bits=3")
    for step in range(3):
        backward(model, step)
    assert changed.in_force
    of = {p.name: p for p in handle.plan.parameters}
    assert of["second.weight"].codec == gw.QSGD(bits=3, block=1024)
