"""FSDP2 with `gw.attach`: each parameter's gradient goes through its own codec, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import backward, batch, dumped, gradients, loaded, same, sharded
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import gradwire as gw
from products import in_turn
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess


def exactly_what_was_asked_for(rank: int, codec: str, options: dict[str, Any]) -> None:
    """Excluded weights, biases and parameters without gradients are bit-identical to FSDP2's."""
    plain, ours = sharded(**options), sharded(**options)
    handle = gw.attach(
        ours, codec, exclude=["second.weight"], codecs={"spare.weight": "qsgd:bits=3"}
    )
    compressed = {"embedding", "first.weight", "frozen.weight", "spare.weight"}  # once thawed
    told = handle.stats()["parameters"]
    assert {n for n, facts in told.items() if facts["codec"] != "dense"} == compressed
    for step in range(4):
        spare = step % 2 == 1
        expected, found = backward(plain, step, spare), backward(ours, step, spare)
        assert list(expected) == list(found)
        for name, gradient in expected.items():
            if name not in compressed or (codec == "identity" and "spare" not in name):
                # A sum of two values does not depend on order; ours is in rank order.
                if dist.get_world_size() == 2:
                    assert same(gradient, found[name]), name
                elif gradient is not None:
                    torch.testing.assert_close(gradient, found[name], rtol=1e-4, atol=1e-6)
            elif gradient is None or not gradient.numel():
                assert same(gradient, found[name])
            else:
                assert not torch.equal(gradient, found[name]), name
                assert (gradient - found[name]).norm() < 0.6 * gradient.norm(), name
    assert handle.stats()["calls"] == 4 * 2 + 2  # of `spare` in every other step


@pytest.mark.parametrize(("codec", "ranks"), in_turn(["qsgd", "identity"], [2, 3, 4]))
def test_what_is_compressed_is_what_was_asked_for(codec: str, ranks: int) -> None:
    as_processes(ranks, exactly_what_was_asked_for, codec, {})


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_it_does_not_matter_when_weights_are_resharded(reshard: bool | int) -> None:
    options = {"reshard_after_forward": reshard}
    as_processes(4 if reshard == 2 else 2, exactly_what_was_asked_for, "qsgd", options)


def losses_are_those_of_fsdp(rank: int) -> None:
    def train(attach: Callable[[FSDPModule], Any]) -> list[float]:
        model = sharded()
        handle = attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(20):
            optimizer.zero_grad()
            loss = model(batch(step), spare=True).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        if handle is not None:
            handle.detach()
        return found

    plain = train(lambda model: None)
    assert plain == train(lambda model: gw.attach(model, "identity"))
    compressed = train(lambda model: gw.attach(model, "qsgd", error_feedback=True))
    assert plain != compressed
    assert compressed[-1] < 0.7 * compressed[0]


def test_with_identity_losses_are_bit_equal_to_plain_fsdp() -> None:
    as_processes(2, losses_are_those_of_fsdp)


