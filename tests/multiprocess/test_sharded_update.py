"""Plans of FSDP2 modules that switch while they train, backward passes that end early, learned
levels, and codecs of weights that change."""

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
    exact,
    gathered,
    held,
    own_mesh,
    prepared,
    replicas_of_shards,
    replicated,
    sgd,
    sharded,
    steps,
    unlike,
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
CODECS = ["qsgd", "none", "terngrad", "terngrad"]  # of first.weight, after each


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
            seen.append((handle.plan.version, codec.split(":")[0]))
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
        if difference.numel() and handle.stats()["parameters"][name]["codec"] == "none":
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
        ("keep is as `attach` was told", lambda: handle.update(options=gw.Options(keep="none"))),
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


# ---- learned levels, and codecs of weights


WEIGHTS = {"*.weight": "learnedlevels:bits=3:block=128"}
GRADIENTS = {"codec": "learnedlevels:bits=3:block=128:rounding=stochastic"}
SMALLEST = 2000  # the tests' weights are small


def made(weights: Any = WEIGHTS, keep: str = "none", **options: Any) -> tuple[Any, Any, Any]:
    model = sharded(**{"mesh": own_mesh(), **options})
    handle = gw.attach(model, **GRADIENTS, weights=weights, options=gw.Options(keep=keep))
    return model, handle, sgd(model)


def learned(handle: Any) -> int:
    return int(handle.learn_levels(SMALLEST, 100))


def errors(model: Any) -> dict[str, float]:
    """The L2 error of every matrix as it is gathered."""
    wanted = exact(model)
    found = {name: (wanted[name] - t).norm().item() for name, t in gathered(model).items()}
    return {name: error for name, error in found.items() if wanted[name].dim() > 1}


def codecs(handle: Any) -> list[Any]:
    """Of weights."""
    gathers = handle._reductions.weights._gathers
    return [w.codec for gather in gathers for w in gather.weights if w.codec]


@on((2, 4), "none")
@on((2, 3, 5), "none", "payload", "reference", exhaustive=True)
def test_levels_are_learned_and_equal_on_all_ranks(rank: int, keep: str) -> None:
    """Four are two replicas of shards."""
    replicas = {"mesh": replicated(2)} if len(everywhere(rank)) == 4 else {}
    model, handle, optimizer = made(keep=keep, **replicas)
    losses = steps(model, optimizer, 0, 3)
    shapes = [p.to_local().shape for p in model.parameters()]
    even = errors(model)
    assert learned(handle) == 5  # the frozen layer has no gradient
    found = handle.plan.levels
    assert set(found.weights) == {f"{n}.weight" for n in ("first", "frozen", "second")}
    assert set(found.gradients) == {f"{n}.weight" for n in ("first", "second")}
    assert alike(found.state())
    for levels in (*found.weights.values(), *found.gradients.values()):
        assert len(levels) == 8
        assert list(levels) == sorted(levels)
    if keep != "reference":  # which has the even levels' weights until an optimizer steps
        fitted = errors(model)
        assert all(fitted[name] < even[name] for name in found.weights), (even, fitted)
    losses += steps(model, optimizer, 3, 6)
    assert min(losses[3:]) < 0.5 * losses[0], losses
    assert not unlike(gathered(model))
    assert [p.to_local().shape for p in model.parameters()] == shapes
    assert any(codec.levels == found.weights["second.weight"] for codec in codecs(handle))
    member = handle._members["second.weight"].aggregator
    assert member.codec.levels == found.gradients["second.weight"]


@on(2, "none")
@on((2, 3, 5), "none", "payload", "reference", exhaustive=True)
def test_codecs_of_weights_change_during_training(rank: int, keep: str) -> None:
    model, handle, optimizer = made(keep=keep)
    steps(model, optimizer, 0, 1)
    learned(handle)
    known = handle.plan.levels

    def adopted(**changes: Any) -> int:
        """Bytes of a step's weights once an update is in force."""
        update = prepared(handle, **changes)
        steps(model, optimizer, 20, 22)
        assert update.in_force
        steps(model, optimizer, 22, 23)
        before = handle.stats()["weights_wire_bytes"]
        steps(model, optimizer, 23, 24)
        sent = handle.stats()["weights_wire_bytes"] - before
        assert not unlike(gathered(model))
        return int(sent)

    three = adopted(exclude=["first.*"])
    assert handle.plan.levels == known
    five = adopted(weights={"*.weight": "learnedlevels:bits=5:block=128"})
    assert {codec.bits for codec in codecs(handle)} == {5}
    assert {codec.levels for codec in codecs(handle)} == {None}
    exact = adopted(weights={"*": "identity"})
    assert three < five < exact
    back = adopted(weights=WEIGHTS)
    assert back == three
    assert {codec.levels for codec in codecs(handle)} >= set(known.weights.values())
    refuses("sends a part of the values", lambda: handle.update(weights="topk:density=0.1"))


def test_the_default_dtype_changes_no_level(rank: int) -> None:
    found = []
    for default in (torch.float32, torch.bfloat16):
        model, handle, optimizer = made()
        steps(model, optimizer, 0, 1)
        torch.set_default_dtype(default)
        try:
            learned(handle)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(handle.plan.levels.state())
    assert found[0] == found[1]


def test_levels_that_cannot_be_learned(rank: int) -> None:
    model, handle, optimizer = made()
    refuses("has no gradient", lambda: learned(handle))
    steps(model, optimizer, 0, 1)
    refuses("no parameter of 100000 values", handle.learn_levels)
    assert learned(handle) == 5
    handle.detach()
    handle.stats()
    refuses("any more", lambda: learned(handle))
    other = gw.attach(sharded(mesh=own_mesh()), "qsgd")
    refuses("learnedlevels:rounding=stochastic", lambda: other.learn_levels(1))
    refuses("attach was given no weights", lambda: other.update(weights="bf16"))
