"""Plans of FSDP2 modules that switch while they train, and backward passes that end early."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import backward, batch, same, sharded

import gradwire as gw
from ends import ends, finished
from products import one_in
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess


def switches(rank: int) -> tuple[list[int], dict[str, int]]:
    """Ranks call update at different steps; all adopt the new plan at the same pass."""
    plain, ours = sharded(), sharded()
    handle = gw.attach(ours, bits=8, error_feedback=True)
    versions, kinds = [], {}
    changes: list[dict[str, Any]] = [
        {"bits": 2},
        {"codec": None},
        {"codec": "topk", "density": 0.2, "codecs": {"first.weight": "terngrad"}},
        {"error_feedback": False},
    ]
    total: dict[str, torch.Tensor] = {}
    for step in range(60):
        if step % 12 == 3 * (rank + 1) and step // 12 < len(changes):
            handle.update(**changes[step // 12])
        expected, found = backward(plain, step, spare=True), backward(ours, step, spare=True)
        versions.append(handle.plan.version)
        kinds[handle.stats()["parameters"]["first.weight"]["codec"].split("(")[0]] = step
        for name, gradient in expected.items():
            if gradient is not None:
                total[name] = total.get(name, 0.0) + (gradient - found[name]).double()
        time.sleep(0.01 * (rank == 1))
    while handle.plan.version < len(changes):
        backward(ours, 60, spare=True)
        time.sleep(0.01)
    for name, difference in total.items():  # sums of gradients and of averages are equal
        if difference.numel() and handle.stats()["parameters"][name]["codec"] == "dense":
            assert difference.abs().max() < 1e-4, name
    return versions, kinds


@pytest.mark.parametrize("ranks", one_in(2, [2, 3]))
def test_all_ranks_switch_at_the_same_pass(ranks: int) -> None:
    found = as_processes(ranks, switches)
    assert all(versions == found[0][0] for versions, _ in found)
    assert len(set(found[0][0])) >= 4
    assert {"QSGD", "dense", "TernGrad"} <= set(found[0][1])


def unlike(rank: int) -> None:
    """If ranks request different plans, the next forward raises; the old plan stays."""
    model, plain = sharded(), sharded()
    handle = gw.attach(model, "identity")
    backward(model, 0)
    update = handle.update("qsgd", bits=2 + rank)
    assert isinstance(caught(lambda: update.wait(30)), gw.ConfigError)
    error = caught(lambda: backward(model, 1))
    assert isinstance(error, gw.ConfigError), error
    assert "rank" in str(error)
    expected, found = backward(plain, 1), backward(model, 1)
    assert all(same(gradient, found[name]) for name, gradient in expected.items())
    for match, call in (
        ("takes a codec, not powersgd", lambda: handle.update("powersgd")),
        ("matches no parameter", lambda: handle.update(exclude=["nothing.*"])),
    ):
        error = caught(call)
        assert isinstance(error, gw.ConfigError)
        assert match in str(error)


def test_unlike_plans_are_refused() -> None:
    as_processes(2, unlike)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the user's own")


def fails_in_backward(rank: int) -> float:
    """Rank 1's backward raises before its last scatter, in which rank 0 waits."""
    model = sharded(reshard_after_forward=False)  # so that no weights are gathered in backward
    gw.attach(model)
    backward(model, 0)
    begun = time.monotonic()
    x = batch(1).requires_grad_()
    hidden = model.first.register_forward_hook(
        lambda _, __, out: Fails.apply(out) if rank == 1 else out.clone()
    )
    error = caught(lambda: model(x).square().mean().backward())
    hidden.remove()
    if rank == 1:
        assert isinstance(error, ArithmeticError), error
    else:
        assert isinstance(error, gw.TransportError), error
        assert error.peer == 1
        assert "backward raised an exception" in str(error)
    return time.monotonic() - begun


def test_an_exception_in_one_ranks_backward_is_told() -> None:
    found = ends(2, fails_in_backward, timeout=20)
    finished(found)
    assert all(end.value < 5 for end in found), found


def counts(rank: int) -> None:
    """Weights are gathered through the replaced object; this rank's calls are counted."""
    model = sharded()
    handle = gw.attach(model, "identity")
    before = dist.get_world_size()
    backward(model, 0)
    assert before == 2
    stats = handle.stats()
    assert stats["calls"] == 2
    assert 0 < stats["kernel_calls"] <= 20


def test_counts() -> None:
    as_processes(2, counts)