def nothing_is_lost(rank: int) -> None:
    """Law 2 for unsharded parameters: gradients equal averages of shards plus residuals."""
    ranks = dist.get_world_size()
    plain, ours = sharded(), sharded()
    handle = gw.attach(ours, "topk", density=0.1, error_feedback=True)
    total, sent = {}, {}
    for step in range(6):
        for kept, model in ((total, plain), (sent, ours)):
            for name, gradient in backward(model, step, spare=True).items():
                if gradient is not None:
                    kept[name] = kept.get(name, 0.0) + gradient.double() * ranks
    states = handle.state_dict()["aggregators"]
    assert sorted(states) == ["embedding", "first.weight", "second.weight", "spare.weight"]
    for name, p in ours.named_parameters():
        if name not in states:
            continue
        residual = states[name]["residual"].double()
        assert residual.numel() == p.numel()  # of the unsharded parameter, without padding
        dist.all_reduce(residual)
        rows = -(-p.shape[0] // ranks)
        mine = residual.view(p.shape)[rank * rows : (rank + 1) * rows]
        torch.testing.assert_close(sent[name] + mine, total[name], rtol=0, atol=1e-4)
        assert residual.any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_lost(ranks: int) -> None:
    as_processes(ranks, nothing_is_lost)


def policies(rank: int) -> None:
    """Reductions in other dtypes, accumulated steps, divisors."""

    def check(
        change: Callable[[FSDPModule], None], dtype: Any = None, tolerance: float = 0
    ) -> None:
        policy = None if dtype is None else MixedPrecisionPolicy(reduce_dtype=dtype)
        plain, ours = sharded(policy), sharded(policy)
        gw.attach(ours, "identity")
        for model in (plain, ours):
            change(model)
        for expected, found in zip(*map(steps, (plain, ours)), strict=True):
            for name, gradient in expected.items():
                if gradient is None:
                    assert same(gradient, found[name])
                else:
                    torch.testing.assert_close(
                        found[name], gradient, rtol=tolerance, atol=tolerance
                    )

    def steps(model: FSDPModule) -> list[Any]:
        model.zero_grad()
        found = []
        for step in range(3):
            model.set_requires_gradient_sync(step != 1)
            model(batch(step), spare=True).square().mean().backward()
            found.append(gradients(model))
        return found

    check(lambda model: None)
    check(lambda model: None, torch.bfloat16, 1e-2)
    check(lambda model: None, torch.float16, 1e-3)
    check(lambda model: model.set_force_sum_reduction_for_comms(True), None, 1e-7)


def test_policies() -> None:
    as_processes(2, policies)


def resumes(rank: int, before: bytes | None) -> bytes:
    model = sharded()
    handle = gw.attach(model, "topk", density=0.1, error_feedback=True)
    if before is not None:
        handle.load_state_dict(loaded(before))
        dist.barrier()
        return dumped(handle.state_dict())
    for step in range(3):
        backward(model, step, spare=True)
    saved = handle.state_dict()
    went_on = [backward(model, step, spare=True) for step in (3, 4)]
    again = sharded()
    other = gw.attach(again, "topk", density=0.1, error_feedback=True)
    other.load_state_dict(saved)
    for expected, step in zip(went_on, (3, 4), strict=True):
        for name, gradient in backward(again, step, spare=True).items():
            assert same(gradient, expected[name])
    return dumped(saved)


def test_state_resumes_and_moves_to_other_ranks() -> None:
    saved = [loaded(found) for found in as_processes(2, resumes, None)]
    moved = [loaded(found) for found in as_processes(3, resumes, dumped(saved))]
    for name in saved[0]["aggregators"]:
        before = sum(s["aggregators"][name]["residual"] for s in saved) / 2
        after = sum(s["aggregators"][name]["residual"] for s in moved) / 3
        torch.testing.assert_close(after, before)


def mistakes(rank: int) -> None:
    model = sharded()
    handle = gw.attach(model)
    for match, call in (
        ("has a handle attached", lambda: gw.attach(model)),
        ("takes a codec, not powersgd", lambda: gw.attach(sharded(), "powersgd")),
        ("coalesce_bytes is for DDP's", lambda: gw.attach(sharded(), coalesce_bytes=5)),
        ("FSDP2 has no algorithm 'ring'", lambda: gw.attach(sharded(), algorithm="ring")),
        ("matches no parameter", lambda: gw.attach(sharded(), exclude=["decoder.*"])),
        ("unlike ranks", lambda: gw.attach(sharded(), bits=2 + rank)),
    ):
        error = caught(call)
        assert isinstance(error, gw.ConfigError), (match, error)
        assert match in str(error) or match == "unlike ranks", str(error)
    handle.detach()
    plain = sharded()
    expected, found = backward(plain, 0), backward(model, 0)
    assert all(same(gradient, found[name]) for name, gradient in expected.items())


def test_mistakes_are_named() -> None:
    as_processes(2, mistakes, timeout=15)
