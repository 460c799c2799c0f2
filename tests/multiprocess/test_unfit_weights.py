"""Checks of weights that no codec holds, as masks have them: they are gathered as they are."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from sharded_model import by_layer, own_mesh, unlike
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import gradwire as gw
from gradwire.planner.weights import KEEP
from ranks import on

LEAST = torch.finfo(torch.float32).min


class Masked(nn.Module):
    """A frozen mask beside a matrix that is trained; the mask's low values are rank 0's."""

    def __init__(self, low: float) -> None:
        super().__init__()
        mask = torch.zeros(5, 64)  # uneven shards
        mask[0, 1::2] = low
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.table = nn.Parameter(torch.randn(5, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (torch.softmax(self.mask, -1) * self.table).sum()


def decoded(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole mask and table, as a forward gathers them."""
    module.unshard()
    found = module.mask.detach().clone(), module.table.detach().clone()
    module.reshard()
    assert not unlike(dict(zip(("mask", "table"), found, strict=True)))
    return found


@on(2, *KEEP)
def test_a_mask_is_gathered_as_it_is(rank: int, keep: str) -> None:
    for low in (-torch.inf, LEAST, -1e4):
        model: Any = Masked(low)
        mask = model.mask.detach().clone()
        fully_shard(model, mesh=own_mesh(), reshard_after_forward=True)
        handle = gw.attach(model, None, weights={"*": "randomshift:bits=8"}, keep=keep)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in range(4):
                loss = model(torch.ones(1)).sum()
                assert torch.isfinite(loss)
                loss.backward()
                optimizer.step()
                exact = model.table.full_tensor().detach()
                whole, table = decoded(model)
                assert low == -1e4 or torch.equal(whole, mask), (low, step)
                assert not torch.equal(table, exact), "others stay compressed"
                torch.testing.assert_close(table, exact, rtol=0, atol=0.05)
        # Of what does not change, differences are zero.
        unfit = low == -torch.inf or (low == LEAST and keep != "reference")
        said = [str(one.message) for one in warned if "uncompressed" in str(one.message)]
        assert len(said) == unfit, said
        assert all("gather mask uncompressed" in one for one in said)
        assert ("or near the largest float: mask" in str(handle)) == unfit


@on(2, "payload", "reference")
def test_values_that_no_codec_holds_may_come_later(rank: int, keep: str) -> None:
    """By a load, into groups that are gathered ahead of others, and some of which is frozen."""
    model: Any = nn.Sequential(Masked(0.0), Masked(0.0), Masked(0.0))
    model[1].requires_grad_(False)
    by_layer(model)
    model.set_modules_to_forward_prefetch([model[0], model[1]])
    model[1].set_modules_to_forward_prefetch([model[2]])
    handle = gw.attach(model, None, weights={"*": "randomshift:bits=8"}, keep=keep)
    state = handle.state_dict()

    def runs() -> None:
        for _ in range(2):
            model(torch.ones(1)).sum().backward()
        for module in model:
            assert torch.equal(decoded(module)[0], module.mask.full_tensor())

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        runs()
        assert not warned
        low = Masked(-torch.inf).mask
        for module in model[1:]:
            shard = module.mask.to_local()
            shard.data.copy_(low[3 * rank :][: len(shard)])  # torch counts no change
        of = model[0].mask.device_mesh, model[0].mask.placements
        model[0].load_state_dict({"mask": distribute_tensor(low.detach(), *of)}, strict=False)
        model[2].table.to_local().data[0, 0] = torch.nan if rank == 0 else 1.0  # has diverged
        runs()
        assert "largest float: 0.mask, 1.mask, 2.mask, 2.table" in str(handle)
        handle.load_state_dict(state)  # has nothing of it
        runs()
    assert model(torch.ones(1)).isnan()
    said = [str(one.message) for one in warned if "uncompressed" in str(one.message)]
    named = [one.split("gather ")[1].split(" uncompressed")[0] for one in said]
    assert sorted(named) == ["0.mask", "1.mask", "2.mask, 2.table"]
