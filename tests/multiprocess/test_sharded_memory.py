"""Memory of sharded modules: a step keeps no gradients, and a detached handle nothing."""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist
from sharded_model import ALL, backward, own_mesh, sharded

import gradwire as gw
from gradwire.collectives import Collective, Item
from ranks import on


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


@on(2, ALL)
@on(2, None, exhaustive=True)
def test_gradients_do_not_outlive_their_step(rank: int, weights: Any) -> None:
    """What a reduce-scatter reads is the whole gradient of its group: it must not stay."""
    model = sharded(mesh=own_mesh())
    for _ in range(2):
        handle = gw.attach(model, "qsgd:bits=4", error_feedback=True, weights=weights)
        for step in range(2):
            backward(model, step, spare=True)
        dist.barrier()
        assert alive(Item) == 0
        assert alive(Collective) > 0
        handle.detach()
        del handle
        dist.barrier()
        assert alive(Collective) == 0
