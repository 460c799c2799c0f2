"""FSDP2 with learned levels, and with codecs of weights that change during training."""

from __future__ import annotations

from typing import Any

import torch
from scenario import (
    exact,
    gathered,
    own_mesh,
    prepared,
    replicated,
    sgd,
    sharded,
    steps,
    unlike,
)

import gradwire as gw
from ranks import on, refuses
from training import alike, everywhere

WEIGHTS = {"*.weight": "learnedlevels:bits=3:block=128"}
GRADIENTS = {"codec": "learnedlevels:bits=3:block=128:rounding=stochastic"}
SMALLEST = 2000  # the tests' weights are small


def made(weights: Any = WEIGHTS, keep: str = "none", **options: Any) -> tuple[Any, Any, Any]:
    model = sharded(**{"mesh": own_mesh(), **options})
    handle = gw.attach(model, **GRADIENTS, weights=weights, keep=keep)
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


def test_bad_input_is_named(rank: int) -> None:
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
