"""Random numbers of user calls: each call draws its own, unless its step is given."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.engine import Communicator
from ranks import as_threads


def values(rank: int) -> torch.Tensor:
    return torch.randn(3000, generator=torch.Generator().manual_seed(rank))


def all_reduced(comm: Communicator, step: int | None) -> torch.Tensor:
    tensor = values(comm.rank)
    gw.all_reduce(tensor, "qsgd", group=comm, step=step)
    return tensor


def reduce_scattered(comm: Communicator, step: int | None) -> torch.Tensor:
    output = torch.empty(1500)
    gw.reduce_scatter(output, values(comm.rank), "qsgd", group=comm, step=step)
    return output


def all_gathered(comm: Communicator, step: int | None) -> torch.Tensor:
    output = torch.empty(6000)
    gw.all_gather(output, values(comm.rank), "qsgd", group=comm, step=step)
    return output


@pytest.mark.parametrize("call", [all_reduced, reduce_scattered, all_gathered])
def test_without_a_step_each_call_draws_its_own(call) -> None:  # type: ignore[no-untyped-def]
    def body(comm: Communicator) -> list[torch.Tensor]:
        return [call(comm, step) for step in (None, None, 0, 1, 0, None)]

    first, again = as_threads(2, body), as_threads(2, body)
    for results in first:
        assert torch.equal(results[2], results[4])  # step 0, twice
        different = [results[i] for i in (0, 1, 2, 3, 5)]
        for i, a in enumerate(different):
            assert not any(torch.equal(a, b) for b in different[:i])
    if call is not reduce_scattered:
        assert all(torch.equal(a, b) for a, b in zip(*first, strict=True))
    for before, now in zip(first, again, strict=True):  # a program draws the same when run again
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_a_restarted_run_draws_what_an_uninterrupted_one_does() -> None:
    def body(comm: Communicator) -> tuple[list[torch.Tensor], dict[str, int]]:
        drawn = [all_reduced(comm, None), all_gathered(comm, None)]
        state = gw.state_dict(comm)
        return [*drawn, all_reduced(comm, None), reduce_scattered(comm, None)], state

    whole = as_threads(2, body)

    def resumed(comm: Communicator) -> list[torch.Tensor]:
        gw.load_state_dict(whole[comm.rank][1], comm)
        return [all_reduced(comm, None), reduce_scattered(comm, None)]

    for (drawn, state), again in zip(whole, as_threads(2, resumed), strict=True):
        assert state == {"calls": 2}
        assert all(torch.equal(a, b) for a, b in zip(drawn[2:], again, strict=True))
