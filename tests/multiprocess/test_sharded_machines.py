"""FSDP2 over several machines with several ranks each: gathered and scattered in two levels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import ALL, backward, gathered, own_mesh, sharded, train, unlike

import gradwire as gw
from gradwire.algorithms import HierarchicalReduceScatter
from gradwire.lang import layout
from ranks import on
from training import everywhere

MACHINES = {3: (0, 0, 1), 4: (0, 0, 1, 1), 5: (0, 1, 1, 0, 1)}


def attached(codec: str, weights: Any, nodes: tuple[int, ...] | None, **more: Any) -> Any:
    model = sharded(mesh=own_mesh())
    inside = more.pop("inside", "codec")
    two = gw.Options(algorithm="hierarchical", nodes=nodes, inside=inside)
    options = two if nodes is not None else None
    return model, gw.attach(model, codec, weights=weights, options=options, **more)


@on(4, ("full", "payload"))
@on(5, ("codec", "reference"), exhaustive=True)
@on(3, ("codec", "none"), exhaustive=True)
def test_two_levels_train_as_one(rank: int, inside: str, keep: str) -> None:
    nodes = MACHINES[dist.get_world_size()]
    flat, _ = attached("identity", ALL, None, keep=keep)
    model, handle = attached("identity", ALL, nodes, inside=inside, keep=keep)
    for name, weights in gathered(flat).items():
        assert torch.equal(weights, gathered(model)[name]), "payloads are forwarded"
    # Sums have another order, and 8-bit weights may fall into another code.
    assert train(model, 3) == pytest.approx(train(flat, 3), rel=1e-3)
    model, handle = attached("qsgd:bits=4", ALL, nodes, inside=inside, keep=keep)
    losses = train(model, 5)
    assert losses[-1] < 0.5 * losses[0], losses
    assert "hierarchical" in str(handle.plan.describe()[0])
    update = handle.update("identity")
    update.wait(60)
    everywhere("prepared")
    for step in range(3):
        backward(model, step)
    assert update.in_force
    assert not unlike(gathered(model))


@on(4)
def test_bytes_are_those_of_the_formula(rank: int) -> None:
    nodes = MACHINES[4]
    model, handle = attached("qsgd:bits=4", ALL, nodes)
    backward(model, 0, spare=True)
    before = handle.stats()
    backward(model, 1, spare=True)
    after = handle.stats()

    def sent(algorithm: Any, codec_of: Any) -> int:
        """By the formula, of one collective for every group."""
        total = 0
        for group in handle._reductions._trained.shards():
            sizes = [
                sum(
                    layout(codec_of(name) or gw.Identity(), torch.float32).nbytes(lengths[r])
                    for name, lengths, _ in group
                )
                for r in range(4)
            ]
            total += algorithm(nodes=nodes).wire_bytes(rank, 4, [sizes])
        return total

    gradients = {p.name: p.codec for p in handle.plan.parameters}
    expected = sent(HierarchicalReduceScatter, gradients.get)
    found = int(after["wire_bytes"] - before["wire_bytes"])
    assert found == pytest.approx(expected, rel=0.1)  # segments have headers of their own
