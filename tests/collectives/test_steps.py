"""Random numbers of user calls: each call draws its own, unless its step is given."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.engine import Communicator
from ranks import as_threads
from typed_values import call


def called(comm: Communicator, verb: str, step: int | None = None) -> torch.Tensor:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(comm.rank))
    return call(verb, values, comm.world_size, "qsgd", group=comm, step=step)[0]


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "all_gather"])
def test_without_a_step_each_call_draws_its_own(verb: str) -> None:
    def body(comm: Communicator) -> list[torch.Tensor]:
        return [called(comm, verb, step) for step in (None, None, 0, 1, 0, None)]

    first, again = as_threads(2, body), as_threads(2, body)
    for results in first:
        assert torch.equal(results[2], results[4])  # step 0, twice
        different = [results[i] for i in (0, 1, 2, 3, 5)]
        for i, a in enumerate(different):
            assert not any(torch.equal(a, b) for b in different[:i])
    if verb != "reduce_scatter":
        assert all(torch.equal(a, b) for a, b in zip(*first, strict=True))
    for before, now in zip(first, again, strict=True):  # a program draws the same when run again
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_a_restarted_run_draws_what_an_uninterrupted_one_does() -> None:
    def body(comm: Communicator) -> tuple[list[torch.Tensor], dict[str, int]]:
        drawn = [called(comm, "all_reduce"), called(comm, "all_gather")]
        state = gw.collectives.state_dict(comm)
        return [*drawn, called(comm, "all_reduce"), called(comm, "reduce_scatter")], state

    whole = as_threads(2, body)

    def resumed(comm: Communicator) -> list[torch.Tensor]:
        gw.collectives.load_state_dict(whole[comm.rank][1], comm)
        return [called(comm, "all_reduce"), called(comm, "reduce_scatter")]

    for (drawn, state), again in zip(whole, as_threads(2, resumed), strict=True):
        assert state == {"calls": 2}
        assert all(torch.equal(a, b) for a, b in zip(drawn[2:], again, strict=True))
