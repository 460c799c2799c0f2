"""A replica that is lost, wherever: the others apply all of a meeting, or nothing of it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from replicas import net, sgd, train

import gradwire as gw
from ranks import as_processes, caught
from rooms.outer_loop import Fragment, OuterSteps

pytestmark = pytest.mark.multiprocess

# where rank 2 ends its process, in the third meeting
WHERE = {
    "before it encodes": (Fragment, "differences"),
    "amid the meeting": (OuterSteps, "finish"),
    "before it applies": (Fragment, "step"),
}


def loses(rank: int, where: str) -> Any:
    model = net()
    optimizer = sgd(model)
    how = {"every": 4, "fragments": 2, "delay": 1, "residual": 1.0}
    outer = gw.outer(model, optimizer, codec="qsgd:bits=4", **how)
    steps = outer._reductions
    train(model, optimizer, rank, range(8))
    steps.finish()
    before, met = steps.fingerprint(), steps.met
    residuals = {n: m.state["residual"].clone() for n, m in outer._members.items()}
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    if rank == 2:
        kind, name = WHERE[where]
        setattr(kind, name, lambda *_: os._exit(1))
    error = caught(lambda: train(model, optimizer, rank, range(8, 40)))
    applied = steps.met - met
    first = steps.fragments[steps.settings.due(10) or 0]
    if not applied:  # what was left out is left out still, and the next difference spans it
        assert steps.fingerprint() == before
        for name in first.theta:
            assert torch.equal(outer._members[name].state["residual"], residuals[name])
            assert not torch.equal(model.get_parameter(name), own[name])
    assert isinstance(error, gw.TransportError), error
    assert "start all replicas from a checkpoint" in str(caught(outer.recover))
    return error.peer, applied, steps.fingerprint()


@pytest.mark.parametrize("where", WHERE)
def test_a_replica_is_lost(where: str) -> None:
    survivors = as_processes(3, loses, where, expect_death=(2,))[:2]
    for peer, applied, _ in survivors:
        assert peer == 2
        assert applied == (where == "before it applies") or where == "amid the meeting"
    ends = {applied: fingerprint for _, applied, fingerprint in survivors}
    assert len({(applied, ends[applied]) for _, applied, _ in survivors}) == len(
        {(applied, fingerprint) for _, applied, fingerprint in survivors}
    )
