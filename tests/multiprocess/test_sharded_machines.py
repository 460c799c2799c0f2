"""FSDP2 over several machines with several ranks each: gathered and scattered in two levels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import backward, sharded
from test_sharded_weights import ALL, gathered, own_mesh, train

import gradwire as gw
from gradwire.algorithms import HierarchicalReduceScatter
from gradwire.lang import layout
from products import one_in
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess

MACHINES = {3: (0, 0, 1), 4: (0, 0, 1, 1), 5: (0, 1, 1, 0, 1)}


def attached(codec: str, weights: Any, nodes: tuple[int, ...] | None, **more: Any) -> Any:
    model = sharded(mesh=own_mesh())
    inside = more.pop("inside", "codec")
    two = gw.Options(algorithm="hierarchical", nodes=nodes, inside=inside)
    options = two if nodes is not None else None
    return model, gw.attach(model, codec, weights=weights, options=options, **more)


def two_levels(rank: int, inside: str, keep: str) -> None:
    ranks = dist.get_world_size()
    nodes = MACHINES[ranks]
    flat, _ = attached("identity", ALL, None, keep=keep)
    model, handle = attached("identity", ALL, nodes, inside=inside, keep=keep)
    for name, weights in gathered(flat).items():
        assert torch.equal(weights, gathered(model)[name]), "payloads are forwarded"
    # Sums have another order, and 8-bit weights may fall into another code.
    assert train(model, 10, lr=1e-3) == pytest.approx(train(flat, 10, lr=1e-3), rel=1e-3)
    model, handle = attached("qsgd:bits=4", ALL, nodes, inside=inside, keep=keep)
    losses = train(model, 15)
    assert losses[-1] < 0.5 * losses[0]
    assert "hierarchical" in str(handle.plan.describe()[0])
    update = handle.update("qsgd:bits=3")
    update.wait(30)
    for step in range(20):
        backward(model, step)
        if update.in_force:
            break
    assert update.in_force
    whole = {name: t.double().sum().item() for name, t in gathered(model).items()}
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, whole)
    assert all(one == whole for one in told)


@pytest.mark.parametrize(
    ("ranks", "inside", "keep"),
    one_in(3, [(4, "full", "payload"), (5, "codec", "reference"), (3, "codec", "none")]),
)
def test_two_levels_train_as_one(ranks: int, inside: str, keep: str) -> None:
    as_processes(ranks, two_levels, inside, keep)


def bytes_of_two_levels(rank: int) -> None:
    nodes = MACHINES[4]
    model, handle = attached("qsgd:bits=4", ALL, nodes)
    backward(model, 0, spare=True)
    before = handle.stats()
    backward(model, 1, spare=True)
    after = handle.stats()

    def sent(algorithm: Any, codec_of: Any) -> int:
        """By the formula, of one collective for every group."""
        total = 0
        for group in handle._shards:
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


def test_bytes_are_those_of_the_formula() -> None:
    as_processes(4, bytes_of_two_levels)


def refused(rank: int) -> None:
    def error(**arguments: Any) -> str:
        return str(caught(lambda: gw.attach(sharded(), **arguments)))

    assert "use sra or hierarchical" in error(algorithm="ring")
    wrong = gw.Options(algorithm="hierarchical", nodes=(0,))
    assert "the machine of each of the 2 ranks" in error(options=wrong)


def test_bad_input() -> None:
    as_processes(2, refused)
