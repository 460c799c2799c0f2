"""Plans of FSDP2 modules that switch while they train, and backward passes that end early."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import torch
from scenario import (
    assert_as_asked,
    backward,
    batch,
    by_layer,
    held,
    own_mesh,
    prepared,
    replicas_of_shards,
    sharded,
)

import gradwire as gw
from ranks import caught, on, raises, refuses
from training import OnTheWayBack, alike, everywhere, nothing

CHANGES: list[dict[str, Any]] = [
    {"bits": 2},
    {"codec": None},
    {"codec": "topk", "density": 0.2, "codecs": {"first.weight": "terngrad"}},
    {"error_feedback": False},
]
CODECS = ["QSGD", "dense", "TernGrad", "TernGrad"]  # of first.weight, after each


@on(2, (1, len(CHANGES)))
@on(4, (2, 1))
@on(3, (1, len(CHANGES)), exhaustive=True)
@on(4, (2, len(CHANGES)), exhaustive=True)
def test_all_ranks_switch_at_the_same_pass(rank: int, replicas: int, changes: int) -> None:
    """Ranks ask for a plan, and have prepared it, at other passes: they adopt it at the same one,
    once the last rank has prepared it."""
    plain, ours = replicas_of_shards(replicas), replicas_of_shards(replicas)
    handle = gw.attach(ours, bits=8, error_feedback=True)
    ready, goes_on = threading.Event(), threading.Event()

    def waits() -> None:
        ready.set()
        assert goes_on.wait(60)

    ranks, numbers = len(everywhere(rank)), itertools.count()
    seen: list[tuple[int, str]] = []
    total: dict[str, torch.Tensor] = {}

    def passes(count: int) -> None:
        for step in itertools.islice(numbers, count):
            expected, found = backward(plain, step, spare=True), backward(ours, step, spare=True)
            codec = handle.stats()["parameters"]["first.weight"]["codec"]
            seen.append((handle.plan.version, codec.split("(")[0]))
            for name, gradient in expected.items():
                if gradient is not None:
                    total[name] = total.get(name, 0.0) + (gradient - found[name]).double()

    with held(after=waits):
        for number, (change, codec) in enumerate(zip(CHANGES[:changes], CODECS, strict=False)):
            passes(rank)
            update = handle.update(**change)
            passes(ranks - 1 - rank)  # as many on all ranks
            assert ready.wait(60)
            late = rank == number % ranks
            if not late:
                goes_on.set()
                update.wait(60)
            everywhere("prepared, but for one rank")
            passes(3)
            assert seen[-1][0] == number, "before the last rank has prepared it"
            goes_on.set()
            update.wait(60)
            everywhere("prepared")
            ready.clear()
            goes_on.clear()
            passes(2)
            assert seen[-1] == (number + 1, codec)
    assert alike(seen)
    for name, difference in total.items():  # sums of gradients and of averages are equal
        if difference.numel() and handle.stats()["parameters"][name]["codec"] == "dense":
            assert difference.abs().max() < 1e-4, name


@on(2, (1, "of each rank"))
@on(4, (2, "of each shard"), (2, "of each replica"))
def test_unlike_plans_are_refused(rank: int, replicas: int, asks: str) -> None:
    """If ranks request different plans, a forward raises, the same on all; the old plan stays."""
    model, plain = replicas_of_shards(replicas), replicas_of_shards(replicas)
    of = rank // 2 if asks == "of each replica" else rank % 2
    handle = gw.attach(model, "identity")
    backward(model, 0)
    asked = everywhere(8 - 6 * of)
    update = handle.update("qsgd", bits=asked[rank])
    refused = raises(gw.ConfigError, lambda: update.wait(60))
    told = re.findall(r"rank (\d+) has '[^']*bits=(\d)", str(refused))
    assert len(told) == 2, refused
    assert all(asked[int(one)] == int(bits) for one, bits in told), refused
    everywhere(rank)  # all know it now
    raised = [caught(lambda n=n: backward(model, n)) for n in range(1, 5)]
    assert [raised.index(error) for error in raised if error is not None] == [2], raised
    assert raised[2] is refused
    assert_as_asked(backward(plain, 1), backward(model, 1), ())
    machines = gw.Options(algorithm="hierarchical", nodes=(0,) * 7)
    for said, call in (
        ("takes a codec, not powersgd", lambda: handle.update("powersgd")),
        ("matches no parameter", lambda: handle.update(exclude=["nothing.*"])),
        ("ranks that hold shards", lambda: handle.update(options=machines)),
        ("keep is as `attach` was told", lambda: handle.update(keep="none")),
    ):
        refuses(said, call)


def test_an_exception_as_a_plan_is_adopted(rank: int) -> None:
    """Rank 1 has not begun the pass in which others adopt it: they go on with the same plan."""
    model = sharded(reshard_after_forward=False, mesh=own_mesh())
    handle = gw.attach(model, bits=8, error_feedback=True)
    backward(model, 0)
    prepared(handle, bits=4)
    backward(model, 1)

    def fails() -> None:
        raise ArithmeticError("the user's own")

    act = fails if rank == 1 else nothing
    hook = model.first.register_forward_hook(lambda _, __, out: OnTheWayBack.apply(out, act))
    assert caught(lambda: backward(model, 2)) is not None
    hook.remove()
    assert everywhere(handle.plan.version) == [1, 0]
    model.reset_iter_state()
    handle.recover()
    assert everywhere(handle.plan.version) == [1, 1]
    backward(model, 3)
    assert "bits=4" in handle.stats()["parameters"]["first.weight"]["codec"]


def test_a_group_that_is_frozen_tells_nothing(rank: int) -> None:
    """The only one of which every rank has values."""
    model = by_layer(torch.nn.Sequential(torch.nn.Linear(30, 8), torch.nn.Linear(8, 1)))
    handle = gw.attach(model, include=["*"], bits=8)
    for step in range(6):
        if step == 2:
            model[0].requires_grad_(False)
            prepared(handle, bits=4)
        model(batch(step)).square().mean().backward()
    assert handle.plan.version == 1
