"""The tests that an aggregator should pass, on the skeleton. Copy this file with it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import Parameters, Shape, drawn
from gradwire import ConfigError
from gradwire.aggregators import Aggregator, ErrorFeedback
from gradwire.engine import Communicator
from ranks import as_threads

EXAMPLE = Path(__file__).parents[2] / "examples" / "skeleton_aggregator.py"
Votes: Any = runpy.run_path(str(EXAMPLE))["Votes"]
SHAPES: list[Shape] = [(20, 30), (9,), (33, 17), (), (0,)]


def trained(comm: Communicator, aggregator: Aggregator, steps: int) -> list[Any]:
    """Per step: gradients, residuals before, averages, residuals after."""
    mine, found = Parameters(comm, SHAPES, aggregator), []
    for step in range(steps):
        gradients, before = drawn(SHAPES, comm.rank, step), mine.states()
        found.append((gradients, before, mine.average(gradients), mine.states()))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_averages_what_it_says(ranks: int) -> None:
    """Against a reference in fp64, from all ranks' gradients."""
    found = as_threads(ranks, lambda comm: trained(comm, Votes(memory=0.5), 3))
    for at in range(len(SHAPES)):
        size = None
        for step in range(3):
            gradients = torch.stack([mine[step][0][at].double() for mine in found])
            mean = gradients.abs().mean()
            size = mean if size is None else (size + mean) / 2
            for mine in found:
                average = mine[step][2][at].double()
                torch.testing.assert_close(average, size * gradients.sign().mean(0))


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_lost_and_replicas_agree(ranks: int) -> None:
    found = as_threads(ranks, lambda comm: trained(comm, ErrorFeedback(Votes()), 5))
    for step in range(5):
        for at, shape in enumerate(SHAPES):
            average = found[0][step][2][at]
            assert all(torch.equal(mine[step][2][at], average) for mine in found)
            before = sum(mine[step][0][at] + mine[step][1][at].view(shape) for mine in found)
            after = sum(mine[step][3][at].view(shape) for mine in found)
            torch.testing.assert_close(ranks * average + after, before, rtol=0, atol=1e-4)


def test_any_bucketing_gives_the_same_bits() -> None:
    def body(comm: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for scopes in (None, [[3, 0], [1], [4, 2]]):
            mine = Parameters(comm, SHAPES, ErrorFeedback(Votes()))
            for step in range(3):
                averages = mine.average(drawn(SHAPES, comm.rank, step), scopes)
            found.append([*averages, *mine.states(), *mine.states("size")])
        return found

    for together, apart in as_threads(2, body):
        assert all(map(torch.equal, together, apart))


def test_what_is_not_finite_reaches_all_and_leaves_state() -> None:
    def body(comm: Communicator) -> Any:
        mine = Parameters(comm, SHAPES, ErrorFeedback(Votes()))
        mine.average(drawn(SHAPES, comm.rank, 0))
        before = [*mine.states(), *mine.states("size")]
        gradients = drawn(SHAPES, comm.rank, 1)
        if comm.rank == 1:
            gradients[0][3, 4] = float("inf")
        averages = mine.average(gradients)
        return averages[0], before, [*mine.states(), *mine.states("size")]

    for average, before, after in as_threads(2, body):
        assert not average.isfinite().any()
        for at in (0, len(SHAPES)):  # the residual and the size of that parameter
            assert torch.equal(before[at], after[at])


def test_options_and_size() -> None:
    with pytest.raises(ConfigError, match="memory=1"):
        Votes(memory=1)
    assert Votes().payload_bytes((20, 30), torch.float32) == 604
