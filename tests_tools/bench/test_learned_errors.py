"""Learned levels have a smaller error than even ones, in every large layer of the gpt task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradwire.lang.kernels import decode, encode
from gradwire_tools.bench.tasks import get
from gradwire_tools.bench.train import sharded
from gradwire_tools.bench.train.method_run import MethodRun
from products import EXHAUSTIVE
from ranks import as_processes
from rooms.handles import SMALLEST

pytestmark = pytest.mark.multiprocess


def error(codec: Any, values: torch.Tensor) -> float:
    payload = encode(codec, values, 7)
    return (decode(codec, payload, values.numel(), values.dtype, 7) - values).norm().item()


def errors(rank: int, bits: int) -> list[tuple[str, str, float]]:
    """(parameter, kind, error with learned levels / with even ones) on this rank's shards."""
    task = get("gpt", layers=1, width=256, heads=4, validation_sequences=17)
    method = sharded.parse(f"qsdp:w={bits}:g={bits}:learned")
    run = MethodRun.start(method, task, 0, 1)
    run.train(4)
    run.backward()
    run.optimizer.step()
    handle: Any = run.applied.handle
    handle.learn_levels()
    run.optimizer.zero_grad()
    run.train(2)
    run.backward()  # gradients that no level was learned from
    levels, found = handle.plan.levels, []
    shards = dict(run.model.named_parameters())
    for p in handle.plan.parameters:
        if p.numel >= SMALLEST:
            of = shards[p.name]
            for kind, codec, tensor in (
                ("weights", p.weight, of),
                ("gradients", p.codec, of.grad),
            ):
                values = tensor.to_local().detach().reshape(-1)
                learned = replace(codec, levels=getattr(levels, kind)[p.name])
                found.append((p.name, kind, error(learned, values) / error(codec, values)))
    return found


@EXHAUSTIVE
@pytest.mark.parametrize("bits", [3, 5, 4, 2])
def test_learned_levels_have_a_smaller_error(bits: int) -> None:
    for found in as_processes(2, errors, bits):
        assert len(found) >= 6  # both kinds, of the block's three large matrices
        worse = [row for row in found if not row[2] < 1.0]
        assert not worse, worse
