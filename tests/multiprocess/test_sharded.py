"""FSDP2 with `gw.attach`: each parameter's gradient goes through its own codec, and no other."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import (
    ALL,
    added,
    assert_as_asked,
    backward,
    batch,
    dumped,
    gradients,
    loaded,
    own_mesh,
    replicated,
    sharded,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradwire as gw
from gradwire.collectives import Item, ScopeProgram
from products import one_in
from ranks import as_processes, on


@on(2, ("identity", True, 1), ("qsgd", False, 1))
@on(4, ("qsgd", 2, 1), ("qsgd", True, 2))
@on(3, ("qsgd", True, 1), exhaustive=True)
@on(4, ("identity", True, 1), ("identity", True, 2), exhaustive=True)
def test_exactly_what_was_asked_for(
    rank: int, codec: str, reshard: bool | int, replicas: int
) -> None:
    """Excluded weights, biases and parameters without gradients are bit-identical to FSDP2's."""
    how = {"mesh": replicated(replicas)} if replicas > 1 else {}
    plain, ours = (sharded(reshard_after_forward=reshard, **how) for _ in range(2))
    handle = gw.attach(
        ours, codec, exclude=["second.weight"], codecs={"spare.weight": "qsgd:bits=4:block=1024"}
    )
    compressed = {"embedding", "first.weight", "frozen.weight", "spare.weight"}  # once thawed
    told = handle.stats()["parameters"]
    assert {n for n, facts in told.items() if facts["codec"] != "dense"} == compressed
    # A sum of two values does not depend on order; ours is in rank order.
    sums = 0.0 if dist.get_world_size() == 2 * replicas else 1e-4
    lossy = compressed if codec != "identity" else {"spare.weight"}
    for step, spare in enumerate((False, True)):
        expected, found = backward(plain, step, spare), backward(ours, step, spare)
        assert_as_asked(expected, found, lossy, sums=sums)
    groups = 2 if replicas > 1 else 1
    assert handle.stats()["calls"] == (2 * 2 + 1) * groups  # of `spare` in the second step


def test_nothing_is_lost_by_two_ranks_nor_by_three_that_go_on() -> None:
    before, _ = as_processes(2, nothing_is_lost)
    as_processes(3, nothing_is_lost, before)


def nothing_is_lost(rank: int, before: bytes | None = None) -> bytes:
    """Law 2 for unsharded parameters: gradients equal averages of shards plus residuals; so do
    those after a state was loaded, which other ranks have saved. Returns a state."""
    ranks = dist.get_world_size()
    plain, ours = sharded(), sharded()
    handle = gw.attach(ours, "topk", density=0.1, error_feedback=True)

    def owed() -> dict[str, torch.Tensor]:
        """Of this rank's shards, by all ranks."""
        states = handle.state_dict()["aggregators"]
        found = {}
        for name, p in ours.named_parameters():
            if name in states:
                residual = states[name]["residual"].double()
                assert residual.numel() == p.numel()  # of the unsharded parameter, without padding
                rows = -(-p.shape[0] // ranks)
                mine = slice(rank * rows, (rank + 1) * rows)
                own = residual.view(p.shape)[mine].clone()
                dist.all_reduce(residual)
                assert residual.any()
                found[name] = residual.view(p.shape)[mine]
                assert sent == {} or not own.any(), "own values are sent exactly"
        return found

    sent: dict[str, torch.Tensor] = {}
    total: dict[str, torch.Tensor] = {}
    if before is not None:
        handle.load_state_dict(loaded(before))
        total = {name: residual.clone() for name, residual in owed().items()}
    for step in range(3):
        added(total, backward(plain, step, spare=True), ranks)
        added(sent, backward(ours, step, spare=True), ranks)
    left = owed()
    assert sorted(left) == ["embedding", "first.weight", "second.weight", "spare.weight"]
    for name, residual in left.items():
        torch.testing.assert_close(sent[name] + residual, total[name], rtol=0, atol=1e-4)
    return dumped(handle.full_state_dict())


@on(
    2,
    (None, 0.0, False),
    (torch.bfloat16, 1e-2, False),
    (torch.float16, 1e-3, False),
    (None, 1e-7, True),
)
def test_accumulated_steps_are_those_of_fsdp2(
    rank: int, dtype: torch.dtype | None, tolerance: float, sums: bool
) -> None:
    """With reductions in other dtypes, and with sums in place of averages."""
    plain, ours = (sharded(MixedPrecisionPolicy(reduce_dtype=dtype)) for _ in range(2))
    handle = gw.attach(ours, "identity")
    for step in range(3):
        for model in (plain, ours):
            model.set_force_sum_reduction_for_comms(sums)
            model.set_requires_gradient_sync(step != 1)
            model(batch(step), spare=True).square().mean().backward()
        found = gradients(ours)
        for name, gradient in gradients(plain).items():
            if gradient is None:
                assert found[name] is None
            else:
                torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance)
    assert 0 < handle.stats()["kernel_calls"] <= 60


def test_blocks_have_1024_values_by_default(rank: int) -> None:
    model = sharded()
    handle = gw.attach(model, "qsgd", bits=4, codecs={"first.*": "qsgd:block=64"})
    of = {p.name: p.codec for p in handle.plan.parameters}
    assert of["second.weight"] == gw.QSGD(bits=4, block=1024)
    assert of["first.weight"] == gw.QSGD(block=64)
    changed = handle.update("qsgd:bits=3")
    changed.wait(60)
    dist.barrier()  # all ranks have prepared it
    for step in range(3):
        backward(model, step)
    assert changed.in_force
    of = {p.name: p.codec for p in handle.plan.parameters}
    assert of["second.weight"] == gw.QSGD(bits=3, block=1024)


def test_tied_weights_go_by_every_name(rank: int) -> None:
    """The last layer's matrix is the embedding."""
    handle = gw.attach(sharded(), exclude=["again.*"], weights={"again.weight": "bf16"})
    (tied,) = [p for p in handle.plan.parameters if p.name == "embedding"]
    assert (tied.codec, tied.weight) == (None, gw.codecs.get("bf16"))
    assert not any(p.name == "again.weight" for p in handle.plan.parameters)


def test_a_detached_module_is_fsdp2s(rank: int) -> None:
    model, plain = sharded(), sharded()
    gw.attach(model).detach()
    assert_as_asked(backward(plain, 0), backward(model, 0), ())


# ---- memory: a step keeps no gradients, and a detached handle nothing


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


@pytest.mark.parametrize("weights", one_in(2, [ALL, None]))
def test_gradients_do_not_outlive_their_step(weights: Any) -> None:
    """Of a reduce-scatter, which reads the whole gradient of its group; in processes of their own,
    which have no other collectives."""
    as_processes(2, gradients_do_not_outlive_their_step, weights)


def gradients_do_not_outlive_their_step(rank: int, weights: Any) -> None:
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
